# Every target works on a fresh clone: each asks for what it needs, and `setup` runs once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Tests run one thread each: two torch processes of two threads slow one another tenfold.
TEST_WORKERS ?= 2

.PHONY: setup serve test test-quick test-long fuzz soak check format lock audit sbom pin-images bench bench-gpu clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml clients/python/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e clients/python -e '.[dev]'
	@touch $@ $(VENV)/.runtime

# What serving needs, without the tools of development: every file but torch's is checked by its hash.
$(VENV)/.runtime: pyproject.toml clients/python/pyproject.toml constraints.txt requirements/serve.txt
	$(PYTHON) -m venv $(VENV)
	scripts/install-locked.sh $(abspath $(BIN))/python
	@touch $@

# KServe's client, which does not fit beside the project's own versions, for a few long tests.
$(VENV)/kserve/.installed: tests/e2e/kserve-requirements.txt
	$(PYTHON) -m venv $(VENV)/kserve
	$(VENV)/kserve/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

serve: $(VENV)/.runtime
	$(BIN)/engram serve

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m 'not long'

# The inner loop: the parts that most changes touch, without what starts servers or takes seconds.
QUICK := tests/api tests/engine tests/client/test_core.py tests/training/data tests/training/fitting \
	$(addprefix tests/model/test_,masked_pass.py ragged_pairs.py gradients.py) \
	$(addprefix tests/task_store/test_,bundle.py catalog.py changes.py events.py names.py)
test-quick: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m 'not slow and not long' $(QUICK)

# Some ten seconds or more each. Those that load or measure the machine come last, one after the other.
test-long: setup $(VENV)/kserve/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m 'long and not alone'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'long and alone'

# 20,000 mutated images, bundles, bodies, tensors, headers and log entries each; `make test-long` has a tenth.
FUZZ_CASES ?= 20000
fuzz: setup
	FUZZ_CASES=$(FUZZ_CASES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/fuzz

# A minute of tenfold overload and ten of chaos; `make test-long` has a part of both. Alone on two cores.
soak: setup
	SOAK=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/e2e/test_overload.py tests/e2e/test_chaos.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What serving needs, by version and hash: after a change of pyproject.toml or constraints.txt. Asks the indexes of pip.
lock: setup
	$(BIN)/python -m scripts.lock

# Known weaknesses of what serving needs. Asks an advisory service.
audit: setup
	$(BIN)/python -m scripts.audit

# The bill of materials of what serving needs, as in the image: a virtual environment of its own, so without our tools.
$(VENV)/locked/.installed: requirements/serve.txt constraints.txt scripts/install-locked.sh
	$(PYTHON) -m venv $(VENV)/locked
	scripts/install-locked.sh $(abspath $(VENV))/locked/bin/python
	@touch $@

sbom: $(VENV)/locked/.installed
	$(VENV)/locked/bin/python scripts/sbom.py > sbom.cdx.json

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
