"""BROS's packing and replacement, OOCO's selection and gating on a real server.

SGLang's strict memory check is on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from eval.servers.server import LOCAL, Server
from tests.engine.tight import UNTRIED, num_running, num_waiting
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

# Online decodes have time to spare; the budget of a step is set while it runs.
CONFIG: dict[str, Any] = {
    "offline": {"order": "fcfs"},
    "reserve": {"predictor": "off"},
    "slo": {"ttft_s": 100.0, "tpot_s": 100.0, "min_ttft_s": 1.0, "min_tpot_s": 0.0001},
    "steps": {
        "limit": "budget",
        "budget_s": 5.0,
        "adapt_budget": False,
        "decode_selection": "uncached",
        "pack": True,
        "replace": True,
        "gate": True,
        "parked_share": 1.0,
        "gather": False,
    },
    "estimator": {"model": "bros"},
}
FREE_S = 5.0
VARIANTS = [
    (),
    pytest.param(("--enable-mixed-chunk",), marks=pytest.mark.slow),
    pytest.param(("--disable-overlap-schedule",), marks=pytest.mark.slow),
    pytest.param(("--page-size", "16", "--tp-size", "2"), marks=pytest.mark.slow),
]
# From less than any step of the tiny model to more than any takes.
BUDGETS_S = tuple(0.001 * 1.15**power for power in range(30))


@pytest.fixture
def server(server_for, write_config, request):
    variant = getattr(request, "param", ())
    args = (*COMMON_ARGS, *NAMED, *UNTRIED, "--max-total-tokens", "20000", *variant)
    server = server_for(args, config=str(write_config(**CONFIG)), env=STRICT)
    set_budget(server, FREE_S)
    wait_until(lambda: is_idle(server), "the server is idle")
    yield server
    set_budget(server, FREE_S)
    post(server, "/abort_request", {"abort_all": True})


def set_budget(server: Server, budget_s: float) -> None:
    assert post(server, "/echo/budget", {"budget_s": budget_s}).status_code == 200


def given_turns(server: Server) -> float:
    return metric(server, "echo_sgl_parks_total", task="online")


def held_back(server: Server, rid: str) -> dict[str, Any]:
    answer = LOCAL.get(f"{server.url}/echo/requests/{rid}", timeout=60)
    facts = answer.json().get("held_back") if answer.status_code == 200 else None
    return facts or {}


async def beside(server: Server, online: Sequence[Any], offline: Sequence[Any]) -> list[str]:
    """What is answered while the budget goes up and down, so that turns change hands."""
    first = asyncio.create_task(send_all(server, online))
    await until(lambda: first.done() or num_running(server) == len(online), "online ones run")
    second = asyncio.create_task(send_all(server, offline))
    number = 0
    while not (first.done() or second.done()):
        await asyncio.to_thread(set_budget, server, BUDGETS_S[number % len(BUDGETS_S)])
        number += 1
    await asyncio.to_thread(set_budget, server, FREE_S)
    return texts([*await first, *await second])


@pytest.mark.parametrize("server", VARIANTS, indirect=True)
def test_who_gives_a_turn_away_answers_as_if_it_had_not(server, stock_texts):
    """Long contexts leave their turn to short ones, which make the step shorter."""
    online = [completion(text, 250) for text in documents(6, 400, seed=90)]
    offline = [completion(text, 120, **FLEX) for text in documents(8, 12, seed=82)]
    expected = stock_texts([*online, *offline])
    before = given_turns(server)
    for _ in range(10):
        assert asyncio.run(beside(server, online, offline)) == expected
        wait_until(lambda: is_idle(server), "the server is idle")
        if given_turns(server) > before:
            break
    assert given_turns(server) > before
    assert metric(server, "echo_sgl_retractions_total", task="online") == 0


def test_who_has_time_to_spare_sits_out_for_who_is_promised_more(server, stock_texts):
    """One is promised its tokens faster than a step with six long contexts takes: by how much is
    tried, from what no step keeps to what all do."""
    patient = [completion(text, 250) for text in documents(6, 400, seed=85)]
    urgent = completion("The one who cannot wait:", 100)
    expected = stock_texts([*patient, urgent])

    async def run(tpot_s: float) -> list[httpx.Response]:
        first = asyncio.create_task(send_all(server, patient))
        await until(lambda: first.done() or num_running(server) == len(patient), "they run")
        promised = urgent | {"custom_params": {"tpot_s": tpot_s}}
        (last,) = await send_all(server, [promised])
        return [*await first, last]

    before = given_turns(server)
    for tpot_s in BUDGETS_S:
        assert texts(asyncio.run(run(tpot_s))) == expected
        if given_turns(server) > before:
            break
    assert given_turns(server) > before
    assert metric(server, "echo_sgl_retractions_total", task="online") == 0


def test_who_is_promised_its_first_token_sooner_goes_before_who_came_first(server):
    """All places are taken; one of them becomes free, perhaps too soon."""
    holding = [
        completion(text, 400 if number else 250)
        for number, text in enumerate(documents(16, 20, seed=89))
    ]

    async def order() -> list[str]:
        """Who was answered first: by then the other had not been given a place."""
        came: list[str] = []

        async def answered(name: str, body: dict[str, Any]) -> None:
            (answer,) = await send_all(server, [body])
            assert answer.status_code == 200
            came.append(name)

        first = asyncio.create_task(send_all(server, holding))
        await until(lambda: first.done() or num_running(server) == 16, "all places are taken")
        slow = asyncio.create_task(answered("slow", completion("I came first", 60)))
        await until(lambda: first.done() or num_waiting(server) == 1, "it waits")
        fast = completion("I was promised more", 60, custom_params={"ttft_s": 1.0})
        await asyncio.gather(answered("fast", fast), slow, first)
        return came

    assert any(asyncio.run(order()) == ["fast", "slow"] for _ in range(5))


def test_an_online_request_ends_wherever_its_turn_is(server):
    """Clients that go away while turns change hands: nobody is left behind."""
    online = [
        completion(text, 400, rid=f"on-{n}") for n, text in enumerate(documents(6, 300, seed=83))
    ]
    offline = [completion(text, 200, **FLEX) for text in documents(8, 12, seed=84)]

    before = given_turns(server)

    async def run() -> list[httpx.Response]:
        calls = asyncio.create_task(send_all(server, [*online, *offline]))
        await until(lambda: calls.done() or num_running(server) >= 8, "they run")
        for number, budget_s in enumerate(BUDGETS_S):
            await asyncio.to_thread(set_budget, server, budget_s)
            if number % 5 == 0:
                rid = f"on-{number // 5}"
                await asyncio.to_thread(post, server, "/abort_request", {"rid": rid})
        await asyncio.to_thread(set_budget, server, FREE_S)
        return await calls

    for _ in range(10):
        answers = asyncio.run(run())
        wait_until(lambda: is_idle(server) and pooled(server) == 0, "all have ended")
        if given_turns(server) > before:
            break
    assert given_turns(server) > before
    wait_until(
        lambda: LOCAL.post(f"{server.url}/flush_cache").status_code == 200, "nothing is held"
    )
    ends = [answer.json()["choices"][0]["finish_reason"] for answer in answers[6:]]
    assert ends == ["length"] * 8


def test_no_prompt_is_computed_that_will_be_lost_and_it_says_so(server):
    """Online requests took places of offline ones, whose answers are short; now places get free."""
    lost = [completion(text, 300, **FLEX) for text in documents(16, 20, seed=86)]
    online = [completion(f"chat {number}", 300 - 28 * number) for number in range(10)]

    async def attempt(number: int) -> tuple[dict[str, Any], list[httpx.Response]]:
        # So many that what answers and prompts were like before is forgotten.
        short = [completion(text, 2, **FLEX) for text in documents(150, 200, seed=100 + number)]
        await send_all(server, short)
        first = asyncio.create_task(send_all(server, lost))
        await until(lambda: first.done() or num_running(server) == 16, "all places are taken")
        second = asyncio.create_task(send_all(server, online))
        late = [
            completion(f"{number} {text}", 2, rid=f"late-{number}-{place}", **FLEX)
            for place, text in enumerate(documents(8, 250, seed=87))
        ]
        third = asyncio.create_task(send_all(server, late))
        seen: dict[str, Any] = {}
        while not third.done() and seen.get("reason") != "gate":
            facts = await asyncio.to_thread(held_back, server, f"late-{number}-0")
            seen = facts.get("first") or facts
        return seen, [answer for calls in (first, second, third) for answer in await calls]

    for number in range(10):
        seen, answers = asyncio.run(attempt(number))
        tokens = [answer.json()["usage"]["completion_tokens"] for answer in answers]
        assert tokens == [body["max_tokens"] for body in (*lost, *online)] + [2] * 8
        if seen.get("reason") == "gate":
            break
    assert seen.get("reason") == "gate"
    assert 0 < seen["lost_share"] <= 1
    assert seen["expected_tokens"] > 0
