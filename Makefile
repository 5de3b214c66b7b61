# Each target sets up what it needs, then runs: a machine with Python 3.11 and make is enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
STAMP := $(VENV)/.installed
OUTSIDE := $(VENV)/.outside
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-outside check format clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make .venv with the pinned versions (instant when it is there).

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"alpa_hpc needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

quickstart: venv ## Plan, profile and train a small GPT on eight CPU devices.
	$(BIN)/python -m alpa_hpc +experiment=quickstart

test: venv ## Run all tests, two files at a time, the longest first.
	$(BIN)/python -m pytest --ignore tests/outside --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-outside: $(OUTSIDE) ## Train models of other libraries, which it installs (250 MB), by plans.
	$(BIN)/python -m pytest tests/outside --numprocesses 2 --dist loadgroup

$(OUTSIDE): $(STAMP)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[outside-models]'
	@touch $@

check: venv ## Format, lint, types and import order, as CI runs them.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/basedpyright

format: venv ## Format the code and fix what the linter can fix.
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean: ## Remove .venv, caches and build outputs; runs/ stays.
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
