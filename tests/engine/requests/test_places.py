"""Who has a place on a real server, where online requests want more than there are."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from typing import Any

import httpx
import pytest

from eval.servers.server import LOCAL
from tests.cli.jobs import run_cli
from tests.engine.test_explain import explained, reason
from tests.engine.test_steps import MIXED_IN_TURN
from tests.engine.tight import UNTRIED, learn, num_running
from tests.engine.traffic import (
    FLEX,
    completion,
    is_idle,
    metric,
    post,
    send_all,
    texts,
    until,
    wait_until,
)
from tests.servers import COMMON_ARGS, STRICT

pytestmark = pytest.mark.server

PLACES = 4
NUM_WORDS = 600  # a prompt of several chunks
QUICK = completion("a short question", 8)
ARGS = (
    *(*COMMON_ARGS, "--served-model-name", "tiny", "--max-running-requests", str(PLACES)),
    *UNTRIED,
)
# Every decode is ahead of its due times at once, and whoever finds no place is in a hurry.
CONFIG: dict[str, Any] = {
    "slo": {"ttft_s": 2.0, "tpot_s": 0.5, "min_ttft_s": 0.4, "min_tpot_s": 0.0001},
    "steps": {"place_share": 0.75, "max_stall_s": 10.0, "stall_share": 1.0, "ttft_margin": 1.0},
}


@pytest.fixture
def server(server_for, write_config):
    server = server_for(ARGS, config=str(write_config(**CONFIG)), env=STRICT)
    learn(server)
    wait_until(lambda: is_idle(server), "the server is idle")
    yield server
    post(server, "/abort_request", {"abort_all": True})


def long_bodies(num: int, num_tokens: int = 1500) -> list[dict[str, Any]]:
    return [completion(f"long {number}", num_tokens, rid=f"long-{number}") for number in range(num)]


def outlasting() -> list[dict[str, Any]]:
    """Who has all places for longer than another one can wait."""
    return long_bodies(PLACES, 600)


def num_given(server) -> float:
    return metric(server, "echo_sgl_given_places_total", task="online")


def waiting_ahead(server, num: int) -> list[str]:
    rids = [f"long-{number}" for number in range(num)]
    return [rid for rid in rids if reason(server, rid) == "ahead"]


async def beside_long(server, body: dict[str, Any]) -> list[httpx.Response]:
    """One online request that comes when others have all places."""
    long = asyncio.create_task(send_all(server, outlasting()))
    await until(lambda: long.done() or num_running(server) == PLACES, "all places are taken")
    return [*await send_all(server, [body]), *await long]


@pytest.mark.parametrize("variant", [(), MIXED_IN_TURN])
def test_a_decode_that_is_ahead_gives_its_place_and_answers_the_same(
    server_for, write_config, stock_texts, variant
):
    server = server_for((*ARGS, *variant), config=str(write_config(**CONFIG)), env=STRICT)
    learn(server)
    num_before = num_given(server)
    answers = asyncio.run(beside_long(server, QUICK))
    assert texts(answers) == stock_texts([QUICK, *outlasting()])
    wait_until(lambda: num_given(server) > num_before, "a place changed hands")
    assert metric(server, "echo_sgl_retractions_total") == 0


def test_who_gave_its_place_finds_its_kv_though_a_job_waits_for_all_else(server_for, write_config):
    """No share of the cache is online's, and decodes grow into what the job's lines will use."""
    cache = {"protected_share": 0.0}
    config = write_config(**CONFIG, cache=cache, reserve={"predictor": "off"})
    server = server_for(ARGS, config=str(config), env=STRICT)
    learn(server)
    documents = [" ".join(f"{name}{word}" for word in range(NUM_WORDS)) for name in "abcd"]
    lines = [
        completion(f"{document} {line}", 4, **FLEX) for line in (1, 2) for document in documents
    ]
    asyncio.run(send_all(server, lines[:4]))
    start_s = time.monotonic()

    async def run() -> None:
        long = asyncio.create_task(send_all(server, outlasting()))
        await until(lambda: long.done() or num_running(server) == PLACES, "all places are taken")
        job = asyncio.create_task(send_all(server, lines[4:]))
        while not long.done():
            await send_all(server, [QUICK])
        await long
        await job

    asyncio.run(run())
    rows = steps_since(server, time.monotonic() - start_s)
    given = [row for row in rows if row["num_given_places"] > rows[0]["num_given_places"]]
    online = [row for row in given if row["num_prefills"] and not row["num_offline"]]
    assert max(row["cached_tokens"] for row in online) > 200, "somebody came back"
    assert max(row["prefill_tokens"] / row["num_prefills"] for row in online) < 10


def test_nobody_gives_its_place_to_a_request_that_lacks_memory(server, stock_texts):
    large = completion("a large question", 3700, rid="large")
    start_s = time.monotonic()

    async def run() -> list[httpx.Response]:
        long = asyncio.create_task(send_all(server, long_bodies(PLACES)))
        await until(lambda: long.done() or num_running(server) == PLACES, "all places are taken")
        other = asyncio.create_task(send_all(server, [large]))
        answers = await long
        post(server, "/abort_request", {"rid": "large"})
        await other
        return answers

    assert texts(asyncio.run(run())) == stock_texts(long_bodies(PLACES))
    params = {"seconds": time.monotonic() - start_s}
    [steps] = LOCAL.get(f"{server.url}/echo/trace", params=params).json()["replicas"]
    column = steps["columns"].index("num_given_places")
    assert len({row[column] for row in steps["rows"]}) == 1


def test_ranks_let_the_same_places_change_hands(server_for, write_config, stock_texts, tmp_path):
    args, config = (*ARGS, "--tp-size", "2"), str(write_config(**CONFIG))
    env = {**STRICT, "ECHO_SGL_DECISION_LOG": str(tmp_path / "decisions")}

    def decisions(rank: int) -> list[str]:
        return (tmp_path / f"decisions.rank{rank}").read_text().splitlines()

    with server_for.once(args, config=config, env=env) as server:
        learn(server)
        answers = asyncio.run(beside_long(server, QUICK))
        assert texts(answers) == stock_texts([QUICK, *outlasting()])
        wait_until(lambda: num_given(server) > 0, "a place changed hands")
        wait_until(lambda: len(decisions(0)) == len(decisions(1)), "both ranks are done")
        assert decisions(0) == decisions(1)


def test_who_is_late_lets_others_go_first_and_says_so(server_for, write_config, stock_texts):
    """Nobody that decodes is ahead, so both wait until one of them has ended."""
    steps = {**CONFIG["steps"], "late_wait_s": 600.0}
    config = write_config(**{**CONFIG, "steps": steps})
    server = server_for(ARGS, config=str(config), env=STRICT)
    learn(server)
    busy = {"custom_params": {"tpot_s": 0.0001}}
    long = [completion(f"busy {at}", 1500, rid=f"busy-{at}", **busy) for at in range(PLACES)]
    late, patient = (
        completion(f"a {name} question", 8, rid=name, custom_params={"ttft_s": ttft_s})
        for name, ttft_s in (("late", 0.4), ("patient", 600.0))
    )

    async def run() -> tuple[list[str], list[httpx.Response]]:
        others = asyncio.create_task(send_all(server, long))
        await until(lambda: others.done() or num_running(server) == PLACES, "all places are taken")
        first = asyncio.create_task(send_all(server, [late]))
        await until(lambda: reason(server, "late") is not None, "it waits")
        second = asyncio.create_task(send_all(server, [patient]))
        # Before, it is told what all wait for.
        await until(lambda: reason(server, "late") == "late", "it is put off")
        ended: list[str] = []
        first.add_done_callback(lambda _: ended.append("late"))
        second.add_done_callback(lambda _: ended.append("patient"))
        post(server, "/abort_request", {"rid": "busy-0"})
        answers = [*await first, *await second]
        post(server, "/abort_request", {"rid": "busy-"})
        await others
        return ended, answers

    ended, answers = asyncio.run(run())
    assert ended == ["patient", "late"]
    assert texts(answers) == stock_texts([late, patient])


def test_who_gave_its_place_says_so_and_is_aborted_there(server):
    num = PLACES + 2
    seen: list[dict[str, Any]] = []

    async def run() -> list[httpx.Response]:
        long = asyncio.create_task(send_all(server, long_bodies(num)))
        while not (seen or long.done()):
            for rid in await asyncio.to_thread(waiting_ahead, server, num):
                told = await asyncio.to_thread(run_cli, "explain", rid, "--url", server.url)
                if "ahead of what it was promised" in told.stdout:
                    seen.append(await asyncio.to_thread(explained, server, rid))
        post(server, "/abort_request", {"abort_all": True})
        return await long

    def has_seen() -> bool:
        answers = asyncio.run(run())
        assert {answer.status_code for answer in answers} <= {200, 503}
        return bool(seen)

    wait_until(has_seen, "somebody says so that gave its place away")
    assert seen[0]["class"] == "online"
    wait_until(
        lambda: LOCAL.post(f"{server.url}/flush_cache").status_code == 200, "nothing is held"
    )


def test_beside_online_requests_with_most_places_nobody_offline_decodes(server, stock_texts):
    """Three quarters of the places are online's; there is time for the offline decode, no place."""
    job = completion("a long answer", 600, rid="job", **FLEX)
    later = completion("another answer", 60, rid="other", **FLEX)
    before = {name: metric(server, f"echo_sgl_{name}_total") for name in ("parks", "resumes")}

    async def run() -> list[httpx.Response]:
        offline = asyncio.create_task(send_all(server, [job]))
        await until(lambda: explained(server, "job").get("state") == "decoding", "it decodes")
        online = asyncio.create_task(send_all(server, long_bodies(PLACES - 1)))
        await until(lambda: explained(server, "job").get("state") == "parked", "it sits out")
        held_back = (await asyncio.to_thread(explained, server, "job"))["held_back"]
        assert held_back["places_taken"] >= 0.75
        assert held_back["slack_s"] > held_back["with_decode_s"]
        other = asyncio.create_task(send_all(server, [later]))
        await until(lambda: reason(server, "other") == "unfinished", "who started goes first")
        post(server, "/abort_request", {"rid": "long-"})
        await online
        return [*await offline, *await other]

    answers = asyncio.run(run())
    assert texts(answers) == stock_texts([job, later])
    after = {name: metric(server, f"echo_sgl_{name}_total") for name in ("parks", "resumes")}
    assert after["parks"] - before["parks"] == after["resumes"] - before["resumes"] > 0


