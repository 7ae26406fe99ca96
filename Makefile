# Needs python3 ≥ 3.11 with venv and pip; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: tour test lint
.DELETE_ON_ERROR:

tour: $(READY)
	$(BIN)/jaxpar tour $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Made anew only where pip does not work in it, as after an interrupted first try.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jaxpar needs Python 3.11 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; Debian and Ubuntu have it in the package python3-venv."; \
	  exit 1; } >&2
	$(BIN)/python -m pip install -qq --editable '.[test]'
	@touch $@
