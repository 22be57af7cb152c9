"""What a real server says of its requests and of its steps, and its budget set while it runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from eval.servers.server import LOCAL
from tests.cli.jobs import run_cli
from tests.cli.watching.test_trace_events import check_format
from tests.engine.tight import learn, num_running
from tests.engine.traffic import (
    FLEX,
    completion,
    documents,
    is_idle,
    post,
    send_all,
    until,
    wait_until,
)
from tests.servers import COMMON_ARGS, NAMED, STRICT

pytestmark = pytest.mark.server

# Of 8,000 tokens offline requests may hold 2,000; they start in the order in which they came.
CONFIG: dict[str, Any] = {
    "offline": {"order": "fcfs"},
    "reserve": {"predictor": "off", "min_tokens": 6000, "max_share": 0.9},
    "steps": {"limit": "budget", "budget_s": 5.0},
}
TINY_BUDGET_S = 1e-6


@pytest.fixture
def server(server_for, write_config):
    server = server_for((*COMMON_ARGS, *NAMED), config=str(write_config(**CONFIG)), env=STRICT)
    wait_until(lambda: is_idle(server), "the server is idle")
    yield server
    post(server, "/abort_request", {"abort_all": True})


def explained(server, rid: str) -> dict[str, Any]:
    """The answer, empty while the request is not there."""
    answer = LOCAL.get(f"{server.url}/echo/requests/{rid}", timeout=60)
    return answer.json() if answer.status_code == 200 else {}


def reason(server, rid: str) -> str | None:
    return (explained(server, rid).get("held_back") or {}).get("reason")


def set_budget(server, budget_s: object) -> httpx.Response:
    return post(server, "/echo/budget", {"budget_s": budget_s})


def abort(server) -> None:
    post(server, "/abort_request", {"abort_all": True})


def test_an_unknown_id_is_answered_with_404(server):
    answer = LOCAL.get(f"{server.url}/echo/requests/nobody", timeout=60)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert "no request 'nobody' is here" in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("not_found_error", "id", 404)


def test_the_reserve_and_the_order_are_told_apart(server):
    """The first runs; beside it there is no room for the second, which others must not outrun.

    It runs for longer than the command takes to start.
    """
    runs, waits, *small = documents(5, 400, seed=31)
    bodies = [
        completion(runs, 1300, rid="jobs/runs", **FLEX),
        completion(waits, 400, rid="jobs/waits", **FLEX),
    ]
    small_bodies = [
        completion(text[:200], 4, rid=f"small-{number}", **FLEX)
        for number, text in enumerate(small)
    ]

    async def run() -> None:
        first = asyncio.create_task(send_all(server, bodies[:1]))
        await until(lambda: explained(server, "jobs/runs").get("state") == "decoding", "it runs")
        second = asyncio.create_task(send_all(server, bodies[1:]))
        await until(lambda: reason(server, "jobs/waits") == "reserve", "the second waits")
        others = asyncio.create_task(send_all(server, small_bodies))
        await until(lambda: explained(server, "small-2") != {}, "the small ones wait")
        facts = await asyncio.to_thread(explained, server, "jobs/waits")
        assert (facts["state"], facts["class"], facts["position"]) == ("pooled", "offline", "next")
        held = facts["held_back"]
        assert held["needed_tokens"] == facts["prompt_tokens"] < held["limit_tokens"] == 2000
        assert held["needed_tokens"] + held["planned_tokens"] + held["used_tokens"] > 2000
        behind = await asyncio.to_thread(explained, server, "small-0")
        assert behind["position"] == "offered" and behind["num_pooled"] >= 2
        assert behind["held_back"]["reason"] == "order" and behind["held_back"]["num_before"] >= 1
        assert behind["held_back"]["first"]["reason"] == "reserve"
        said = await asyncio.to_thread(run_cli, "explain", "jobs/waits", "--url", server.url)
        assert said.returncode == 0, said.stderr
        assert "It waits for the reserve" in said.stdout and "of the 2,000" in said.stdout
        await asyncio.to_thread(abort, server)
        await asyncio.gather(first, second, others)

    asyncio.run(run())
    assert explained(server, "jobs/waits") == {}


def test_nobody_waits_for_one_that_could_not_start_even_alone(server):
    """And what it waits for can be told when what it had found in the cache is gone again."""
    [large, long, *small] = documents(5, 700, seed=33)
    small_bodies = [completion(text[:200], 4, **FLEX) for text in small]
    others_bodies = [completion(text, 4) for text in documents(6, 1300, seed=34)]

    async def run() -> tuple[bool, list[httpx.Response]]:
        await send_all(server, [completion(large[:1000], 1)])
        online = asyncio.create_task(send_all(server, [completion(long, 3000, rid="long")]))
        await until(lambda: explained(server, "long").get("state") == "decoding", "it decodes")
        first = asyncio.create_task(
            send_all(server, [completion(large, 4, rid="jobs/large", **FLEX)])
        )
        await until(lambda: reason(server, "jobs/large") == "reserve", "the large one waits")
        others = await send_all(server, small_bodies)
        for body in others_bodies:
            others += await send_all(server, [body])
        facts = await asyncio.to_thread(explained, server, "jobs/large")
        goes_on = not online.done()
        if goes_on:
            held = facts["held_back"]
            assert (facts["position"], held["reason"]) == ("next", "reserve")
            assert 2000 > facts["prompt_tokens"] >= held["needed_tokens"] > held["limit_tokens"]
        await asyncio.to_thread(abort, server)
        await asyncio.gather(first, online)
        return goes_on, others

    goes_on = False
    while not goes_on:  # the long one may end too soon
        goes_on, others = asyncio.run(run())
    assert {answer.status_code for answer in others} == {200}


def test_who_finds_no_memory_is_told_what_is_missing(server):
    [long] = documents(1, 1500, seed=32)

    async def run() -> None:
        first = asyncio.create_task(send_all(server, [completion("on", 6000, rid="first")]))
        await until(lambda: explained(server, "first").get("state") == "decoding", "it decodes")
        second = asyncio.create_task(send_all(server, [completion(long, 4000, rid="second")]))
        await until(lambda: reason(server, "second") == "memory", "no memory is left")
        facts = await asyncio.to_thread(explained, server, "second")
        assert (facts["state"], facts["class"], facts["position"]) == ("waiting", "online", "next")
        held = facts["held_back"]
        left = held["free_tokens"] + held["evictable_tokens"] - held["promised_tokens"]
        assert held["needed_tokens"] > left
        await asyncio.to_thread(abort, server)
        await first
        await second

    asyncio.run(run())


def test_a_pause_is_told_to_all(server):
    async def run() -> None:
        requests = asyncio.create_task(send_all(server, [completion("on", 2000, rid="paused")]))
        await until(lambda: explained(server, "paused").get("state") == "decoding", "it decodes")
        await asyncio.to_thread(post, server, "/pause_generation", {"mode": "in_place"})
        assert await asyncio.to_thread(reason, server, "paused") == "paused"
        await asyncio.to_thread(post, server, "/continue_generation", {})
        await until(lambda: reason(server, "paused") is None, "it goes on")
        await asyncio.to_thread(abort, server)
        await requests

    asyncio.run(run())


def test_a_budget_set_while_it_runs_holds_offline_work_back(server):
    learn(server)
    assert set_budget(server, TINY_BUDGET_S).json() == {
        "budget_s": TINY_BUDGET_S,
        "num_replicas": 1,
    }

    async def run() -> None:
        online = asyncio.create_task(send_all(server, [completion("on", 6000, rid="online")]))
        await until(lambda: explained(server, "online").get("state") == "decoding", "it decodes")
        offline = asyncio.create_task(
            send_all(server, [completion("off " * 90, 4, rid="offline", **FLEX)])
        )
        await until(lambda: reason(server, "offline") == "limit", "no time is left")
        held = (await asyncio.to_thread(explained, server, "offline"))["held_back"]
        assert held["limit_s"] == TINY_BUDGET_S
        assert 0.0 < held["places_taken"] < 1.0, "the online request has one"
        assert held["smallest_chunk_s"] > held["room_s"]
        # Given its time back, it runs beside the other.
        assert (await asyncio.to_thread(set_budget, server, 5.0)).status_code == 200
        [answer] = await offline
        assert answer.status_code == 200
        await asyncio.to_thread(abort, server)
        await online

    asyncio.run(run())


def test_who_sits_out_is_told_that_its_decode_does_not_fit(server):
    learn(server)

    async def run() -> None:
        offline = asyncio.create_task(
            send_all(server, [completion("off", 1500, rid="offline", **FLEX)])
        )
        online = asyncio.create_task(send_all(server, [completion("on", 1500, rid="online")]))
        for rid in ("offline", "online"):
            await until(
                lambda rid=rid: explained(server, rid).get("state") == "decoding", "both decode"
            )
        await asyncio.to_thread(set_budget, server, TINY_BUDGET_S)
        await until(lambda: explained(server, "offline").get("state") == "parked", "it sits out")
        facts = await asyncio.to_thread(explained, server, "offline")
        held = facts["held_back"]
        assert (facts["class"], held["reason"]) == ("offline", "limit")
        assert held["with_decode_s"] > held["limit_s"] == TINY_BUDGET_S
        assert held["parked_for_s"] >= 0.0
        assert facts["generated_tokens"] > 0
        await asyncio.to_thread(set_budget, server, 5.0)
        await until(lambda: explained(server, "offline").get("state") == "decoding", "it is back")
        assert await asyncio.to_thread(reason, server, "offline") is None
        await asyncio.to_thread(abort, server)
        await asyncio.gather(offline, online)

    asyncio.run(run())


def test_who_finds_no_place_is_told_how_many_run(server):
    """More short ones than the server runs at once: memory is left, places are not."""
    crowd = [completion(f"crowd {number}", 400) for number in range(16)]

    async def run() -> None:
        first = asyncio.create_task(send_all(server, crowd))
        await until(lambda: num_running(server) == 16, "all places are taken")
        bodies = [completion("late", 4, rid="late", **FLEX), completion("new", 4, rid="new")]
        late = [asyncio.create_task(send_all(server, [body])) for body in bodies]
        for rid in ("late", "new"):
            await until(lambda rid=rid: reason(server, rid) in ("slot", "order"), "it waits")
        held = (await asyncio.to_thread(explained, server, "new"))["held_back"]
        assert (held["reason"], held["num_running"]) == ("slot", 16)
        held = (await asyncio.to_thread(explained, server, "late"))["held_back"]
        assert (held["reason"], held["first"]["reason"]) == ("order", "slot")
        await asyncio.to_thread(abort, server)
        await asyncio.gather(first, *late)

    asyncio.run(run())


def test_who_waits_for_a_neighbours_prefix_says_so(server):
    """The first computes 1,500 tokens in chunks, which are the second's as well."""

    async def attempt(number: int) -> set[str | None]:
        [text] = documents(1, 700, seed=40 + number)
        bodies = [
            completion(f"{text} {end}", 4, rid=f"near-{end}", **FLEX) for end in ("one", "two")
        ]
        calls = asyncio.create_task(send_all(server, bodies))
        seen = set()
        while not calls.done():
            held = [
                (await asyncio.to_thread(explained, server, body["rid"])).get("held_back") or {}
                for body in bodies
            ]
            seen |= {(one.get("first") or one).get("reason") for one in held}
        assert {answer.status_code for answer in await calls} == {200}
        return seen

    seen: set[str | None] = set()
    for number in range(20):  # a prefix may be computed before anybody has asked
        seen |= asyncio.run(attempt(number))
        if "prefix" in seen:
            break
    assert "prefix" in seen


