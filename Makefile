# All that a fresh machine needs is Python 3.11+, make and a C compiler.
# The bytecode cache halves a server's start-up time, so no recipe inherits its absence.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
MODEL ?=
SERVER_ARGS ?=

.PHONY: install demo test lint bench report wheel clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	    f"Python {sys.version.split()[0]} is too old: echo-sgl needs 3.11. Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip uv
	$(BIN)/python -m uv pip install --python $(BIN)/python --quiet --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/python -m eval.demo$(if $(MODEL), --model $(MODEL))$(if $(SERVER_ARGS), --server-args='$(SERVER_ARGS)')

test: install
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m eval.bench

report: install
	$(BIN)/python -m eval.report_page

# A package that pyproject.toml forgets is missing only from the wheel.
wheel: install
	rm -rf build/wheel build/lib build/bdist.*
	$(BIN)/python -m build --wheel --outdir build/wheel . >/dev/null
	$(BIN)/python -m zipfile -e build/wheel/*.whl build/wheel/unpacked
	cd build/wheel && PRESETS="$(basename $(notdir $(wildcard configs/*.toml)))" PYTHONPATH=unpacked \
	    ../../$(BIN)/python -P -c "$$WHEEL_CHECK"

define WHEEL_CHECK
import importlib, os, pathlib, pkgutil, echo_sgl
root = pathlib.Path(echo_sgl.__file__).parent
assert root.parent.name == "unpacked", f"imported from {root}"
heavy = ("echo_sgl.engine.", "echo_sgl.cpu.", "echo_sgl.cli.__main__", "echo_sgl.batches.store.migrations.env")
names = [m.name for m in pkgutil.walk_packages([str(root)], "echo_sgl.")]
for name in names:
    name.startswith(heavy) or importlib.import_module(name)
from echo_sgl.config import preset_names
assert preset_names() == sorted(os.environ["PRESETS"].split()), "presets are not in the wheel"
grafana = sorted(path.name for path in (root / "configs" / "grafana").iterdir())
assert grafana == ["alerts.yml", "echo.json"], f"in the wheel's grafana folder: {grafana}"
print(f"wheel: {len(names)} modules, presets {preset_names()}")
endef
export WHEEL_CHECK

clean:
	rm -rf build dist *.egg-info
