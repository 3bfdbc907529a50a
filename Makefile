# Every target works on a fresh clone: it installs what it needs, once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Tests run one thread each: two torch processes of two threads slow one another tenfold.
TEST_WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# CI sets it, because its machine is shared: tests that failed run once more, one after the other.
RETRY_FAILED ?=
AGAIN = $(if $(RETRY_FAILED),|| $(PYTEST) --last-failed --last-failed-no-failures none)

.PHONY: setup serve test test-quick test-long fuzz soak check format docs site reference proto release lock audit sbom pin-images bench bench-gpu clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml clients/python/pyproject.toml constraints.txt requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e clients/python -e '.[batch,grpc,tracing,openid,ray]' -r requirements/dev.txt
	@touch $@ $(VENV)/.runtime

# What serving needs, without the tools of development: every file but torch's is checked by its hash.
# TORCH_INDEX is the address of another index for torch, such as that of its CPU builds.
TORCH_INDEX ?=
$(VENV)/.runtime: pyproject.toml clients/python/pyproject.toml constraints.txt requirements/serve.txt
	$(PYTHON) -m venv $(VENV)
	TORCH_INDEX='$(TORCH_INDEX)' scripts/install-locked.sh $(abspath $(BIN))/python
	@touch $@

# KServe's client, which does not fit beside the project's own versions, for a few long tests.
$(VENV)/kserve/.installed: tests/e2e/kserve-requirements.txt
	$(PYTHON) -m venv $(VENV)/kserve
	$(VENV)/kserve/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

serve: $(VENV)/.runtime
	$(BIN)/engram serve

test: setup
	$(PYTEST) -n $(TEST_WORKERS) --dist worksteal -m 'not long' $(AGAIN)

# The inner loop: the parts that most changes touch, without what starts servers or takes seconds.
QUICK := tests/api tests/engine tests/client/test_core.py tests/training/engram_training/data tests/training/engram_training/fitting \
	$(addprefix tests/model/test_,masked_pass.py ragged_pairs.py gradients.py) \
	$(addprefix tests/task_store/test_,bundle.py catalog.py changes.py events.py names.py)
test-quick: setup
	$(PYTEST) -n $(TEST_WORKERS) --dist worksteal -m 'not slow and not long' $(QUICK)

# Some ten seconds or more each. Those that load or measure the machine come last, one after the other.
test-long: setup $(VENV)/kserve/.installed
	$(PYTEST) -n $(TEST_WORKERS) --dist worksteal -m 'long and not alone' $(AGAIN)
	$(PYTEST) -m 'long and alone' $(AGAIN)

# 20,000 mutated images, bundles, bodies, tensors, headers and log entries each; `make test-long` has a tenth.
FUZZ_CASES ?= 20000
fuzz: setup
	FUZZ_CASES=$(FUZZ_CASES) $(PYTEST) -s tests/fuzz

# A minute of tenfold overload and ten of chaos; `make test-long` has a part of both. Alone on two cores.
soak: setup
	SOAK=1 $(PYTEST) -s tests/e2e/test_overload.py tests/e2e/test_chaos.py

check: setup node_modules/.package-lock.json
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.generate_docs --check
	$(BIN)/python -m scripts.check_english
	$(BIN)/python -m scripts.compile_proto --check
	npm run --silent check
	$(BIN)/python -m scripts.site

# TypeScript and Biome, for JavaScript; mermaid, for the documentation site.
node_modules/.package-lock.json: package-lock.json
	npm ci --silent --no-audit --no-fund

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The reference tables in docs/, generated from the code. `make check` fails while they are out of date.
reference: setup
	$(BIN)/python -m scripts.generate_docs

# The documentation site in build/site: links are checked, search and pictures work without a network.
site: setup node_modules/.package-lock.json
	$(BIN)/python -m scripts.site

# The same, served on this machine.
DOCS_PORT ?= 8008
docs: site
	@echo 'The documentation is at http://127.0.0.1:$(DOCS_PORT)/'
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site $(DOCS_PORT)

# The description of the gRPC service in its compiled form. `make check` fails while it is out of date.
proto: setup
	$(BIN)/python -m scripts.compile_proto

# Both wheels in dist/: built, checked, installed into an empty environment, served from and asked.
release: setup
	rm -rf dist build *.egg-info
	$(BIN)/python -m build --wheel --no-isolation --outdir dist clients/python
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*.whl
	WHEELS=dist OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long tests/e2e/test_wheels.py

# Versions and hashes of the serving dependencies, after a change of pyproject.toml or constraints.txt.
lock: setup
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
		--constraint constraints.txt --extra grpc --extra tracing --extra openid \
		--no-emit-package torch --no-emit-package engram-vit \
		--custom-compile-command 'make lock' --output-file requirements/serve.txt pyproject.toml

# Known vulnerabilities of the serving dependencies. Needs access to an advisory service.
audit: setup
	$(BIN)/pip-audit --strict --disable-pip --no-deps --requirement requirements/serve.txt
	grep '^torch==' constraints.txt | $(BIN)/pip-audit --strict --disable-pip --no-deps --requirement /dev/stdin

# A CycloneDX bill of materials of an environment that has the serving dependencies only.
$(VENV)/locked/.installed: requirements/serve.txt constraints.txt scripts/install-locked.sh
	$(PYTHON) -m venv $(VENV)/locked
	scripts/install-locked.sh $(abspath $(VENV))/locked/bin/python
	@touch $@

sbom: setup $(VENV)/locked/.installed
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file sbom.cdx.json $(VENV)/locked/bin/python

# Base and service images by digest, where there is a registry to ask.
pin-images:
	$(PYTHON) scripts/pin_images.py

# Half an hour, alone on the machine; writes docs/reference/performance.md and the pictures of the README.
bench: setup
	$(BIN)/python -m benchmarks

# Minutes, on a machine with a GPU; writes docs/reference/performance-gpu.md. Without one it says so and fails.
bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
