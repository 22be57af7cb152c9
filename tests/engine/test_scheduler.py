"""Two classes of work on the real scheduler, SGLang's strict memory check on."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

from eval.figures.step_shares import step_rows
from eval.servers.server import LOCAL, Server
from tests.engine.traffic import (
    FLEX,
    completion,
    documents,
    is_idle,
    metric,
    pooled,
    post,
    send_all,
    texts,
    until,
    wait_until,
)
from tests.servers import COMMON_ARGS, NAMED, STRICT

pytestmark = pytest.mark.server

# What makes requests come back, by the names of a step's columns.
INTERRUPTIONS = ("num_retractions", "num_prefill_parks", "num_parks")


def mixed_bodies(*, seed: int = 1) -> list[dict[str, object]]:
    """40 requests over 5 documents, a third of them online, outputs of 3 to 40 tokens."""
    rng = random.Random(seed)
    shared = documents(5, 150, seed=seed)
    return [
        completion(
            f"{rng.choice(shared)} question {number}",
            rng.randrange(3, 40),
            **({} if number % 3 == 0 else FLEX),
        )
        for number in range(40)
    ]


def test_outputs_are_identical_with_echo_on_and_off(echo_server, stock_texts):
    expected = stock_texts(mixed_bodies())
    answers = asyncio.run(send_all(echo_server, mixed_bodies()))
    assert texts(answers) == expected
    wait_until(lambda: is_idle(echo_server), "the server is idle")
    assert pooled(echo_server) == 0


@pytest.mark.parametrize(
    "variant",
    [
        ("--dp-size", "2", "--enable-mixed-chunk"),
        ("--disable-overlap-schedule", "--enable-mixed-chunk", "--page-size", "16"),
    ],
    ids=["dp2-mixed", "no-overlap-mixed-page16"],
)
def test_outputs_stay_the_same_under_every_kind_of_step(server_for, stock_texts, variant):
    """Two ranks of one replica are in test_steps.py."""
    expected = stock_texts(mixed_bodies())
    args = (*COMMON_ARGS, *NAMED, *variant)
    with server_for.once(args, config="echo", env=STRICT) as server:
        before = metric(server, "echo_sgl_requests_total", outcome="finished")
        answers = asyncio.run(send_all(server, mixed_bodies()))
        assert texts(answers) == expected
        done = metric(server, "echo_sgl_requests_total", outcome="finished") - before
        assert done == len(answers)
        prompt_tokens = sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)
        assert metric(server, "echo_sgl_prompt_tokens_total") >= prompt_tokens
        wait_until(lambda: is_idle(server), "the server is idle")
        check_chunks_beside_online_decodes(server)


def check_chunks_beside_online_decodes(server: Server) -> None:
    """What has no room for a chunk waits: no step of both is paid for a page of one."""
    texts_of_64_tokens = documents(6, 80, seed=5)
    online = [completion(text, 250) for text in texts_of_64_tokens]
    offline = [completion(text, 8, **FLEX) for text in documents(12, 400, seed=6)]

    async def run() -> list[list[httpx.Response]]:
        return await asyncio.gather(send_all(server, online), send_all(server, offline))

    began_s = time.monotonic()
    for answers in asyncio.run(run()):
        assert {answer.status_code for answer in answers} == {200}
    rows = step_rows(server, time.monotonic() - began_s)
    short = [row for row in rows if row["num_prefills"] and row["prefill_tokens"] < 64]
    interrupted = sum(max(row[name] for row in rows) for name in INTERRUPTIONS)
    # The rest of a prompt may be short, and so may be what somebody who comes back has lost.
    assert len(short) <= len(offline) + interrupted


@pytest.mark.parametrize("num_lines", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_large_pool_survives_aborts_and_a_flush(server_for, write_config, num_lines):
    num_left, most = num_lines - 100, num_lines + 10
    config = write_config(max_running_requests=1, order="fcfs", max_pool_requests=most)
    server = server_for((*COMMON_ARGS, *NAMED), config=config, env=STRICT)
    # SGLang takes no requests while it is paused; these keep the others in the pool instead.
    blockers = [completion(f"block {n}", 7000, rid=f"block-{n}", **FLEX) for n in range(6)]
    shared = documents(20, 60)
    bodies = [
        completion(f"{shared[number % 20]} question {number}", 2, rid=f"job-{number:05d}", **FLEX)
        for number in range(num_lines)
    ]

    async def run() -> list[httpx.Response]:
        blocking = asyncio.create_task(send_all(server, blockers))
        await until(lambda: pooled(server) == 5, "one blocks, five wait to")
        waiting = asyncio.create_task(send_all(server, bodies))
        await until(lambda: pooled(server) >= num_lines, "all requests are pooled")
        aborted = [f"job-{number:05d}" for number in range(num_left, num_lines)]
        await send_all(server, [{"rid": rid} for rid in aborted], "/abort_request")
        await until(lambda: pooled(server) < num_lines, "some of a hundred are aborted")
        assert LOCAL.post(f"{server.url}/flush_cache").status_code == 400  # work is pending
        assert post(server, "/pause_generation", {"mode": "retract"}).status_code == 200
        assert LOCAL.post(f"{server.url}/flush_cache").status_code == 200
        assert pooled(server) > num_left
        assert post(server, "/continue_generation", {}).status_code == 200
        assert (await send_all(server, [completion("online in between")]))[0].status_code == 200
        await send_all(server, [{"rid": f"block-{n}"} for n in range(6)], "/abort_request")
        await blocking
        return await waiting

    answers = asyncio.run(run())
    ended = [answer.json()["choices"][0]["finish_reason"] for answer in answers]
    assert ended == ["length"] * num_left + ["abort"] * 100
    offline = {"task": "offline"}
    assert metric(server, "echo_sgl_requests_total", outcome="finished", **offline) == num_left
    assert metric(server, "echo_sgl_requests_total", outcome="cancelled", **offline) == 106
    wait_until(lambda: is_idle(server) and pooled(server) == 0, "everything has ended")
    assert LOCAL.post(f"{server.url}/flush_cache").status_code == 200


@pytest.fixture
def unreserved_server(server_for, write_config) -> Server:
    """What offline requests may hold does not depend on earlier tests' online requests."""
    config = write_config(reserve={"predictor": "off"})
    return server_for((*COMMON_ARGS, *NAMED), config=config, env=STRICT)


