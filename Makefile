# Two commands on a bare machine: `make run` and `make test`.
# Options: make run ARGS="drafter=small sampling=sample", make test TESTS=tests/test_cli.py, make PY=python3.12 ...
PY ?= python3
VENV ?= .venv
ARGS ?=
TESTS ?=
NOTEBOOKS ?=
BIN := $(VENV)/bin

.PHONY: run test check fmt notebooks clean

run: $(VENV)/.installed
	$(BIN)/python run.py $(ARGS)

# One process per core, one thread each: threads of several processes would wait for each other.
test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(TESTS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

fmt: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Executes notebooks/ in place, a few minutes on an idle machine (the last one measures times).
notebooks: $(VENV)/.installed-test
	$(BIN)/python notebooks/execute.py $(NOTEBOOKS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Set up once, and again when pyproject.toml changes. Where pip finds a CPU build of torch, it takes that one.
$(BIN)/python:
	@$(PY) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 12) else "Python 3.11 or 3.12 is needed, $(PY) is %d.%d; give another with PY=..." % v)'
	$(PY) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[test]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $(VENV)/.installed $(VENV)/.installed-test $@