@pytest.mark.parametrize("budget_s", [0, -1, "fast", None, 1e9])
def test_what_is_no_budget_is_refused_and_changes_nothing(server, budget_s):
    answer = set_budget(server, budget_s)
    assert answer.status_code == 400
    assert "allowed are seconds above 0 and up to 3600" in answer.json()["error"]["message"]


def test_the_trace_has_predicted_and_true_times(server, tmp_path):
    learn(server)
    asyncio.run(send_all(server, [completion("a step", 8), completion("and one", 8, **FLEX)]))
    wait_until(lambda: is_idle(server), "all steps are over")
    [replica] = LOCAL.get(f"{server.url}/echo/trace?seconds=600", timeout=60).json()["replicas"]
    steps = [dict(zip(replica["columns"], row, strict=True)) for row in replica["rows"]]
    assert all(replica["now_s"] - 600 <= step["start_s"] <= replica["now_s"] for step in steps)
    last = [step for step in steps if step["time_s"] is not None][-8:]
    assert len(last) == 8
    assert all(step["time_s"] > 0 and step["predicted_s"] > 0 for step in last)
    assert all(step["num_evicted_tokens"] >= 0 and step["num_parks"] >= 0 for step in last)
    path = tmp_path / "trace.json"
    result = run_cli("trace", "--seconds", "600", "--output", path, "--url", server.url)
    assert result.returncode == 0, result.stderr
    check_format(json.loads(path.read_text()))
    assert f"{num_measured(steps)} steps" in result.stderr


def num_measured(steps: list[dict[str, Any]]) -> int:
    return sum(step["time_s"] is not None for step in steps)
