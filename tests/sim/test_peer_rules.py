"""Simulated servers under BROS's packing and replacement and OOCO's selection and gating."""

from __future__ import annotations

from typing import Any

import pytest

from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from tests.sim.workloads import COEFFICIENTS, SLO, device, offline_trace, online_trace, server

NUM_ONLINE = NUM_OFFLINE = 60


def served(
    *, tpot_s: float, rate_rps: float, kv_tokens: int, num_prefixes: int = 2, **more: Any
) -> SimResults:
    steps = {"ttft_margin": 0.0, "place_share": 0.0, "slack_pace": 1.0, "slack_share": 1.0}
    sections = {
        "slo": {"ttft_s": 1.0, "tpot_s": tpot_s},
        "reserve": {"predictor": "off"},
        "offline": {"order": "fcfs"},
        "steps": {**steps, **more.pop("steps")},
    }
    config = server(sections, kv_tokens=kv_tokens, max_running_requests=24, **more)
    online = online_trace(NUM_ONLINE, rate_rps=rate_rps, most_tokens=400)
    results = simulate(config, online, offline_trace(NUM_OFFLINE, num_prefixes=num_prefixes))
    assert results.online_done == NUM_ONLINE and results.offline_done == NUM_OFFLINE
    return results


@pytest.mark.parametrize(
    ("rule", "tpot_s", "rate_rps", "steps"),
    [
        # A decode of many takes 13 ms here: not all offline ones fit beside the online ones.
        ("replace", 0.013, 6.0, {"decode_selection": "uncached"}),
        # Or 15 ms, and who came first is ahead of its due times.
        ("pack", 0.015, 15.0, {"batch_size": "adaptive"}),
    ],
)
def test_online_decodes_with_time_to_spare_sit_out_for_a_step(
    rule: str, tpot_s: float, rate_rps: float, steps: dict[str, Any]
) -> None:
    on, off = (
        served(
            tpot_s=tpot_s, rate_rps=rate_rps, kv_tokens=20_000, steps={rule: is_on, **steps}
        ).num_given_turns
        for is_on in (True, False)
    )
    assert on > 0
    assert off == 0


def test_whoever_comes_back_by_the_bottleneck_all_are_answered() -> None:
    """A decode of many takes 13 ms here: not all offline ones fit beside the online ones."""
    results = served(
        tpot_s=0.013,
        rate_rps=6.0,
        kv_tokens=20_000,
        steps={"decode_selection": "bottleneck"},
    )
    assert results.num_parks > 0 and results.num_resumes > 0


def test_the_gate_saves_prompts_that_would_be_lost() -> None:
    """Memory for few, and prompts that take as long as many tokens: half of them are lost."""
    slow = {**COEFFICIENTS, "prefill_token": 5e-4, "prefill_token_beyond": 5e-4}
    gated, open_ = (
        served(
            tpot_s=0.1,
            rate_rps=2.0,
            kv_tokens=4000,
            num_prefixes=20,
            device=device().with_coefficients(slow),
            steps={"gate": gate, "limit": "off"},
        )
        for gate in (True, False)
    )
    assert 0 < gated.num_retractions < 0.8 * open_.num_retractions


def test_where_nothing_is_lost_the_gate_stays_open() -> None:
    gated, open_ = (
        simulate(
            server(
                {**SLO, "reserve": {"predictor": "off"}, "steps": {"gate": gate}}, kv_tokens=60_000
            ),
            online_trace(20, rate_rps=2.0),
            offline_trace(NUM_OFFLINE, num_prefixes=2),
        )
        for gate in (True, False)
    )
    assert open_.num_retractions == 0
    assert gated == open_