def test_an_offline_decode_counts_in_every_step_that_it_is_in(server):
    """Overlapped, whose last token is on its way is left out of a step after that was planned."""
    job = completion("a long answer", 600, rid="job", **FLEX)
    since_s = time.monotonic()

    async def run() -> None:
        offline = asyncio.create_task(send_all(server, [job]))
        await until(lambda: explained(server, "job").get("state") == "decoding", "it decodes")
        for number in range(8):
            await send_all(server, [completion(f"short {number}", 6 + number)])
        assert not offline.done(), "the job ended before the others"
        await offline

    asyncio.run(run())
    rows = decodes_since(server, time.monotonic() - since_s)
    shared = [number for number, row in enumerate(rows) if row["num_decodes"] > row["num_offline"]]
    beside = rows[shared[0] : shared[-1]]
    assert len(shared) > 8
    assert {row["num_offline"] + row["num_parked"] for row in beside} == {1}


def steps_since(server, seconds: float) -> list[dict[str, Any]]:
    [replica] = LOCAL.get(f"{server.url}/echo/trace", params={"seconds": seconds}).json()[
        "replicas"
    ]
    return [dict(zip(replica["columns"], row, strict=True)) for row in replica["rows"]]


def decodes_since(server, seconds: float) -> list[dict[str, Any]]:
    return [row for row in steps_since(server, seconds) if not row["num_prefills"]]


