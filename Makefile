# Two commands on a fresh machine: `make compare` and `make test`. Both make .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two workers for the tests that start processes of their own, one for the others (tests/conftest.py); make test AT_ONCE=
# runs all in turn.
AT_ONCE := -n 3 --dist loadgroup
# Hundreds of tests start processes, which load laconic a third faster if it has been compiled.
COMPILE = $(BIN)/python -m compileall -q -j 2 src tests benchmarks

.PHONY: help install compare test test-all check format catalogue docs clean

help:
	@echo "make compare   train a small GPT on 4 virtual hosts behind 100 Mbit/s links with torch DDP and with laconic"
	@echo "make test      run the tests, without those that take long"
	@echo "make test-all  run all tests"
	@echo "make check     ruff, pyrefly, import-linter"
	@echo "make catalogue describe the methods for laconic list again; needed after a method or preset has changed"
	@echo "make docs      build the documentation site into build/docs; open build/docs/index.html"
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
	$(COMPILE)
	$(BIN)/python -m pytest $(AT_ONCE) -m "not slow" $(PYTEST_OPTIONS)

test-all: $(STAMP)
	$(COMPILE)
	$(BIN)/python -m pytest $(AT_ONCE) $(PYTEST_OPTIONS)

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

# MkDocs 1.6 is pinned; the variable silences an announcement about later versions.
docs: $(STAMP)
	$(BIN)/python -m website.pictures
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/docs/index.html"

clean:
	rm -rf build $(VENV) .pytest_cache .ruff_cache .hypothesis dist
