"""Loads drawn by chance: what is drawn, what a row says, and what the table makes of rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from eval import chance
from eval.chance import (
    ALONE,
    LEAST_ONLINE,
    MACHINES,
    PRESETS,
    ChanceOptions,
    Point,
    main,
    points,
    run_point,
    summary_markdown,
)
from eval.simulated.chance import BLOCK_TOKENS, LINES_PER_DOCUMENT, ChanceLoad

CPU = next(iter(MACHINES))
OPTIONS = ChanceOptions(duration_s=12.0)


def drawn(seed: int) -> ChanceLoad:
    return ChanceLoad.draw(seed, pool_tokens=20_000, scale=1.0)


def shared_tokens(one, other) -> int:
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return BLOCK_TOKENS * sum(1 for _ in alike)


def test_a_seed_draws_the_same_load_and_another_one_another() -> None:
    times = [drawn(seed).online(3.0, start_s=5.0, duration_s=60.0).at_s for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
    assert all(5.0 <= at_s < 65.0 for at_s in times[0])
    assert list(times[0]) == sorted(times[0])


@pytest.mark.parametrize("seed", range(12))
def test_every_request_fits_and_has_a_block_for_each_part_of_its_prompt(seed: int) -> None:
    load = drawn(seed)
    for trace in (load.at_once(50), load.job(50)):
        for number in range(50):
            prompt, answer = trace.prompt_tokens[number], trace.output_tokens[number]
            assert len(trace.blocks[number]) == -(-prompt // BLOCK_TOKENS)
            assert 1 <= prompt + answer < 20_000


def test_lines_about_a_document_begin_alike() -> None:
    seed = next(seed for seed in range(50) if drawn(seed).document_tokens >= 800)
    job, load = drawn(seed).job(4 * LINES_PER_DOCUMENT), drawn(seed)
    first = job.blocks[0]
    alike = [shared_tokens(first, other) >= 800 for other in job.blocks]
    assert sum(alike) == LINES_PER_DOCUMENT
    assert max(job.prompt_tokens) > load.document_tokens


def test_a_row_says_what_each_preset_keeps_and_does() -> None:
    row = next(
        row
        for seed in range(0, 60, len(MACHINES))
        if (row := run_point(OPTIONS, Point(seed, CPU)))["online"] >= LEAST_ONLINE
    )
    assert 0.9 < row[ALONE] <= 1.0
    assert all(0.0 <= row[name] <= 1.0 for name in PRESETS)
    assert row["echo"] >= 0.9 * row[ALONE] and row["echo_tokens_per_s"] > 0


def test_points_take_the_machines_in_turn() -> None:
    taken = points(ChanceOptions(loads=7, first_seed=5))
    assert [one.seed for one in taken] == list(range(5, 12))
    assert {one.machine for one in taken} == set(MACHINES)


def row_of(seed: int, echo: float, tokens_per_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"seed": seed, "machine": CPU, "load": "any", "online": 50, ALONE: 0.98}
    for name in PRESETS:
        row |= {name: 0.49, f"{name}_tokens_per_s": 100.0, f"{name}_late": 1, f"{name}_slow": 2}
    return row | {"echo": echo, "echo_tokens_per_s": tokens_per_s}


def test_the_table_counts_loads_by_the_share_of_what_is_kept_alone() -> None:
    rows = [row_of(0, 0.98, 200.0), row_of(1, 0.9506, 50.0), {"seed": 2, "online": 3}]
    config = {"name": "n", "command": "c", "options": {"duration_s": 1.0}}
    text = summary_markdown(config, rows)
    assert "2 of 3 loads" in text
    assert "| `echo` | 1 | 2 | 2 | 98.5% | 97.0% | 1.00x, 0 |" in text
    assert "| `hygen` | 0 | 0 | 0 | 50.0% | 50.0% | 1.00x, 0 |" in text
    assert text.index("| 1 | CPU") < text.index("| 0 | CPU")


def test_what_was_run_is_written_and_wrong_options_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chance, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(chance, "PRESETS", ("bs", "echo"))
    main(["--loads", "1", "--duration-s", "8", "--name", "one"])
    assert "# Loads by chance `one`" in (tmp_path / "one" / "summary.md").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["--loads", "0"])
    assert ended.value.code == 2
    assert "--loads is 0" in capsys.readouterr().err