def decode_s(server) -> float:
    """What passes from one step that decodes one request to the next."""
    [replica] = LOCAL.get(f"{server.url}/echo/trace", params={"seconds": 600}).json()["replicas"]
    at = {name: place for place, name in enumerate(replica["columns"])}
    starts_s = [row[at["start_s"]] for row in replica["rows"] if row[at["num_decodes"]] == 1]
    return statistics.median(after - before for before, after in itertools.pairwise(starts_s))


def waits_for_more(facts: dict[str, Any]) -> bool:
    return "worth_chunk_s" in (facts.get("held_back") or {})


def goes_on(facts: dict[str, Any]) -> bool:
    return facts["held_back"] is None and facts["prefilled_tokens"] < facts["prompt_tokens"]


async def waits_beside(
    server, prompt: dict[str, Any], tpot_s: float
) -> tuple[list[Any], list[Any]]:
    """What an offline prompt of many chunks is told to wait for beside a decode that leaves it
    little, and what when that has gone."""
    beside: list[Any] = []
    alone: list[Any] = []
    terms = {"custom_params": {"tpot_s": tpot_s}}
    online = asyncio.create_task(send_all(server, [completion("long", 1500, rid="long", **terms)]))
    await until(lambda: explained(server, "long").get("state") == "decoding", "it decodes")
    offline = asyncio.create_task(send_all(server, [prompt]))
    while not offline.done():
        facts = await asyncio.to_thread(explained, server, "job")
        if facts.get("state") == "prefilling":
            (alone if online.done() else beside).append(facts)
        if not online.done() and waits_for_more(facts):
            await asyncio.to_thread(post, server, "/abort_request", {"rid": "long"})
            await online
    await asyncio.to_thread(post, server, "/abort_request", {"rid": "long"})
    await online
    assert offline.result()[0].status_code == 200
    return beside, alone


def test_offline_chunks_wait_beside_online_decodes_until_they_are_worth_a_step(server):
    asyncio.run(send_all(server, [completion("alone", 200)]))
    numbers, tpots = itertools.count(), itertools.cycle([2.0, 2.5, 1.6])

    def has_waited() -> bool:
        prompt = " ".join(f"{next(numbers)}-{word}" for word in range(NUM_WORDS))
        job = completion(prompt, 2, rid="job", **FLEX)
        # On a machine that got slower since, the least of them leaves no time at all.
        beside, alone = asyncio.run(waits_beside(server, job, next(tpots) * decode_s(server)))
        waits = [facts["held_back"] for facts in beside if waits_for_more(facts)]
        for held in waits:
            assert held["smallest_chunk_s"] <= held["room_s"] < held["worth_chunk_s"]
        return bool(waits) and any(map(goes_on, alone))

    wait_until(has_waited, "an offline prompt waits for a longer chunk, then for nothing")
