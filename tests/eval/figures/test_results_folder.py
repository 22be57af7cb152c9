"""Results are replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.figures.results_folder import replacing


def test_new_results_take_the_place_of_old_ones(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with replacing(tmp_path / "name") as folder:
            (folder / f"{text}.md").write_text(text)
    assert [path.name for path in (tmp_path / "name").iterdir()] == ["new.md"]
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_a_run_that_fails_leaves_the_old_ones_and_what_it_has(tmp_path: Path) -> None:
    with replacing(tmp_path / "name") as folder:
        (folder / "old.md").write_text("old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "name") as folder:
        (folder / "half.md").write_text("half")
        raise RuntimeError
    assert [path.name for path in (tmp_path / "name").iterdir()] == ["old.md"]
    assert [path.name for path in (tmp_path / "name.part").iterdir()] == ["half.md"]
