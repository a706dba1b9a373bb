# Every target creates .venv and installs its requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread per process: the processes of a pipeline share the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

ALONE := $(patsubst %,tests/multiprocess/test_%.py,watch launch failures) tests/faults tests/gpu

# For make fault-test and make fuzz; MINUTES=60 sets a duration.
RUNS ?= 100
SEED ?= 0
MINUTES ?=

# Of make families: an eighth of the configurations is PART=1/8; TYPES="llama gemma2" are those of two model types.
PART ?= 1/1
TYPES ?=

.PHONY: help install train test test-all fault-test fuzz families gpu-test lint format bench docs clean

help:
	@echo "make train       train the quickstart model on 4 local processes and print text that it writes"
	@echo "make test        run the tests, except the slow ones"
	@echo "make test-all    run all tests"
	@echo "make lint        ruff and mypy"
	@echo "make docs        build the documentation into site/, without a network"
	@echo "make bench       compare the vocabulary modes with each other and with torch's own schedule"
	@echo "make fault-test  make processes fail at random points of 100 random runs (RUNS=1 SEED=123 repeats one); then"
	@echo "                 cut network links and attack runs from outside, in network namespaces, if root may create them"
	@echo "make fuzz        compare 100 random pipelines with the same models in one process; MINUTES=60, RUNS, SEED"
	@echo "make families    compare a small model of every type in transformers with one process, and write"
	@echo "                 docs/families.md; PART=1/8 runs an eighth of them, TYPES='llama gemma2' these types"
	@echo "make gpu-test    run the tests that need an NVIDIA GPU, if there is one"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

install: $(STAMP)

train: $(STAMP)
	$(BIN)/evenpipe train examples/quickstart.toml

# Tests of silent and dying processes run alone.
test: SELECTED := -m "not slow"
test test-all: $(STAMP)
	$(BIN)/python -m pytest $(SELECTED) -n 2 --dist loadfile $(ALONE:%=--ignore=%)
	$(BIN)/python -m pytest $(SELECTED) $(ALONE)

fault-test: $(STAMP)
	$(BIN)/python tests/faults/run_faults.py --runs $(RUNS) --seed $(SEED)
	$(BIN)/python tests/faults/run_network.py

fuzz: $(STAMP)
	$(BIN)/python tests/fuzz/run_fuzz.py --seed $(SEED) $(if $(MINUTES),--minutes $(MINUTES),--runs $(RUNS))

families: $(STAMP)
	$(BIN)/python tests/families/run_families.py $(TYPES) --part $(PART) --record

gpu-test: $(STAMP)
	$(BIN)/python tests/gpu/run_gpu.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/python benchmarks/balance.py --schedules 1f1b --hidden-size 512 --microbatches 16 --memory

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
