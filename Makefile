# Every target creates .venv and installs its requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread per process: the processes of a pipeline share the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

# Workers, as many as the machine has cores and memory for, take file after file. Files that take long come first, so that
# no worker is left alone with them.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0
FILES := $(sort $(shell find tests -name 'test_*.py'))
LONG := $(filter tests/fuzz/% tests/multiprocess/% tests/families/% tests/faults/% tests/gpu/% tests/plan/% tests/vocabulary/%,$(FILES))
TESTS := $(LONG) $(filter-out $(LONG),$(FILES))

# Of make fault-test and make fuzz; MINUTES=60 sets a duration. SEED=123 repeats a random choice, of make test too.
RUNS ?= 100
SEED ?=
MINUTES ?=

# PART=1/4 is a quarter of make test-all or families; TYPES="llama gemma2" are the families of two model types.
PART ?= 1/1
TYPES ?=

# Files of benchmarks/results, without their ending, for make figures; default: all.
FIGURES ?=
part = $(shell printf '%s\n' $(1) | awk -v part=$(PART) '{ split(part, of, "/") } (NR - of[1]) % of[2] == 0')

.PHONY: help install train test test-all fault-test fuzz families golden figures gpu-test lint format bench docs clean

help:
	@echo "make train       train the quickstart model on 4 local processes and print text that it writes"
	@echo "make test        run the tests that every change must pass, on another part of all combinations each time;"
	@echo "                 SEED=123 repeats a choice"
	@echo "make test-all    run every test on every combination; PART=1/4 runs a quarter of the files"
	@echo "make lint        ruff and mypy"
	@echo "make docs        build the documentation into site/, without a network"
	@echo "make bench       compare the vocabulary modes with each other and with torch's own schedule, and tensor ranks"
	@echo "                 with devices and replicas"
	@echo "make fault-test  make processes fail at random points of 100 random runs (RUNS=1 SEED=123 repeats one); then"
	@echo "                 cut network links and attack runs from outside, in network namespaces, if root may create them"
	@echo "make fuzz        compare 100 random pipelines with the same models in one process; MINUTES=60, RUNS, SEED"
	@echo "make families    compare a small model of every type in transformers with one process, and write"
	@echo "                 docs/families.md; PART=1/8 runs an eighth of them, TYPES='llama gemma2' these types"
	@echo "make golden      compare estimates of the models in examples/models with those of before; MODELS=llama-3.1-8b"
	@echo "make figures     repeat the measurements that the documentation quotes, as far as this machine can, and write"
	@echo "                 docs/measurements.md; takes hours; FIGURES='balance_2_cores schedules' repeats these"
	@echo "make gpu-test    run the tests that need an NVIDIA GPU, if there is one"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

install: $(STAMP)

train: $(STAMP)
	$(BIN)/evenpipe train examples/quickstart.toml
	$(BIN)/evenpipe draw runs/quickstart/traces/step-00000100.json

test: CHOICE := --quick $(if $(SEED),--seed $(SEED))
test test-all: $(STAMP)
	$(PYTEST) $(CHOICE) $(call part,$(TESTS))

fault-test: $(STAMP)
	$(BIN)/python tests/faults/run_faults.py --runs $(RUNS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/faults/run_network.py

fuzz: $(STAMP)
	$(BIN)/python tests/fuzz/run_fuzz.py --seed $(or $(SEED),0) $(if $(MINUTES),--minutes $(MINUTES),--runs $(RUNS))

families: $(STAMP)
	$(BIN)/python tests/families/run_families.py $(TYPES) --part $(PART) --record

golden: $(STAMP)
	$(BIN)/python benchmarks/golden.py --only estimates $(if $(MODELS),--models $(MODELS))

gpu-test: $(STAMP)
	$(BIN)/python tests/gpu/run_gpu.py

# Benchmarks are seldom run: whatever they import and call must exist.
NAMES_ONLY := $(addprefix --disable-error-code=,union-attr operator arg-type dict-item assignment index var-annotated)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd benchmarks && $(abspath $(BIN))/mypy --config-file ../pyproject.toml $(NAMES_ONLY) *.py gpu/*.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

figures: $(STAMP)
	$(BIN)/python benchmarks/figures.py $(FIGURES)

bench: $(STAMP)
	$(BIN)/python benchmarks/balance.py --schedules 1f1b --hidden-size 512 --microbatches 16 --memory
	$(BIN)/python benchmarks/tensor_ranks.py

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
