"""Two online requests that wait on a real server: prefilled in one step, or in two."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.engine.test_explain import reason
from tests.engine.test_gathering import trace
from tests.engine.tight import UNTRIED, learn, num_running
from tests.engine.traffic import completion, documents, post, send_all, texts, until, wait_until
from tests.servers import COMMON_ARGS, STRICT

pytestmark = pytest.mark.server

PLACES = 2
# They begin and end together, and last until two others wait.
NUM_BUSY = 600
ARGS = (
    *COMMON_ARGS,
    *("--served-model-name", "tiny", "--max-running-requests", str(PLACES)),
    *("--chunked-prefill-size", "2048"),
    *UNTRIED,
)
# Steps are taken to be eleven times as long, so that what the long prompt takes is far more than
# what passes between two requests.
CONFIG: dict[str, Any] = {
    "slo": {"ttft_s": 600.0, "tpot_s": 60.0, "min_ttft_s": 0.0001},
    "steps": {"place_share": 0.0, "place_gain": 0.0, "gather_online": False},
    "estimator": {"error": 10.0},
}


class Attempt(NamedTuple):
    """How many requests each prefill step had, and how many tokens the last one; how long the first
    that waited did so.
    """

    num_prefills: list[int]
    answers: list[str]
    waited_s: float
    last_tokens: int


@pytest.fixture
def server(server_for, write_config):
    server = server_for(ARGS, config=str(write_config(**CONFIG)), env=STRICT)
    learn(server)
    yield server
    post(server, "/abort_request", {"abort_all": True})


def pairs() -> Iterator[list[dict[str, Any]]]:
    """A short prompt and one that takes a whole chunk, which nobody has in the cache."""
    for number in itertools.count():
        [text] = documents(1, 800, seed=100 + number)
        yield [completion(f"{number} is short", 4, rid="short"), completion(text, 4, rid="long")]


def attempt(server, pair: list[dict[str, Any]], ttft_s: float) -> Attempt:
    """The short one waits for a place, then the long one, and then two are free in one step."""
    before_s = max(step["start_s"] for step in trace(server))
    short, long = pair
    waited_s = 0.0

    async def run() -> list[Any]:
        nonlocal waited_s
        busy = completion([f"busy {at}" for at in range(PLACES)], NUM_BUSY)
        others = asyncio.create_task(send_all(server, [busy]))
        await until(lambda: others.done() or num_running(server) == PLACES, "both places are taken")
        promised = short | {"custom_params": {"ttft_s": ttft_s}}
        came_s = time.monotonic()
        first = asyncio.create_task(send_all(server, [promised]))
        await until(lambda: first.done() or reason(server, "short") is not None, "it waits")
        second = asyncio.create_task(send_all(server, [long]))
        await until(lambda: second.done() or reason(server, "long") is not None, "it waits, too")
        await others
        waited_s = time.monotonic() - came_s
        return [*await first, *await second]

    answers = texts(asyncio.run(run()))
    steps = [step for step in trace(server) if step["start_s"] > before_s and step["num_prefills"]]
    num_prefills = [step["num_prefills"] for step in steps]
    return Attempt(num_prefills, answers, waited_s, steps[-1]["prefill_tokens"])


def test_who_would_be_late_in_one_step_with_another_has_its_own(server, stock_texts):
    """How long it waits for a place is chance: it is promised what the one before had needed."""
    tries, waited_s = pairs(), 0.3

    def starts_alone() -> bool:
        nonlocal waited_s
        pair = next(tries)
        done = attempt(server, pair, waited_s + 0.15)
        assert done.answers == stock_texts(pair)
        waited_s = done.waited_s
        return done.num_prefills == [PLACES, 1, 1]

    wait_until(starts_alone, "the short one starts alone")


def test_who_has_time_starts_in_one_step_with_another(server, stock_texts):
    tries = pairs()

    def start_together() -> bool:
        pair = next(tries)
        done = attempt(server, pair, 600.0)
        assert done.answers == stock_texts(pair)
        return done.num_prefills == [PLACES, 2]

    wait_until(start_together, "they start together")


def twins() -> Iterator[list[dict[str, Any]]]:
    """Two questions about a text that nobody has in the cache."""
    for number in itertools.count():
        [text] = documents(1, 400, seed=500 + number)
        yield [
            completion(f"{text} one", 4, rid="short"),
            completion(f"{text} other", 4, rid="long"),
        ]


def test_who_begins_like_another_finds_it_in_the_cache_a_step_later(server, stock_texts):
    tries = twins()

    def start_apart() -> bool:
        pair = next(tries)
        done = attempt(server, pair, 600.0)
        assert done.answers == stock_texts(pair)
        assert 2 not in done.num_prefills[1:]
        return done.num_prefills == [PLACES, 1, 1] and done.last_tokens < 32

    wait_until(start_apart, "the second one finds all but its last words")
