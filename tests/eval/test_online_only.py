"""Online requests alone on stock and on Echo: a turn on a real server, and the table."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from eval.online_only import (
    FIGURES,
    STOCK,
    OnlineOnlyOptions,
    Traffic,
    beside_stock,
    measure_turn,
    summary_markdown,
    warm_up,
)
from eval.servers.server import Server

OPTIONS = OnlineOnlyOptions(
    requests=120, window=8, duration_s=3.0, prompt_tokens=40, answer_tokens=8, load=0.8
)


def test_texts_are_new_each_time_and_lengths_are_those_of_the_seed(tiny_model: Path):
    traffic = Traffic(OPTIONS, str(tiny_model))
    first, again, other = (traffic.requests(20, seed) for seed in (1, 1, 2))
    bodies = [[orjson.loads(one.content) for one in part] for part in (first, again, other)]
    answers = [[body["max_tokens"] for body in part] for part in bodies]
    assert answers[0] == answers[1] != answers[2]
    assert len({body["prompt"] for part in bodies for body in part}) == 60
    assert max(answers[0]) <= 4 * OPTIONS.answer_tokens


def test_the_first_turn_sets_the_rate_of_the_next(stock_server: Server, tiny_model: Path):
    traffic = Traffic(OPTIONS, str(tiny_model))
    warm_up(stock_server, traffic, OPTIONS)
    row, rate_rps = measure_turn(stock_server, traffic, OPTIONS, 0, 0.0)
    assert rate_rps == OPTIONS.load * row["answers_per_s"]
    assert set(row) == set(FIGURES)
    assert 0 <= row["kept"] <= 1
    assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
    # Short answers may be there at once where the client waits for a core.
    assert 0 <= row["tpot_p50_ms"] <= row["tpot_p99_ms"]
    assert measure_turn(stock_server, traffic, OPTIONS, 1, rate_rps)[1] == rate_rps


def test_arms_are_compared_with_stock_in_the_same_round():
    rows = [
        {"arm": arm, "round": number, **dict.fromkeys(FIGURES, value), "kept": value / 20}
        for number, values in enumerate(({STOCK: 10.0, "echo": 9.0}, {"echo": 5.0, STOCK: 4.0}))
        for arm, value in values.items()
    ]
    assert beside_stock(rows, "echo", "ttft_p50_ms") == [0.9, 1.25]
    options = {name: getattr(OPTIONS, name) for name in OnlineOnlyOptions.__dataclass_fields__}
    facts = dict.fromkeys(("name", "command", "machine", "date", "sglang", "torch", "python"), "x")
    text = summary_markdown({**facts, "options": options}, rows)
    assert "| stock | 7.0 | 35% (20%-50%) | 7.0 |" in text
    assert "| echo / stock | 1.07x (0.90x-1.25x) |  | 1.07x (0.90x-1.25x) |" in text


def test_bad_options_are_refused_by_name():
    with pytest.raises(ValueError, match="--requests is 5; it must be 20 or more"):
        OnlineOnlyOptions(requests=5)
