"""Beam search where offline work has the places: SGLang gives beams theirs with a first token."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from echo_sgl.engine import pool_intake
from echo_sgl.engine.admission.prefill_adder import EchoPrefillAdder
from echo_sgl.engine.scheduler import EchoScheduler
from eval.servers.server import Server
from tests.engine.tight import num_running
from tests.engine.traffic import (
    FLEX,
    completion,
    is_idle,
    pooled,
    post,
    send_all,
    until,
    wait_until,
)
from tests.servers import COMMON_ARGS, STRICT


def test_nobody_starts_in_a_pass_after_beams_and_nobody_leaves_them_one_slot() -> None:
    one, beams = object.__new__(EchoPrefillAdder), SimpleNamespace(beam_group=object())
    one._retract_one = lambda: pytest.fail("one slot of several")
    assert not one._makes_place(beams)
    one.can_run_list = [beams]
    assert one.add_one_req(SimpleNamespace(), False, None) is AddReqResult.OTHER


def test_beams_that_the_pool_turns_away_are_counted_no_more(monkeypatch) -> None:
    """SGLang looks at all that run, after each step, as long as there are beams."""
    monkeypatch.setattr(pool_intake, "_make_abort_req", lambda req, finished_reason: None)
    one, gone = object.__new__(EchoScheduler), []
    one.beam_coordinator = SimpleNamespace(retire_group=gone.append)
    one._release_aborted_request = lambda req: None
    one.send_abort_output = lambda abort, req: None
    one._reject("beams", HTTPStatus.SERVICE_UNAVAILABLE, "The pool is full.")
    assert gone == ["beams"]


@pytest.mark.server
@pytest.mark.parametrize("num_lines", [30, 4])
def test_beams_are_answered_beside_a_job_that_fills_the_places(server_for, num_lines: int) -> None:
    args = ("--served-model-name", "tiny", "--max-running-requests", "8")
    server: Server = server_for((*COMMON_ARGS, *args), config="echo", env=STRICT)
    beams = {"text": "which is it", "sampling_params": {"beam_width": 4, "max_new_tokens": 12}}

    async def play() -> list[int]:
        job = [completion(f"line {number}", 120, **FLEX) for number in range(num_lines)]
        lines = asyncio.create_task(send_all(server, job))
        await until(lambda: lines.done() or num_running(server) >= min(8, num_lines), "it runs")
        answers = await send_all(server, [beams, beams], "/generate")
        return [answer.status_code for answer in [*answers, *await lines]]

    assert set(asyncio.run(play())) == {200}
    wait_until(lambda: is_idle(server) and pooled(server) == 0, "all have ended")
    assert post(server, "/v1/completions", completion("and it goes on", 2)).status_code == 200
