"""Who comes back by what the step is short of: sequences or tokens (OOCO algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape, Step
from echo_sgl.policies.decodes.decode_selection import RESUME_SHARE, Decode
from echo_sgl.policies.decodes.decode_selections import create_decode_selection

NOW_S = 100.0


class Roofline:
    """16 decodes take as long as one, more take 1 ms each; 1 us per token of context."""

    def predict_s(self, step: Step) -> float:
        return 1e-3 * max(16, step.num_decodes) + 1e-6 * step.decode_tokens


def parked(*contexts: int) -> list[Decode]:
    return [
        Decode(f"p{tokens}", tokens, tokens, NOW_S - 1, float("inf"), False, number)
        for number, tokens in enumerate(contexts)
    ]


def running(num: int, context_tokens: int = 10) -> list[Decode]:
    return [
        Decode(f"r{number}", context_tokens, 0, None, float("inf"), True, 1000 + number)
        for number in range(num)
    ]


def back(
    name: str,
    others: Sequence[Decode],
    *,
    limit_s: float,
    runs: Sequence[Decode] = (),
    max_decodes: int = 99,
) -> list[int]:
    """The contexts of those of `others` that come back beside those that run, which all fit."""
    chosen = create_decode_selection(name, seed=0).select(
        [*runs, *others],
        BatchShape(),
        Roofline(),
        limit_s / RESUME_SHARE,
        now_s=NOW_S,
        max_decodes=max_decodes,
    )
    assert {one.rid for one in runs} <= chosen
    return sorted(one.context_tokens for one in others if one.rid in chosen)


def test_a_saturated_step_takes_the_longest_that_fits_and_then_as_many_as_do():
    # 20 decodes of 10 take 20.2 ms; one of 3,000 makes that 24.2, one of 800 more 26.0.
    others = parked(100, 500, 800, 3000, 9000)
    assert back("bottleneck", others, runs=running(20), limit_s=0.0242) == [3000]
    assert back("bottleneck", others, runs=running(20), limit_s=0.0265) == [800, 3000]
    assert back("shortest", others, runs=running(20), limit_s=0.0242) == [100, 500]


def test_a_step_that_can_be_saturated_takes_the_longest_that_do():
    # From 16 on a decode more takes 1 ms more: 8 are missing, and may have 10,000 tokens in all.
    others = parked(*range(100, 2100, 100))
    chosen = back("bottleneck", others, runs=running(8), limit_s=0.0261)
    assert chosen == list(range(900, 1700, 100))
    assert len(back("shortest", others, runs=running(8), limit_s=0.0261)) > 8


def test_a_step_that_cannot_be_saturated_takes_as_many_as_fit():
    others = parked(100, 200, 5000, 6000)
    assert back("bottleneck", others, runs=running(2), limit_s=0.0165) == [100, 200]


def test_nobody_comes_back_who_does_not_fit():
    assert back("bottleneck", parked(5000, 6000), runs=running(20), limit_s=0.021) == []
    assert back("bottleneck", parked(5000, 6000), limit_s=0.020) == []


def test_the_number_of_decodes_is_kept():
    others = parked(100, 500, 800)
    assert back("bottleneck", others, runs=running(20), limit_s=9.0, max_decodes=21) == [800]


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=12, unique=True),
    st.integers(0, 30),
    st.floats(0.016, 0.08),
)
def test_what_comes_back_fits_and_is_somebody_if_the_shortest_does(contexts, num_runs, limit_s):
    runs, others = running(num_runs), parked(*contexts)
    runs_row = BatchShape()
    for one in runs:
        runs_row.add_decode(one.context_tokens)
    if Roofline().predict_s(runs_row) > limit_s:
        return
    chosen = back("bottleneck", others, runs=runs, limit_s=limit_s)
    for tokens in chosen:
        runs_row.add_decode(tokens)
    assert not chosen or Roofline().predict_s(runs_row) <= limit_s
    if not chosen:
        runs_row.add_decode(min(contexts))
        assert Roofline().predict_s(runs_row) > limit_s


@pytest.mark.parametrize("num_runs", [0, 5, 40])
def test_where_all_fit_all_come_back(num_runs):
    contexts = [10, 400, 3000]
    others = parked(*contexts)
    assert back("bottleneck", others, runs=running(num_runs), limit_s=1.0) == contexts
