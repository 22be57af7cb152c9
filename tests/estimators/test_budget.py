"""The search for a step's budget, on servers whose answer is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_sgl.estimators.budget import (
    Measurement,
    Target,
    check_budget,
    find_budget,
    parse_slo,
)

TPOT = Target("tpot", "p99", 0.05)
TTFT = Target("ttft", "p99", 1.0)


class Server:
    """TPOT is `alone_s` plus the budget, TTFT ten times that; noise of a given share."""

    def __init__(self, alone_s: float = 0.01, noise: float = 0.0, seed: int = 0) -> None:
        self.alone_s, self.noise, self.rng = alone_s, noise, random.Random(seed)
        self.asked: list[float] = []

    def __call__(self, budget_s: float) -> Measurement:
        self.asked.append(budget_s)
        factor = 1 + self.noise * self.rng.uniform(-1, 1)
        tpot_s = (self.alone_s + budget_s) * factor
        return Measurement({"tpot_p99": tpot_s, "ttft_p99": 10 * tpot_s}, 100, 1e4 * budget_s)


def search(server: Callable[[float], Measurement], *targets: Target, **options):
    options = {"low_s": 0.001, "high_s": 1.0} | options
    return find_budget(server, targets or (TPOT,), **options)


@given(st.floats(0.002, 0.9), st.floats(1.02, 1.5))
@settings(max_examples=100)
def test_without_noise_the_largest_budget_is_found_to_the_precision(best_s, precision):
    target = Target("tpot", "p99", 0.01 + best_s)
    found = search(Server(), target, precision=precision)
    assert found.budget_s is not None
    assert best_s / precision <= found.budget_s <= best_s * (1 + 1e-9)


def test_of_several_targets_the_tightest_decides():
    found = search(Server(), TPOT, Target("ttft", "p99", 0.2), precision=1.01)
    assert found.budget_s == pytest.approx(0.01, rel=0.011)


def test_an_slo_that_is_broken_without_offline_work_is_reported_with_the_figures():
    server = Server(alone_s=0.06)
    found = search(server)
    assert found.budget_s is None and not found.is_kept_alone
    assert set(server.asked) == {0.0}
    assert found.trials[0].measurements[0].values_s["tpot_p99"] == 0.06


@pytest.mark.parametrize("unlucky_s", [0.0, 0.001])
def test_a_server_that_was_unlucky_once_is_replayed_before_that_ends_it_all(unlucky_s):
    server = Server()

    def measure(budget_s: float) -> Measurement:
        measured = server(budget_s)
        is_unlucky = budget_s == unlucky_s and server.asked.count(budget_s) == 1
        return Measurement({"tpot_p99": 9.0}, 100, 0.0) if is_unlucky else measured

    assert search(measure, low_s=0.001).budget_s == pytest.approx(0.04, rel=0.1)
    assert server.asked.count(unlucky_s) == 3


def test_an_slo_that_any_offline_work_breaks_has_no_budget():
    found = search(Server(), low_s=0.045)
    assert found.budget_s is None and found.is_kept_alone
    assert [trial.budget_s for trial in found.trials] == [0.0, 0.045]


def test_a_range_that_is_kept_to_its_end_gives_its_end():
    server = Server()
    assert search(server, high_s=0.02).budget_s == 0.02
    assert server.asked.count(0.02) == 3


@given(best_s=st.floats(0.002, 5.0), high_s=st.floats(0.002, 0.05))
def test_beyond_a_range_that_is_kept_longer_budgets_are_tried(best_s: float, high_s: float):
    """As for a mean, which steps longer than its limit may keep."""
    server, target = Server(), Target("tpot", "p99", 0.01 + best_s)
    found = search(server, target, high_s=high_s, most_s=1.0)
    assert found.budget_s is not None and max(server.asked) <= 1.0
    assert found.budget_s >= min(best_s, 1.0) / 1.1
    assert found.budget_s <= best_s * (1 + 1e-9)
    assert found.is_open_ended == (best_s >= 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_ten_percent_moves_the_budget_little_and_it_still_keeps_the_slo(seed):
    found = search(Server(noise=0.1, seed=seed))
    assert found.budget_s is not None
    assert 0.03 <= found.budget_s <= 0.045
    chosen = next(trial for trial in found.trials if trial.budget_s == found.budget_s)
    assert chosen.is_kept and len(chosen.measurements) == 3


def test_a_replay_near_the_edge_is_repeated_and_a_clear_one_is_not():
    server = Server()
    search(server, low_s=0.001, high_s=0.042)
    assert server.asked.count(0.001) == 1
    assert server.asked.count(0.042) == 3


def test_a_lucky_replay_is_not_believed():
    answers = {0.0: [0.5], 1.0: [2.0, 2.0, 2.0], 0.1: [0.5]}
    lucky = [0.5, 2.0, 2.0]

    def measure(budget_s: float) -> Measurement:
        left = answers.get(budget_s)
        load = (left or [2.0]).pop(0) if left else (lucky.pop(0) if lucky else 2.0)
        return Measurement({"tpot_p99": load * TPOT.limit_s}, 10, 0.0)

    found = search(measure, low_s=0.1, high_s=1.0, precision=5.0)
    assert found.budget_s is None  # 0.1 was lucky too: its two repeats are broken


@given(st.floats(0.005, 0.5), st.integers(0, 1000), st.floats(0.0, 0.5))
@settings(max_examples=100)
def test_however_noisy_the_search_ends_and_never_retries_above_a_broken_budget(limit, seed, noise):
    server = Server(noise=noise, seed=seed)
    found = search(server, Target("tpot", "p99", limit))
    assert len(server.asked) < 100
    if found.budget_s is not None:
        chosen = next(trial for trial in found.trials if trial.budget_s == found.budget_s)
        assert chosen.is_kept
    assert 0.0 in server.asked and min(server.asked[1:], default=0) >= 0


def test_a_stored_budget_is_checked_by_the_median_of_its_replays():
    server = Server()
    assert check_budget(server, (TPOT,), 0.03).budget_s == 0.03
    assert check_budget(server, (TPOT, TTFT), 0.05).budget_s is None
    assert server.asked == [0.03] * 3 + [0.05] * 3 + [0.0]


def test_a_stored_budget_that_fails_is_held_against_the_server_without_offline_work():
    assert check_budget(Server(), (TPOT,), 0.05).is_kept_alone is True
    assert check_budget(Server(alone_s=0.06), (TPOT,), 0.05).is_kept_alone is False
    assert check_budget(Server(), (TPOT,), 0.03).is_kept_alone is None


def test_an_slo_is_read_from_text():
    assert parse_slo("ttft_p99=1s, tpot_mean=50ms") == (
        Target("ttft", "p99", 1.0),
        Target("tpot", "mean", pytest.approx(0.05)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "part ''"),
        ("ttft_p95=1s", "part 'ttft_p95=1s'; write ttft or tpot"),
        ("e2e_p99=1s", "e2e_p99"),
        ("ttft_p99", "limit of ttft_p99 is ''"),
        ("ttft_p99=1", "limit of ttft_p99 is '1'; write a time above 0"),
        ("ttft_p99=-1s", "is '-1s'"),
        ("ttft_p99=nans", "is 'nans'"),
        ("ttft_p99=xs", "is 'xs'"),
        ("ttft_p99=1s,ttft_p99=2s", "names ttft_p99 twice"),
    ],
)
def test_an_slo_that_cannot_be_read_says_how_to_write_it(text, message):
    with pytest.raises(ValueError, match=message):
        parse_slo(text)


@pytest.mark.parametrize(
    "options", [{"low_s": 0.0}, {"low_s": 2.0}, {"precision": 1.0}, {"repeats": 0}]
)
def test_a_search_without_room_is_refused(options):
    with pytest.raises(ValueError, match="0 < low <= high"):
        search(Server(), **options)
