# Two commands on a fresh machine: `make compare` and `make test`. Both make .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install compare test test-all check format catalogue clean

help:
	@echo "make compare   train a small GPT on 4 virtual hosts behind 100 Mbit/s links, torch DDP beside laconic"
	@echo "make test      run the tests, without those that take long"
	@echo "make test-all  run all tests"
	@echo "make check     ruff, pyrefly, import-linter"
	@echo "make catalogue describe the methods anew for laconic list; needed after a method or preset has changed"
	@echo "make install   make .venv with the laconic command in .venv/bin"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "laconic needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $(STAMP)

install: $(STAMP)

compare: $(STAMP)
	$(BIN)/laconic compare

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_OPTIONS)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_OPTIONS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

catalogue: $(STAMP)
	$(BIN)/python -m laconic.cli.method_facts

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist
