"""Simulated servers that have fewer places than online requests want."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from echo_sgl.batch_shape import BatchRow
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from tests.sim.workloads import SLO, offline_trace, online_trace, server

NUM_ONLINE = 120


def busy(seed: int, **steps: object) -> SimResults:
    """Decodes take a quarter of what is promised, and four places are just enough."""
    config = server({**SLO, "steps": steps}, max_running_requests=4)
    online = online_trace(NUM_ONLINE, rate_rps=4.0, seed=seed)
    return simulate(config, online, offline_trace(40, num_prefixes=4))


def test_places_change_hands_and_more_promises_are_kept() -> None:
    traded, kept = [busy(seed) for seed in range(4)], [busy(s, place_gain=0.0) for s in range(4)]
    assert all(one.num_given_places > 0 for one in traded)
    assert not any(one.num_given_places for one in kept)
    for one in (*traded, *kept):
        assert one.online_done == NUM_ONLINE and one.offline_done == 40 and not one.unfinished
    assert sum(one.online_kept for one in traded) > sum(one.online_kept for one in kept)


def test_without_promises_and_without_margin_everybody_keeps_its_place() -> None:
    online = online_trace(NUM_ONLINE, rate_rps=4.0)
    for sections in ({"slo": {}}, {**SLO, "steps": {"ttft_margin": 0.0}}):
        assert not simulate(server(sections, max_running_requests=4), online).num_given_places


def test_who_gave_its_place_computes_little_again_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job's lines wait for all that is cached, and online requests come back to nothing else."""
    rows: list[BatchRow] = []
    note_step = SimResults.note_step

    def noted(results: SimResults, row: BatchRow, start_s: float, time_s: float) -> None:
        rows.append(row)
        note_step(results, row, start_s, time_s)

    monkeypatch.setattr(SimResults, "note_step", noted)
    sections = {**SLO, "cache": {"protected_share": 0.0}}
    config = server(sections, max_running_requests=4, kv_tokens=6000)
    one = simulate(config, online_trace(120, rate_rps=6.0), offline_trace(200, num_prefixes=40))
    assert one.num_given_places > 20
    new_tokens = one.online_prompt_tokens - one.online_cached_tokens
    new_tokens += one.offline_prompt_tokens - one.offline_cached_tokens
    assert sum(row.prefill_tokens for row in rows) < 1.15 * new_tokens


def test_a_line_that_the_reserve_could_not_let_in_alone_holds_nobody_up() -> None:
    """As in the engine, whose passes go past it."""
    lines = offline_trace(40, num_prefixes=4)
    prompts = array("q", (16_000, *lines.prompt_tokens[1:]))
    blocks = [array("q", range(7 * 10**7, 7 * 10**7 + 250)), *lines.blocks[1:]]
    job = dataclasses.replace(lines, prompt_tokens=prompts, blocks=blocks)
    reserve = {"predictor": "off", "min_tokens": 5000}
    config = server({"offline": {"order": "fcfs"}, "reserve": reserve}, kv_tokens=20_000)
    results = simulate(config, online_trace(1, rate_rps=1.0), job, until_s=60.0)
    assert results.offline_done == 39


def test_a_short_overload_makes_few_late_and_nobody_is_forgotten() -> None:
    """Seven requests come a second where four places serve six: whoever is late lets others go."""

    def overloaded(seed: int, late_wait_s: float) -> SimResults:
        config = server({**SLO, "steps": {"late_wait_s": late_wait_s}}, max_running_requests=4)
        return simulate(config, online_trace(NUM_ONLINE, rate_rps=7.0, seed=seed))

    late_last, in_turn = ([overloaded(seed, wait_s) for seed in range(6)] for wait_s in (30.0, 0.0))
    assert all(one.online_done == NUM_ONLINE for one in (*late_last, *in_turn))
    kept, kept_in_turn = (sum(one.online_kept for one in runs) for runs in (late_last, in_turn))
    assert kept > 1.1 * kept_in_turn
