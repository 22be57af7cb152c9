"""OOCO's rules one by one, against what the paper says of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.sim.fleet.rules import (
    PULL_SHARE,
    decode_cap,
    decode_row,
    eviction_choice,
    length_preference,
    saturated_batch_size,
)
from tests.sim.fleets import DEVICE

SATURATED = saturated_batch_size(DEVICE)


def time_s(num_decodes: int, decode_tokens: int) -> float:
    return DEVICE.predict_s(decode_row(num_decodes, decode_tokens))


def preference(
    num_decodes: int, decode_tokens: int, *, limit_s: float, free: int = 10**6
) -> int | None:
    return length_preference(
        DEVICE,
        num_decodes,
        decode_tokens,
        limit_s=limit_s,
        free_tokens=free,
        saturated=SATURATED,
    )


def test_gemms_cost_no_more_until_the_batch_is_saturated() -> None:
    """OOCO 3.3.3: below the number a step is bound by memory, above it grows with the batch."""
    tokens = 4000
    few = time_s(SATURATED - 1, tokens) - time_s(1, tokens)
    many = time_s(2 * SATURATED, tokens) - time_s(SATURATED + 1, tokens)
    assert many > 5 * few


def test_a_step_near_its_limit_pulls_nobody() -> None:
    """Algorithm 1, line 2."""
    limit_s = time_s(30, 9000)
    assert preference(30, 9000, limit_s=limit_s) is None
    assert preference(30, 9000, limit_s=limit_s / PULL_SHARE * 1.001) is not None


def test_a_saturated_step_prefers_the_longest_that_time_and_memory_allow() -> None:
    """Algorithm 1, lines 4 and 5."""
    num, tokens, limit_s = SATURATED + 5, 4000, 0.05
    by_time = preference(num, tokens, limit_s=limit_s)
    assert by_time is not None
    assert time_s(num + 1, tokens + by_time) <= limit_s < time_s(num + 1, tokens + by_time + 1)
    assert preference(num, tokens, limit_s=limit_s, free=700) == 700


def test_a_step_that_can_be_saturated_prefers_as_long_as_that_leaves_time() -> None:
    """Algorithm 1, lines 7 and 8: a group that saturates the step, each as long as allowed."""
    num, tokens, limit_s = SATURATED - 6, 2000, 0.03
    length = preference(num, tokens, limit_s=limit_s)
    assert length is not None
    assert time_s(SATURATED, tokens + 6 * length) <= limit_s
    assert time_s(SATURATED, tokens + 6 * (length + 1)) > limit_s
    alone = preference(SATURATED - 1, tokens, limit_s=limit_s)
    assert alone is not None
    assert alone > length


def test_a_step_that_cannot_be_saturated_prefers_the_shortest() -> None:
    """Algorithm 1, line 10."""
    far_s = time_s(10_000, 10_200)
    found = length_preference(
        DEVICE, 1, 200, limit_s=far_s * 0.9, free_tokens=10**6, saturated=10_000
    )
    assert found == 0


@given(st.integers(1, 60), st.integers(1, 20_000), st.floats(0.005, 0.1))
def test_whoever_is_preferred_fits(num: int, tokens: int, limit_s: float) -> None:
    length = preference(num, tokens, limit_s=limit_s)
    if length:
        assert time_s(num + 1, tokens + length) <= limit_s


LENGTHS = [(100, "a"), (900, "b"), (300, "c"), (500, "d")]


def test_a_step_bound_by_compute_gives_up_few_long_ones() -> None:
    """OOCO 3.4.1: the batch stays large."""
    assert eviction_choice(LENGTHS, 1000, is_compute_bound=True) == ["b", "d"]


def test_a_step_bound_by_memory_gives_up_short_ones() -> None:
    assert eviction_choice(LENGTHS, 350, is_compute_bound=False) == ["a", "c"]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(0, 5000), st.booleans())
def test_evicting_frees_enough_or_evicts_nobody(
    lengths: list[int], needed: int, is_compute_bound: bool
) -> None:
    named = [(length, str(number)) for number, length in enumerate(lengths)]
    chosen = eviction_choice(named, needed, is_compute_bound=is_compute_bound)
    freed = {rid: length for length, rid in named}
    if chosen is None:
        assert sum(lengths) < needed
    else:
        assert sum(freed[rid] for rid in chosen) >= needed
        assert not chosen or sum(freed[rid] for rid in chosen[:-1]) < needed


def test_the_cap_is_the_most_decodes_within_the_limit() -> None:
    cap = decode_cap(DEVICE, 300, 0.03)
    assert time_s(cap, 300 * cap) <= 0.03 < time_s(cap + 1, 300 * (cap + 1))
    assert decode_cap(DEVICE, 300, 1e-9) == 1
