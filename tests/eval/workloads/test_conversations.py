"""Conversations as a trace: what prompts share, lanes that overlap."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.workloads.conversations import BLOCK_TOKENS, CHARS_PER_TOKEN, conversation_trace
from eval.workloads.sessions import Call
from eval.workloads.traces import Arrival

BLOCK_CHARS = BLOCK_TOKENS * CHARS_PER_TOKEN
calls = st.lists(st.integers(1, 3 * BLOCK_CHARS), min_size=1, max_size=6)


def session_of(name: str, tails: list[int]) -> list[Call]:
    """Each prompt is the one before and so many characters more."""
    lengths = itertools.accumulate(tails)
    return [("s" * 2 * BLOCK_CHARS + name * length, "answer") for length in lengths]


def num_shared(one: Arrival, other: Arrival) -> int:
    pairs = zip(one.blocks, other.blocks, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(st.lists(calls, min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 3))
def test_every_call_comes_once_in_order_of_time(
    tails: list[list[int]], at_once: int, seed: int
) -> None:
    sessions = [session_of(chr(97 + number), one) for number, one in enumerate(tails)]
    trace = conversation_trace(sessions, seed=seed, at_once=at_once)
    assert trace == conversation_trace(sessions, seed=seed, at_once=at_once)
    times_s = [one.at_s for one in trace]
    assert times_s == sorted(times_s) and times_s[0] == 0
    lengths = sorted(len(prompt) // CHARS_PER_TOKEN for one in sessions for prompt, _ in one)
    assert sorted(one.prompt_tokens for one in trace) == pytest.approx(lengths, abs=1)
    assert all(-(-one.prompt_tokens // BLOCK_TOKENS) <= len(one.blocks) for one in trace)


def test_prompts_share_the_blocks_whose_texts_they_share() -> None:
    first, other = session_of("a", [BLOCK_CHARS, BLOCK_CHARS // 2]), session_of("b", [10])
    trace = conversation_trace([first, other], seed=0, at_once=2)
    short, long = sorted(
        (one for one in trace if len(one.blocks) > 2), key=lambda one: one.prompt_tokens
    )[-2:]
    [alone] = [one for one in trace if one not in (short, long)]
    assert num_shared(short, long) == 3
    assert num_shared(alone, long) == 2  # both begin with the same two blocks of system prompt


def test_sessions_overlap_in_lanes_and_follow_each_other_in_one() -> None:
    sessions = [[(name * BLOCK_CHARS + "." * turn, "x") for turn in range(20)] for name in "abc"]

    def order(at_once: int) -> list[int]:
        trace = conversation_trace(sessions, seed=1, at_once=at_once)
        firsts = [one.blocks[0] for one in trace]
        return [list(dict.fromkeys(firsts)).index(block) for block in firsts]

    assert order(1) == [0] * 20 + [1] * 20 + [2] * 20
    assert order(3) != sorted(order(3)) and len(set(order(3)[:20])) == 3