@pytest.fixture
def cramped_server(server_for, write_config) -> Server:
    """Offline requests are short of memory and slots."""
    config = write_config(max_running_requests=5, utility_ratio=1.0)
    args = (*COMMON_ARGS, *NAMED, "--max-total-tokens", "2500")
    return server_for(args, config=config, env=STRICT)


def test_offline_requests_run_in_prefix_order_however_they_arrive(server_for, write_config):
    """Ten documents of which the pool holds few: only the order decides what is found cached."""
    config = write_config(max_running_requests=1, utility_ratio=1.0)
    args = (*COMMON_ARGS, *NAMED, "--max-total-tokens", "2500")
    server = server_for(args, config=config, env=STRICT)
    shared = documents(10, 200, seed=3)
    bodies = [completion(f"{shared[n % 10]} question {n}", 2, **FLEX) for n in range(100)]

    async def run() -> list[httpx.Response]:
        blocker = completion("block", 2300, rid="blocker", **FLEX)
        blocking = asyncio.create_task(send_all(server, [blocker]))
        await until(lambda: _running(server) == 1, "one request holds the only slot")
        waiting = asyncio.create_task(send_all(server, bodies))
        await until(lambda: pooled(server) == len(bodies), "all others wait")
        await send_all(server, [{"rid": "blocker"}], "/abort_request")
        await blocking
        return await waiting

    usage = [answer.json()["usage"] for answer in asyncio.run(run())]
    cached = sum(item["prompt_tokens_details"]["cached_tokens"] for item in usage)
    prompt = sum(item["prompt_tokens"] for item in usage)
    assert cached / prompt > 0.85  # 1 in 10 must be computed, and each question


def test_neighbours_that_arrive_together_compute_their_shared_prefix_once(echo_server):
    """All fit into one prefill step; computed at once, each would miss the same prefix."""
    LOCAL.post(f"{echo_server.url}/flush_cache")
    [shared] = documents(1, 40, seed=31)
    bodies = [completion(f"{shared} {n}", 1, **FLEX) for n in range(12)]
    answers = asyncio.run(send_all(echo_server, bodies))
    usage = [answer.json()["usage"] for answer in answers]
    missed = [u["prompt_tokens"] - u["prompt_tokens_details"]["cached_tokens"] for u in usage]
    assert usage[0]["prompt_tokens"] > 64
    assert sum(missed) < 2 * usage[0]["prompt_tokens"]


def test_an_online_request_takes_the_memory_of_offline_ones(cramped_server):
    server = cramped_server
    LOCAL.post(f"{server.url}/flush_cache")
    long_offline = completion(documents(1, 150, seed=5)[0], 1500, **FLEX)
    online = completion(documents(1, 300, seed=6)[0], 40)

    async def run() -> tuple[httpx.Response, httpx.Response, bool]:
        offline = asyncio.create_task(send_all(server, [long_offline]))
        await until(lambda: _running(server) == 1, "the offline request runs")
        first = (await send_all(server, [online]))[0]
        was_first = not offline.done()
        return first, (await offline)[0], was_first

    before = metric(server, "echo_sgl_retractions_total", task="offline")
    online_answer, offline_answer, online_was_first = asyncio.run(run())
    assert online_was_first
    assert online_answer.json()["usage"]["completion_tokens"] == 40
    assert offline_answer.json()["usage"]["completion_tokens"] == 1500
    wait_until(
        lambda: metric(server, "echo_sgl_retractions_total", task="offline") > before, "counted"
    )
    assert metric(server, "echo_sgl_retractions_total", task="online") == 0


