# Needs Python 3.11+ and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra arguments for pip, for example an index of CPU-only builds (see README).
PIP_FLAGS ?=
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt
PINS := pyproject.toml constraints.txt

.PHONY: demo test test-full lint format docs bench plots coverage clean

demo: $(VENV)/.demo
	$(BIN)/zeroplus demo

test: lint
	$(BIN)/python -m pytest

test-full: lint
	$(BIN)/python -m pytest --full

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/step_time.py

plots: $(VENV)/.bench
	@mkdir -p build/plots
	$(BIN)/python benchmarks/step_trace.py build/plots/step.png
	$(BIN)/python benchmarks/scaling.py --png build/plots/scaling.png

coverage: $(VENV)/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

clean:
	rm -rf $(VENV) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis lightning_logs zeroplus-demo .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Expected Python 3.11 or newer, got " + sys.version.split()[0] + ". Name one: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made $(PINS)
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.made $(PINS)
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.made $(PINS)
	$(INSTALL) -e '.[bench]'
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.made $(PINS)
	$(INSTALL) -e '.[docs]'
	@touch $@ $(VENV)/.demo
