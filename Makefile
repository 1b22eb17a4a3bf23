# Everything a person needs: `make demo`, `make test`. The virtual environment sets itself up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
READY := $(VENV)/.ready
BENCH := .venv-bench
TRAINERS := .venv-trainers
RAY := .venv-ray

# Tests start some hundred interpreters: each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

# Groups of dependencies are installed by pip 25.1 or newer, which venv may not bring.
venv = $(PYTHON) -m venv $(@D) && $(install) --quiet --upgrade 'pip>=25.1'
install = $(@D)/bin/python -m pip install --disable-pip-version-check --progress-bar off
torch = $(install) torch==2.13.0
other = .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# The package with the extras that its tests and benchmarks read and write with; a group of pyproject.toml comes on top.
package = --editable '.[array_record,arrow,hdf5,lance,media,stores,tfrecord,zstd]'
developers = $(package) --group dev

.PHONY: demo test test-trainers test-ray test-python check format laws deep bench bench-smoke clean

demo: $(RUNTIME)  ## train, be killed, resume, compare
	$(BIN)/streamline demo

# Nor do they multiply matrices, for which NumPy starts a thread for each core.
test: export OPENBLAS_NUM_THREADS := 1
test: $(READY)  ## the tests
	.ci/servers
	$(BIN)/python -m pytest -q --numprocesses auto --dist worksteal -m "not long" --ignore tests/trainers --ignore tests/ray
	@echo "Not run: what takes long, most cases of many tests included: make laws"
	@echo "Not run: tests/trainers, which need torch, JAX and trainers: make test-trainers"
	@echo "Not run: tests/ray, which need Ray: make test-ray"

test-trainers: $(TRAINERS)/.ready  ## the tests with torch, JAX, Lightning, Accelerate and transformers: some 2 GB
	$(TRAINERS)/bin/python -m pytest -q --numprocesses auto --dist worksteal --timeout 300 tests/trainers tests/transforms/test_collate.py tests/backends/ipc/test_tensors.py tests/backends/hosts/test_tensors_in_place.py tests/transfer/test_real_torch.py tests/core/test_digests.py
	$(TRAINERS)/bin/python -m pytest -q tests/test_examples.py -k "torch or ddp or teacher"

test-ray: $(RAY)/.ready  ## the tests with Ray, on clusters of this machine: some 500 MB
	$(RAY)/bin/python -m pytest -q --timeout 300 tests/ray
	$(RAY)/bin/python -m pytest -q tests/test_examples.py -k ray

# Made here rather than as a prerequisite: `.venv` is of the usual Python.
test-python: export OPENBLAS_NUM_THREADS := 1
test-python:  ## the tests that show what another Python does otherwise: make test-python PYTHON=python3.14
	@test -x $(BIN)/python || $(MAKE) PYTHON=python3 $(RUNTIME)
	@$(MAKE) $(other)/.ready
	$(other)/bin/python -m pytest -q --numprocesses auto --dist worksteal tests/core tests/merge tests/transforms tests/snapshot tests/backends/hosts

check: $(READY)  ## format, lint, types, tests, and a smoke of the benchmarks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test laws bench-smoke

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

laws: export OPENBLAS_NUM_THREADS := 1
laws: $(READY)  ## what takes long: random pipelines, deaths at every point, whole products, programs that are started
	.ci/servers
	$(BIN)/python -m pytest -q --numprocesses auto --dist worksteal -m long --ignore tests/trainers --ignore tests/ray

deep: $(READY)  ## the law kit on thousands of random pipelines; then whole products and every death, at length
	STREAMLINE_EXAMPLES=50 $(BIN)/python -m pytest -q --timeout 3600 tests/laws
	STREAMLINE_EXAMPLES=2 $(BIN)/python -m pytest -q --timeout 3600 $$(grep -rl "laws.profile import.*\(FACTOR\|SEEDS\|GENERATIONS\|covering\|sampled\|in_turn\)" tests --include "test_*.py" --exclude-dir laws --exclude-dir ray)

bench-smoke: $(READY)
	$(BIN)/python -m bench --smoke

bench: $(BENCH)/.ready  ## the tables, with the peers
	$(BENCH)/bin/python -m bench

$(RUNTIME): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamline needs Python 3.11 or newer; make PYTHON=...")'
	@echo "== What streamline itself needs, into $(@D): once, some 20 s"
	$(venv)
	$(install) --editable .
	@touch $@

$(READY): $(RUNTIME)
	@echo "== What its tests need, too: once, less than a minute"
	$(install) $(developers)
	@touch $@

$(BENCH)/.ready: pyproject.toml
	$(venv)
	$(torch)
	$(install) $(package) --group bench
	touch $@

$(TRAINERS)/.ready: pyproject.toml
	$(venv)
	$(torch)
	$(install) $(package) --group trainers
	touch $@

$(RAY)/.ready: pyproject.toml
	$(venv)
	$(install) --editable . --group ray-tests
	touch $@

.venv-3.%/.ready: pyproject.toml
	$(PYTHON) -m venv --without-pip $(@D)  # Debian's has none to copy
	$(BIN)/python -m pip --python $(@D)/bin/python install --disable-pip-version-check --progress-bar off pip
	$(install) $(developers)
	touch $@

clean:
	rm -rf $(VENV) .venv-3.* $(BENCH) $(TRAINERS) $(RAY) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
