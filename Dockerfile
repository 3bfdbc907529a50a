# The server's image: non-root, for a read-only root file system. docs/how-to/deploy.md says how to build and run it.
# Its layers change at different speeds: the base, the dependencies, torch, our code.
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
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/engram/bin:$PATH
RUN python3 -m venv /opt/engram \
    && useradd --uid 10001 --user-group --create-home --home-dir /var/lib/engram \
               --shell /usr/sbin/nologin engram
# Each file is compared with its sha256: another one ends the build.
COPY constraints.txt requirements/serve.txt /opt/engram/
RUN pip install --require-hashes -r /opt/engram/serve.txt
# torch is not in that list, since its file is another one on each index; its version is fixed. What it needs is there
# already. Unset, it is the build on PyPI, which brings CUDA's libraries. An index of CPU builds goes before it.
ARG TORCH_INDEX=
RUN pip install -c /opt/engram/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl

# The bill of materials of the runtime environment (CycloneDX). Nothing else of this stage is kept.
FROM runtime AS sbom
RUN python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install -c /opt/engram/constraints.txt cyclonedx-bom \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible \
        --output-file /sbom.cdx.json /opt/engram/bin/python3

FROM runtime
COPY --from=sbom /sbom.cdx.json /opt/engram/sbom.cdx.json
# The server writes only below /var/lib/engram and /tmp.
ENV HOME=/var/lib/engram \
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