def test_an_online_request_takes_the_slot_of_an_offline_one(unreserved_server):
    offline_bodies = [completion(f"offline {n}", 300, **FLEX) for n in range(18)]

    async def run() -> tuple[bool, list[httpx.Response]]:
        offline = asyncio.create_task(send_all(unreserved_server, offline_bodies))
        await until(lambda: _running(unreserved_server) == 16, "offline requests hold all slots")
        answers = await send_all(unreserved_server, [completion("online", 3)])
        return not offline.done(), answers + await offline

    retracted = {"name": "echo_sgl_retractions_total", "task": "offline"}
    before = metric(unreserved_server, **retracted)
    online_was_first, answers = asyncio.run(run())
    assert online_was_first
    tokens = [answer.json()["usage"]["completion_tokens"] for answer in answers]
    assert tokens == [3] + [300] * 18
    wait_until(lambda: metric(unreserved_server, **retracted) > before, "one is retracted")


def test_decode_memory_is_taken_from_offline_requests_first(cramped_server, stock_texts):
    """Six growing requests outgrow the pool: only offline ones are retracted, none is lost."""
    bodies = [completion(f"growing {n}", 420, **({} if n < 3 else FLEX)) for n in range(8)]
    expected = stock_texts(bodies)
    answers = asyncio.run(send_all(cramped_server, bodies))
    assert texts(answers) == expected
    assert metric(cramped_server, "echo_sgl_retractions_total", task="online") == 0


def test_an_unfinished_offline_prefill_steps_aside_for_an_online_request(
    unreserved_server, stock_texts
):
    long_prompts = [completion(text, 4, **FLEX) for text in documents(4, 900, seed=9)]
    short = [completion(f"online {n}", 4) for n in range(12)]

    async def run() -> list[httpx.Response]:
        offline = asyncio.create_task(send_all(unreserved_server, long_prompts))
        online = [await send_all(unreserved_server, [body]) for body in short]
        return [*await offline, *(answer[0] for answer in online)]

    before = metric(unreserved_server, "echo_sgl_parked_prefills_total")
    num_retractions = metric(unreserved_server, "echo_sgl_retractions_total")
    for _ in range(20):  # online requests may come too late to meet an unfinished prefill
        LOCAL.post(f"{unreserved_server.url}/flush_cache")
        answers = asyncio.run(run())
        assert texts(answers) == stock_texts([*long_prompts, *short])
        wait_until(lambda: is_idle(unreserved_server), "the server is idle")
        if metric(unreserved_server, "echo_sgl_parked_prefills_total") > before:
            break
    assert metric(unreserved_server, "echo_sgl_parked_prefills_total") > before
    assert metric(unreserved_server, "echo_sgl_retractions_total") == num_retractions


def test_a_cancelled_prefill_leaves_nothing_behind(unreserved_server):
    """Clients that go away while their long offline prompts are chunked, parked or pooled."""
    bodies = [completion(text, 400, **FLEX) for text in documents(6, 900, seed=11)]

    async def run() -> None:
        calls = asyncio.create_task(send_all(unreserved_server, bodies))
        online = asyncio.create_task(send_all(unreserved_server, [completion("hi", 30)] * 4))
        await until(lambda: _running(unreserved_server) > 0, "something runs")
        calls.cancel()
        assert {answer.status_code for answer in await online} == {200}

    asyncio.run(run())
    wait_until(
        lambda: LOCAL.post(f"{unreserved_server.url}/flush_cache").status_code == 200,
        "all is cancelled and the cache can be flushed",
    )
    assert pooled(unreserved_server) == 0


def test_a_json_schema_holds_for_an_offline_request(echo_server):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    body = {
        "text": "answer",
        "sampling_params": {
            "max_new_tokens": 64,
            "temperature": 0,
            "json_schema": str(schema).replace("'", '"'),
            "custom_params": FLEX,
        },
    }
    answer = post(echo_server, "/generate", body)
    assert answer.status_code == 200
    assert answer.json()["text"].startswith("{")


def _running(server) -> int:
    loads = LOCAL.get(f"{server.url}/v1/loads", timeout=30).json()["loads"]
    return sum(load["num_running_reqs"] for load in loads)
