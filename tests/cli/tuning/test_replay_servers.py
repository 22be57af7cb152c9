"""Replays on servers that answer something else than they should, or refuse."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from random import Random

import pytest

from echo_sgl.cli.connection import ProxyError
from echo_sgl.cli.tuning.calibration import wait_until_up
from echo_sgl.cli.tuning.replay import Replayer, set_budget
from echo_sgl.cli.tuning.replay_load import ReplayError
from echo_sgl.sim.workload import Trace
from echo_sgl.types import Task
from tests.cli.jobs import completion_line, write_job
from tests.cli.odd_server import REPLICA, OddServer


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/flush_cache", (404, "Not Found"), "/flush_cache answers 404: Not Found"),
        ("/flush_cache", (401, "no"), "flush_cache answers 401.*admin key.*--admin-api-key"),
        ("/flush_cache", None, "failed meanwhile: Server disconnected"),
        ("/echo/budget", (404, "Not Found"), "/echo/budget answers 404"),
        ("/echo/budget", (403, "no"), "budget answers 403.*admin key.*--admin-api-key"),
        ("/echo/budget", (500, "out of order"), "500: out of order. The server, or a proxy"),
        ("/echo/budget", None, "failed meanwhile: Server disconnected"),
    ],
)
def test_a_server_that_fails_between_replays_is_reported(
    odd: OddServer, path: str, answer: tuple[int, str] | None, said: str
) -> None:
    steps = json.dumps({"replicas": [REPLICA]})
    odd.paths = {"/echo/steps": (200, steps), path: answer}
    trace = Trace(Task.ONLINE, array("d", [0.0]), array("q", [9]), array("q", [2]))
    replayer = Replayer(odd.url, None, trace, jobs=None, speed=1.0, rng=Random(0))
    with pytest.raises(ReplayError, match=said):
        replayer.measure(0.1, ())


def test_what_moves_a_server_is_asked_with_its_admin_key(odd: OddServer) -> None:
    chunk = json.dumps({"meta_info": {"completion_tokens": 1}})
    odd.paths = {
        "/echo/steps": (200, json.dumps({"replicas": [REPLICA]})),
        "/generate": (200, f"data: {chunk}"),
    }
    trace = Trace(Task.ONLINE, array("d", [0.0]), array("q", [9]), array("q", [2]))
    replayer = Replayer(
        odd.url, "usual", trace, jobs=None, speed=1.0, rng=Random(0), admin_api_key="admin"
    )
    replayer.measure(0.0, ())
    set_budget(odd.url, "admin", 0.1)
    assert odd.keys["/echo/budget"] == odd.keys["/flush_cache"] == "Bearer admin"
    assert odd.keys["/echo/steps"] == odd.keys["/generate"] == "Bearer usual"


def test_the_first_replay_is_under_the_budget_that_the_server_was_started_with(
    odd: OddServer,
) -> None:
    """Not under the one that an earlier search tried last, which may cut prompts to pieces."""
    chunk = json.dumps({"meta_info": {"completion_tokens": 1}})
    steps = {"limit": "budget", "budget_s": 0.07}
    odd.paths = {
        "/echo/steps": (200, json.dumps({"replicas": [REPLICA | {"config": {"steps": steps}}]})),
        "/generate": (200, f"data: {chunk}"),
    }
    trace = Trace(Task.ONLINE, array("d", [0.0]), array("q", [9]), array("q", [2]))
    replayer = Replayer(odd.url, None, trace, jobs=None, speed=1.0, rng=Random(0))
    for budget_s in (0.0, 0.0):
        replayer.measure(budget_s, ())
    assert odd.bodies["/echo/budget"] == [b'{"budget_s":0.07}']


@pytest.mark.parametrize("status", [400, 422])
def test_lines_that_the_server_never_takes_are_left_out_and_told(
    odd: OddServer, tmp_path: Path, status: int
) -> None:
    write_job(tmp_path / "jobs.jsonl", [completion_line("a"), completion_line("b")])
    odd.paths = {
        "/echo/steps": (200, json.dumps({"replicas": [REPLICA]})),
        "/v1/completions": (status, "too long for the context"),
    }
    trace = Trace(Task.ONLINE, array("d", [0.0, 1.0]), array("q", [9, 9]), array("q", [2, 2]))
    replayer = Replayer(
        odd.url, None, trace, jobs=tmp_path / "jobs.jsonl", speed=1.0, rng=Random(0)
    )
    said = "the server refuses 2 of 2 lines of the job, first line 1: too long for the context"
    with pytest.raises(ReplayError, match=f"no line of the job is left: {said}"):
        replayer.measure(0.1, ())
    assert list(replayer.load.notes()) == [said]


def test_a_proxy_that_cannot_be_used_ends_the_wait_for_a_server(
    odd: OddServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(ProxyError, match="ALL_PROXY names cannot be used"):
        wait_until_up(odd.url)
