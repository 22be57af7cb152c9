"""Simulated online requests that begin alike and come at once compute what they share once."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from echo_sgl.sim.workload import Trace
from echo_sgl.types import Task
from tests.sim.workloads import SLO, server

NUM_PAIRS, BLOCK, SHARED_BLOCKS = 60, 64, 16
SHARED_TOKENS = NUM_PAIRS * BLOCK * SHARED_BLOCKS


def pairs() -> Trace:
    """Every two seconds two prompts of 1,088 tokens that differ in their last 64."""
    blocks, times = [], array("d")
    for number in range(NUM_PAIRS):
        start = 100 * number
        for own in (start + 50, start + 51):
            blocks.append(array("q", (*range(start, start + SHARED_BLOCKS), own)))
            times.append(2.0 * number)
    prompts = array("q", (BLOCK * len(one) for one in blocks))
    answers = array("q", (8,)) * len(blocks)
    return Trace(Task.ONLINE, times, prompts, answers, blocks=blocks, max_new_tokens=8)


def served(overlap: bool, split_online: bool) -> SimResults:
    config = server(SLO | {"steps": {"split_online": split_online}}, kv_tokens=200_000)
    return simulate(dataclasses.replace(config, overlap=overlap), pairs())


@pytest.mark.parametrize("overlap", [False, True])
def test_the_second_of_two_finds_what_the_first_computes(overlap: bool) -> None:
    apart, together = served(overlap, True), served(overlap, False)
    assert apart.online_done == together.online_done == 2 * NUM_PAIRS
    # Until the first fit nothing is known of what it saves.
    assert apart.online_cached_tokens > 0.8 * SHARED_TOKENS
    assert together.online_cached_tokens == 0
    assert apart.busy_s < 0.9 * together.busy_s
    assert apart.statistic_s("ttft", "mean") < 0.9 * together.statistic_s("ttft", "mean")
