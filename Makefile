# edgeduet: `make demo` shows it at work, `make test` checks it. `make help` lists the rest.

VENV ?= .venv
INSTALLER ?= pip
TORCH_INDEX ?=
DATA :=
SEEDS := 1
OUT :=
SET :=
PYTEST_ARGS :=
BENCH_ARGS :=

# The first Python on the path that is new enough.
ifndef PYTHON
PYTHON := $(shell for name in python3 python3.13 python3.12 python3.11 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$name; break; }; done)
endif

BIN := $(VENV)/bin

# On few cores more threads cost more than they gain, and one thread is what makes runs repeatable.
export OMP_NUM_THREADS ?= 1
# Installed code only: a PYTHONPATH of the caller would shadow it.
unexport PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help demo test test-long check format bench clean venv-sim venv-dev python-found

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10
	@echo
	@echo "for demo:   DATA=FOLDER or DATA=hub:NAME, SEEDS=$(SEEDS), OUT=runs/demo, SET='key=value ...'"
	@echo "for test:   PYTEST_ARGS='-k name'"
	@echo "to install: INSTALLER=pip|uv, PYTHON=python3.12, VENV=$(VENV), TORCH_INDEX=URL of an index of CPU wheels of torch"

python-found:
	@if [ -z "$(PYTHON)" ]; then echo "error: no Python 3.11 or newer on the PATH; install one, or set PYTHON=/path/to/python" >&2; exit 2; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: PYTHON=$(PYTHON) is not a Python 3.11 or newer" >&2; exit 2; }

venv-sim venv-dev: venv-%: python-found
	@$(PYTHON) tools/make_venv.py --venv "$(VENV)" --extra $* --installer "$(INSTALLER)" --torch-index "$(TORCH_INDEX)"

demo: python-found ## run the main job and say where its report is (DATA=FOLDER or DATA=hub:NAME for real images)
	@$(PYTHON) tools/demo.py --data "$(DATA)" --seeds "$(SEEDS)" --out "$(OUT)" --set "$(SET)" \
		--venv "$(VENV)" --installer "$(INSTALLER)" --torch-index "$(TORCH_INDEX)"

test: venv-dev ## lint, format, types and all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: venv-dev ## tests that take minutes each: devices killed in a deployed system
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

check: venv-dev ## lint, format and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

bench: venv-sim ## measure the engines against each other, about half an hour (BENCH_ARGS=--quick: two minutes)
	$(BIN)/python simulations/benchmarks/engine_bench.py $(BENCH_ARGS)

format: venv-dev ## put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and build output (runs/ stays)
	rm -rf "$(VENV)" build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find shared server client simulations tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
