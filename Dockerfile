# The server's image, for CPUs or for NVIDIA GPUs. docs/how-to/deploy.md explains how to build and run it.
#   docker build -t engram:cpu --build-arg TORCH_INDEX=ADDRESS .
#   docker build -t engram:cuda --build-arg DEVICE=cuda .
# Layers that change rarely come first: base, compiler, dependencies, torch, our code.
ARG BASE=python:3.11.14-slim-bookworm

# Our two packages as wheels. Nothing else of this stage is kept.
FROM ${BASE} AS wheels
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY requirements/serve.txt ./requirements/
RUN python3 -m venv /opt/build \
    && sed -n '/^setuptools==/,/[^\\]$/p' requirements/serve.txt > /build.txt \
    && /opt/build/bin/pip install --require-hashes -r /build.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . ./clients/python

FROM ${BASE} AS runtime
LABEL org.opencontainers.image.title="Engram" \
      org.opencontainers.image.description="One frozen Vision Transformer, any number of tasks, one pass." \
      org.opencontainers.image.licenses="Apache-2.0"
# cpu or cuda.
ARG DEVICE=cpu
# Triton compiles the launcher of the attention kernel for task rows when a worker starts. The headers of Python are
# part of the official Python image.
# hadolint ignore=DL3008
RUN case "$DEVICE" in \
        cpu) ;; \
        cuda) apt-get update \
            && apt-get install --yes --no-install-recommends gcc libc6-dev \
            && rm -rf /var/lib/apt/lists/* ;; \
        *) echo "error: DEVICE is '$DEVICE'; valid devices are cpu and cuda" >&2; exit 1 ;; \
    esac
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/engram/bin:$PATH
RUN python3 -m venv /opt/engram \
    && useradd --uid 10001 --user-group --create-home --home-dir /var/lib/engram \
               --shell /usr/sbin/nologin engram \
    && install --directory --owner engram --group engram /var/lib/engram/models
# Each file is compared with its sha256. A file that differs stops the build.
COPY constraints.txt requirements/serve.txt /opt/engram/
RUN pip install --require-hashes -r /opt/engram/serve.txt
# torch is not in that list: each index has another file of it. Its version is fixed, and its dependencies are
# installed already. The script stops the build if torch is not the build for DEVICE.
COPY deploy/install_torch.py /opt/engram/
ARG TORCH_INDEX=
RUN python3 /opt/engram/install_torch.py "$DEVICE"
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl

# The bill of materials of the runtime environment (CycloneDX). Nothing else of this stage is kept.
FROM runtime AS sbom
RUN python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install -c /opt/engram/constraints.txt cyclonedx-bom \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible \
        --output-file /sbom.cdx.json /opt/engram/bin/python3

FROM runtime
COPY --from=sbom /sbom.cdx.json /opt/engram/sbom.cdx.json
# The server writes only below /var/lib/engram and /tmp. NVIDIA's container toolkit reads NVIDIA_DRIVER_CAPABILITIES.
ENV HOME=/var/lib/engram \
    HF_HOME=/var/lib/engram/models \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ENGRAM_STORE=/var/lib/engram/store \
    ENGRAM_HOST=0.0.0.0 \
    ENGRAM_PORT=8000
USER 10001:10001
WORKDIR /var/lib/engram
VOLUME /var/lib/engram
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=2m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['ENGRAM_PORT'] + '/readyz', timeout=4)"]
ENTRYPOINT ["engram"]
CMD ["serve"]
