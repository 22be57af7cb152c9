"""Steps held against a limit on a real server, SGLang's strict memory check on."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from eval.servers.server import LOCAL
from tests.engine.tight import (
    TIGHT,
    UNTRIED,
    learn,
    num_running,
    offline_bodies,
    offline_then_online,
    online_bodies,
    parks,
)
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

MIXED_IN_TURN = ("--enable-mixed-chunk", "--disable-overlap-schedule")


# Who has to say so many tokens before it may end: SGLang counts them for the batch.
COUNTED = {"min_tokens": 5}
# And how often it says which, for these.
PENALTIES = (
    {"frequency_penalty": 0.7, "min_tokens": 5},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.1},
)
# Likely ones, which a model of made-up weights would not repeat by itself.
LIKELY = {"logit_bias": {str(600 + number): 20.0 - 0.3 * number for number in range(30)}}


@pytest.mark.parametrize("counted", [False, True])
def test_parked_requests_answer_as_if_they_had_never_sat_out(tight_server, stock_texts, counted):
    learn(tight_server)
    offline, online = offline_bodies(), online_bodies()
    if counted:
        online = [{**body, **COUNTED} for body in online]
        offline = [{**body, **COUNTED} for body in offline]
    before = parks(tight_server)
    answers = []
    while parks(tight_server) == before:  # traffic may come too late to park anybody
        answers = asyncio.run(offline_then_online(tight_server, offline, online))
    assert texts(answers) == stock_texts([*offline, *online])
    wait_until(lambda: is_idle(tight_server), "the server is idle")
    assert metric(tight_server, "echo_sgl_parked_requests", task="offline") == 0
    assert metric(tight_server, "echo_sgl_retractions_total") == 0


@pytest.mark.parametrize("tight_server", [("--disable-overlap-schedule",)], indirect=True)
def test_penalties_count_on_where_their_requests_sat_out(tight_server):
    """Overlapped, SGLang counts a token late or twice when somebody else is prefilled between."""
    learn(tight_server)
    plain = [{**body, **LIKELY} for body in offline_bodies()]
    offline = [{**body, **PENALTIES[number % len(PENALTIES)]} for number, body in enumerate(plain)]
    alone = texts(asyncio.run(send_all(tight_server, offline)))
    without = texts(asyncio.run(send_all(tight_server, plain)))
    for kind in range(len(PENALTIES)):
        assert alone[kind :: len(PENALTIES)] != without[kind :: len(PENALTIES)]
    before = parks(tight_server)
    answers: list[httpx.Response] = []
    while parks(tight_server) == before:
        answers = asyncio.run(offline_then_online(tight_server, offline))
    assert texts(answers)[: len(offline)] == alone


@pytest.mark.parametrize("tight_server", [("--disable-overlap-schedule",)], indirect=True)
def test_an_online_request_waits_for_one_step_of_offline_work_at_most(tight_server):
    learn(tight_server)
    job = [{**body, "max_tokens": 1000} for body in offline_bodies()]

    async def run() -> bool:
        offline = asyncio.create_task(send_all(tight_server, job))
        await until(lambda: offline.done() or num_running(tight_server) > 0, "the job runs")
        for number in range(20):
            await send_all(tight_server, [completion(f"alone {number}", 1)])
        goes_on = not offline.done()
        await asyncio.to_thread(post, tight_server, "/abort_request", {"abort_all": True})
        await offline
        return goes_on

    while not asyncio.run(run()):
        pass
    assert metric(tight_server, "echo_sgl_online_wait_seconds", task="online") > 0
    assert metric(tight_server, "echo_sgl_online_wait_steps", task="online") <= 1


def test_abort_reaches_requests_that_sit_out(tight_server):
    learn(tight_server)

    async def run() -> tuple[bool, list[httpx.Response]]:
        offline = asyncio.create_task(
            send_all(tight_server, [{**body, "max_tokens": 400} for body in offline_bodies()])
        )
        await until(
            lambda: offline.done() or num_running(tight_server) > 0, "offline requests run, or did"
        )
        online = asyncio.create_task(
            send_all(tight_server, [{**body, "max_tokens": 600} for body in online_bodies()])
        )
        await until(lambda: offline.done() or num_parked(tight_server) > 0, "some sit out, or did")
        were_parked = not offline.done()
        post(tight_server, "/abort_request", {"abort_all": True})
        return were_parked, [*await offline, *await online]

    were_parked = False
    while not were_parked:  # the online requests may come too late to make anybody sit out
        were_parked, answers = asyncio.run(run())
    assert len(answers) == len(offline_bodies()) + len(online_bodies())
    wait_until(
        lambda: LOCAL.post(f"{tight_server.url}/flush_cache").status_code == 200,
        "nothing is held any more",
    )
    assert num_parked(tight_server) == 0


def num_parked(server) -> float:
    return metric(server, "echo_sgl_parked_requests", task="offline")


def test_a_request_whose_grammar_was_compiled_does_not_wait_for_decodes_to_end(tight_server):
    """No chunk fits beside the decode: nobody offline would be prefilled before it ends."""
    learn(tight_server)
    constrained = completion("a word", 4, regex="[a-f]{4}[0-9]{3}", ignore_eos=False)

    async def run() -> tuple[bool, list[httpx.Response], list[httpx.Response]]:
        long = asyncio.create_task(send_all(tight_server, [completion("long", 4000)]))
        await until(lambda: num_running(tight_server) > 0, "the long one runs")
        answers = await send_all(tight_server, [constrained])
        ended_before = long.done()
        post(tight_server, "/abort_request", {"abort_all": True})
        return ended_before, answers, await long

    ended_before, [answer], _ = asyncio.run(run())
    assert answer.status_code == 200
    assert not ended_before


def test_an_offline_prompt_that_cannot_be_set_aside_is_through_soon(tight_server):
    """Its logprobs would be lost with its chunks, and one page a step would take for ever."""
    learn(tight_server)
    [text, other] = documents(2, 1200, seed=43)
    body = completion(text, 1, rid="scored", echo=True, logprobs=1, **FLEX)

    async def run() -> tuple[bool, list[httpx.Response]]:
        offline = asyncio.create_task(send_all(tight_server, [body]))
        await until(
            lambda: offline.done() or state(tight_server, "scored") == "prefilling",
            "it is between chunks, or was",
        )
        came_in_time = not offline.done()
        online = await send_all(tight_server, [completion(other, 2)])
        return came_in_time, [*await offline, *online]

    came_in_time = False
    while not came_in_time:
        num_before = steps_of(tight_server)["num_steps"]
        came_in_time, answers = asyncio.run(run())
    assert {answer.status_code for answer in answers} == {200}
    [prompt_tokens, _] = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
    num_steps = steps_of(tight_server)["num_steps"] - num_before
    assert num_steps < prompt_tokens / 10


def state(server, rid):
    return LOCAL.get(f"{server.url}/echo/requests/{rid}", timeout=60).json().get("state")


def steps_of(server):
    return LOCAL.get(f"{server.url}/echo/steps", timeout=60).json()["replicas"][0]


def test_terms_that_are_too_strict_are_answered_with_400(tight_server):
    headers = {"x-echo-ttft-s": "0.0001"}
    body = completion("hello", 2)
    answer = LOCAL.post(f"{tight_server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert "ttft_s is 0.0001; allowed are seconds above 0, at least 0.001" in answer.text
    headers = {"x-echo-ttft-s": "soon"}
    answer = LOCAL.post(f"{tight_server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    headers = {"x-echo-ttft-s": "30", "x-echo-tpot-s": "1"}
    answer = LOCAL.post(f"{tight_server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200


def test_a_job_with_a_deadline_overtakes_one_without(tight_server):
    """In order of arrival it would be last: others would all have left the pool."""
    crowd = [completion(text, 100, **FLEX) for text in documents(80, 40, seed=31)]
    hurried = completion("hurried", 4, **FLEX)

    async def run() -> tuple[httpx.Response, int]:
        others = asyncio.create_task(send_all(tight_server, crowd))
        await until(lambda: pooled(tight_server) > 30, "a crowd waits")
        async with httpx.AsyncClient(verify=False, timeout=600) as client:
            url = f"{tight_server.url}/v1/completions"
            answer = await client.post(url, json=hurried, headers={"x-echo-deadline-s": "1"})
        num_waiting = pooled(tight_server)
        post(tight_server, "/abort_request", {"abort_all": True})
        await others
        return answer, num_waiting

    answer, num_waiting = asyncio.run(run())
    assert answer.status_code == 200
    assert num_waiting > 0


def test_long_online_prompts_are_cut_one_after_the_other(tight_server, stock_texts):
    """Beside online decodes that are late already, each gets the smallest chunk at a time.

    What such a chunk leaves of SGLang's own is too little for the prompts in between, which the
    limit alone would let in whole: SGLang ends when two prompts are between chunks.
    """
    learn(tight_server)
    short = [completion(f"short {number}", 400) for number in range(4)]
    texts_between = documents(4, 50, seed=42)  # of about 110 tokens
    texts_long = documents(4, 350, seed=41)
    long = [
        completion(text, 4) for pair in zip(texts_long, texts_between, strict=True) for text in pair
    ]

    async def run(server) -> list[httpx.Response]:
        first = asyncio.create_task(send_all(server, short))
        await until(lambda: num_running(server) > 0, "online requests decode")
        return [*await send_all(server, long), *await first]

    for _ in range(3):
        answers = asyncio.run(run(tight_server))
        assert {answer.status_code for answer in answers} == {200}
    assert texts(answers) == stock_texts([*long, *short])


@pytest.mark.parametrize(
    ("variant", "num_steps"),
    [
        ((), 150),
        (MIXED_IN_TURN, 150),
        pytest.param(("--enable-mixed-chunk",), 300, marks=pytest.mark.slow),
        pytest.param(("--disable-overlap-schedule",), 300, marks=pytest.mark.slow),
        pytest.param((), 1000, marks=pytest.mark.slow),
        pytest.param(MIXED_IN_TURN, 1000, marks=pytest.mark.slow),
    ],
)
def test_ranks_decide_alike_step_by_step(
    server_for, write_config, stock_texts, tmp_path, variant, num_steps
):
    """Clock, measured times, draws and all that follows from them are rank 0's on both ranks."""
    args = (*COMMON_ARGS, *NAMED, *UNTRIED, "--tp-size", "2", *variant)
    drawn = {"offline": {"order": "psm", "utility_ratio": 0.8}}
    config = str(write_config(**TIGHT | drawn, estimator={"refit_steps": 50}))
    prefix = tmp_path / "decisions"
    env = {**STRICT, "ECHO_SGL_DECISION_LOG": str(prefix)}

    def decisions(rank: int) -> list[str]:
        return (tmp_path / f"decisions.rank{rank}").read_text().splitlines()

    with server_for.once(args, config=config, env=env) as server:
        while len(decisions(0)) < num_steps:
            answers = asyncio.run(offline_then_online(server))
            assert texts(answers) == stock_texts([*offline_bodies(), *online_bodies()])
        wait_until(lambda: is_idle(server), "the server is idle")
        wait_until(lambda: len(decisions(0)) == len(decisions(1)), "both ranks are done")
        assert decisions(0) == decisions(1)
        assert any(line.rpartition("|")[2].strip() for line in decisions(0)), "nobody ever sat out"
