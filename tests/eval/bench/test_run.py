"""What the bench prints and keeps, from rows made by hand."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from eval.bench.run import ROW_KEYS, bench_table, checked, write_rows

ROW = dict.fromkeys(ROW_KEYS, 1)


def test_bench_rows_are_checked_shown_and_written(tmp_path: Path) -> None:
    path = tmp_path / "build" / "bench.json"
    row = ROW | {"name": "a figure", "ours": 41234.5678, "stock": None, "machine": "two cores"}
    path.parent.mkdir()
    path.write_bytes(orjson.dumps([row | {"bench": "of another time"}]))
    write_rows("sim", checked("sim", [row]), path)
    write_rows("cpu", [row | {"ours": 1}, row | {"ours": 2}], path)
    write_rows("sim", [row | {"ours": 3}], path)
    kept = orjson.loads(path.read_bytes())
    assert [(one["bench"], one["ours"]) for one in kept] == [
        ("cpu", 1), ("cpu", 2), ("sim", 3)]  # fmt: skip
    assert kept[2] == row | {"bench": "sim", "ours": 3}
    out = io.StringIO()
    Console(file=out, width=200).print(bench_table([row, row]))
    assert out.getvalue().count("two cores") == 1
    cells = [cell.strip() for cell in out.getvalue().split("│")]
    assert {"a figure", "41,235", "-"} <= set(cells) and "None" not in cells


@pytest.mark.parametrize("rows", [[], [{**ROW, "extra": 1}], [{"name": "x"}]])
def test_bench_rows_that_do_not_fit_are_refused(rows: list[dict[str, object]]) -> None:
    with pytest.raises(ValueError, match=r"^b(:| measured nothing)"):
        checked("b", rows)
