# Every target works from a clean clone; `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
PY := $(BIN)/python
# Without --exclude ruff passes over every folder called dist.
RUFF_CHECK := --exclude __pycache__ --line-length 110 --target-version py310 --select E,F,W,I,B,UP,SIM,RUF,PT --ignore B028,PT018,SIM108,RUF002,RUF003,RUF005
RUFF_FORMAT := --exclude __pycache__ --line-length 110 --target-version py310
SOURCES := $(wildcard dflop_ds benchmarks tests)
COMPAT := 0.19.3 newest
TRANSFORMERS := 5.22 5.23 5.24

export PATH := $(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.torch_extensions
export OMP_NUM_THREADS ?= 1
export PIP_ROOT_USER_ACTION = ignore
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help install demo test lint format bench compat clean $(addprefix compat-,$(COMPAT)) \
        compat-transformers $(addprefix compat-transformers-,$(TRANSFORMERS))

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 21

install: ## create $(VENV), install the package, build DeepSpeed's CPU op, check the machine
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -c .ci/constraints.txt -e '.[test,lint]'
	$(BIN)/dflop-ds doctor --prebuild

demo: ## make a small model and data set, and train on them with 2 ranks
	$(PY) -m benchmarks.demo --out runs/demo

# Phase 1 runs on 2 workers; phase 2 serially, as each of its tests starts 2 ranks. Code 5: no test collected.
test: ## run every test that needs no GPU
	$(PY) -m pytest tests -n 2 --dist loadgroup -m "not gpu" --ignore=tests/dist
	$(PY) -m pytest tests/dist -m "not gpu" || [ $$? -eq 5 ]

lint: ## style, types and import rules
	$(BIN)/ruff check --isolated $(RUFF_CHECK) $(SOURCES)
	$(BIN)/ruff format --isolated --check $(RUFF_FORMAT) $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: ## rewrite the sources in the style that `lint` checks
	$(BIN)/ruff check --isolated --fix $(RUFF_CHECK) $(SOURCES)
	$(BIN)/ruff format --isolated $(RUFF_FORMAT) $(SOURCES)

bench: ## run the benchmarks, about twenty minutes; results in runs/bench
	mkdir -p runs/bench
	$(PY) benchmarks/scheduler.py --json runs/bench/scheduler.json
	$(PY) benchmarks/cost_model.py --json runs/bench/cost_model.json
	$(PY) -m benchmarks.parity --json runs/bench/parity.json
	$(PY) benchmarks/emulated_cluster.py --json runs/bench/emulated_cluster.json
	$(PY) benchmarks/planner.py --json runs/bench/planner.json
	$(PY) benchmarks/hf_trainer.py --json runs/bench/hf_trainer.json
	$(PY) benchmarks/weights_io.py --json runs/bench/weights_io.json

compat: $(addprefix compat-,$(COMPAT)) ## contract tests with the oldest and the newest supported DeepSpeed

$(addprefix compat-,$(COMPAT)): compat-%:
	V=$(CURDIR)/.venv-compat-$*; export PATH=$$V/bin:$$PATH TORCH_EXTENSIONS_DIR=$(CURDIR)/.torch_extensions/compat-$*; \
	set -e; test -x $$V/bin/python || $(PYTHON) -m venv $$V; \
	$$V/bin/python -m pip install -U -c <(grep '^torch==' .ci/constraints.txt) -e '.[test]' \
	    '$(if $(filter newest,$*),deepspeed>=0.19.3$(comma)<0.20,deepspeed==$*)'; \
	$$V/bin/dflop-ds doctor --prebuild; \
	$$V/bin/python -m pytest tests/contract; \
	$$V/bin/python -m pytest tests/dist -m compat || [ $$? -eq 5 ]

compat-transformers: $(addprefix compat-transformers-,$(TRANSFORMERS)) ## tests of the Trainer callback with three releases

$(addprefix compat-transformers-,$(TRANSFORMERS)): compat-transformers-%:
	V=$(CURDIR)/.venv-compat-transformers-$*; set -e; test -x $$V/bin/python || $(PYTHON) -m venv $$V; \
	$$V/bin/python -m pip install -U -c <(grep -v '^transformers==' .ci/constraints.txt) -e '.[test]' 'transformers==$*.*'; \
	$$V/bin/python -m pytest tests/contract/test_hf_trainer_contract.py tests/unit/integrations

comma := ,

clean: ## remove everything that the other targets made
	rm -rf $(VENV) .venv-compat-* .torch_extensions build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
