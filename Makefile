# `make demo` and `make test` need Python and make only: everything else is
# installed into .venv, with the versions in constraints.txt.
# Pip's own settings (index, proxy, find-links) are honoured.
#
#   make test PYTHON=python3.12            another Python
#   make test CONSTRAINTS=/dev/null        the newest releases instead of the pinned
#   make test PYTEST_ARGS="-k gather -x"   arguments for pytest
#   make test PARALLEL=2                   so many test files at the same time
#   make chaos SECONDS=3600 SEEDS="1 2"    how long, and what is drawn
#   make chaos PACE=5                      seconds between two events
#   make soak COUNT=1000000 CYCLES=5000    how many requests fail, how often is deployed
#   make soak STREAMS=100000               how many streams are opened

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?=
PARALLEL ?=
SEEDS ?= 1
SECONDS ?= 600
PACE ?= 2.5
COUNT ?= 100000
CYCLES ?= 1000
STREAMS ?= 10000

BIN := $(VENV)/bin
RUN := OMP_NUM_THREADS=1 $(BIN)/python
# Not all kinds of tests have one that PYTEST_ARGS asks for.
NONE_IS_FINE := $(if $(PYTEST_ARGS),|| test $$? -eq 5)

.DEFAULT_GOAL := help
.PHONY: help demo test test-main test-npu test-tls lint format docs chaos soak bench torch-npu wheel clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# One stamp per extra (demo, dev): made again when what it was made from changes.
$(VENV)/%.stamp: pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[$*]"
	touch $@

demo: $(VENV)/demo.stamp  ## classify 1,797 digits on a local cluster
	$(BIN)/python -m daskinfer.demo

test: test-npu test-tls test-main  ## all tests

test-main: $(VENV)/dev.stamp  ## all tests but those on the simulated NPU
	$(RUN) -m pytest -m "not slow" $(if $(PARALLEL),-n $(PARALLEL) --dist loadfile) $(PYTEST_ARGS) $(NONE_IS_FINE)

test-tls: $(VENV)/dev.stamp  ## a tenth of the tests of clusters, over TLS
	DASKINFER_TEST_TLS=tenth $(RUN) -m pytest -m "not slow" tests/cluster $(PYTEST_ARGS) $(NONE_IS_FINE)

# In a process of its own: a process has one accelerator back-end for its life.
test-npu: $(VENV)/dev.stamp  ## the tests on the simulated NPU
	$(RUN) -m pytest -m "not slow" tests/npu $(PYTEST_ARGS) $(NONE_IS_FINE)

lint: $(VENV)/dev.stamp  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/dev.stamp  ## the documentation, in docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/dev.stamp  ## the slow tests and every benchmark
	$(RUN) -m pytest -m slow $(PYTEST_ARGS)
	$(RUN) -m benchmarks

chaos: $(VENV)/dev.stamp  ## let anything die at any time, for SECONDS
	$(RUN) -m tests.chaos --seeds $(SEEDS) --seconds $(SECONDS) --pace $(PACE)

soak: $(VENV)/dev.stamp  ## all over TLS; nothing is kept of what fails, is undeployed or left
	DASKINFER_TEST_TLS=all $(RUN) -m pytest -m "not slow" tests/cluster $(PYTEST_ARGS)
	$(RUN) -m tests.soak --count $(COUNT)
	$(RUN) -m tests.soak.cycles --count $(CYCLES)
	$(RUN) -m tests.soak.streams --count $(STREAMS)

torch-npu:  ## the tests on the real torch_npu wheel, over a stand-in CANN
	$(PYTHON) tests/torch_npu/run.py

wheel: $(VENV)/dev.stamp  ## source and binary distribution, in dist/
	$(BIN)/python -m build --outdir dist .

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
