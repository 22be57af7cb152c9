# All that a fresh machine needs is Python 3.11+, make and a C compiler.
# The bytecode cache halves a server's start-up time, so no recipe inherits its absence.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
MODEL ?=

.PHONY: install demo test lint bench corun clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip uv
	$(BIN)/python -m uv pip install --python $(BIN)/python --quiet --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/python -m eval.demo $(if $(MODEL),--model $(MODEL))

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m eval.bench

clean:
	rm -rf build dist *.egg-info
