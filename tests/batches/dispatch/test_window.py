"""The window: bounded in requests and tokens, first come first served, smaller after refusals."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batches.dispatch.window import Pace, Weight, Window, backoff_s

ONE = Weight(1)
WEIGHTS = st.builds(Weight, tokens=st.integers(1, 50), num_requests=st.integers(1, 7))


@given(
    weights=st.lists(WEIGHTS, max_size=30),
    max_requests=st.integers(1, 5),
    max_tokens=st.integers(1, 60),
)
def test_the_bounds_hold_and_places_are_given_in_order(
    weights: list[Weight], max_requests: int, max_tokens: int
) -> None:
    window = Window(max_requests, max_tokens)
    inside: list[Weight] = []
    order: list[int] = []

    async def use(index: int, line: Weight) -> None:
        async with window.slot(line):
            inside.append(line)
            order.append(index)
            if len(inside) > 1:
                assert sum(one.num_requests for one in inside) <= max_requests
                assert sum(one.tokens for one in inside) <= max_tokens
            await asyncio.sleep(0)
            inside.remove(line)

    async def use_all() -> None:
        await asyncio.gather(*(use(index, line) for index, line in enumerate(weights)))

    asyncio.run(use_all())
    assert order == list(range(len(weights)))


def test_a_cancelled_wait_gives_its_place_to_the_next() -> None:
    async def scenario() -> list[str]:
        window = Window(1, 100)
        order = []

        async def use(name: str) -> None:
            async with window.slot(ONE):
                order.append(name)

        async with window.slot(ONE):
            gone, stays = (asyncio.create_task(use(name)) for name in ("gone", "stays"))
            await asyncio.sleep(0)
            gone.cancel()
        await stays
        return order

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == ["stays"]


def test_refusals_halve_what_is_sent_and_answers_bring_it_back() -> None:
    async def scenario() -> list[int]:
        window = Window(64, 1000)
        limits = []
        for num_requests in (4, 2, 1, 1):
            async with window.slot(Weight(1, num_requests=num_requests)) as number:
                window.shrink(number)
                limits.append(window.limit)
        for _ in range(3000):
            window.grow()
        return [*limits, window.limit]

    assert asyncio.run(scenario()) == [2, 1, 1, 1, 64]


def test_refusals_of_lines_that_were_under_way_together_halve_it_once() -> None:
    pace = Pace()
    together = [pace.take(1) for _ in range(64)]
    limits = []
    for number in together:
        pace.shrink(number)
        pace.give(1)
        limits.append(pace.limit)
    pace.take(1)
    pace.shrink(pace.take(1))
    assert [*limits, pace.limit] == [*[32.0] * 64, 1.0]


def test_a_line_of_many_requests_brings_back_as_many_up_to_a_window() -> None:
    async def scenario() -> list[int]:
        window = Window(64, 1000)
        async with window.slot(Weight(1, num_requests=32)) as number:
            window.shrink(number)
        limits = [window.limit]
        for num_requests in (8, 8, 500):
            window.grow(num_requests)
            limits.append(window.limit)
        return limits

    assert asyncio.run(scenario()) == [16, 16, 16, 17]


@given(attempt=st.integers(0, 10**6), seed=st.integers(0, 9))
def test_back_off_doubles_up_to_its_cap_and_is_never_zero(attempt: int, seed: int) -> None:
    delay_s = backoff_s(attempt, random.Random(seed), base_s=0.25, cap_s=30.0)
    full_s = min(30.0, 0.25 * 2 ** min(attempt, 20))
    assert full_s / 2 <= delay_s <= full_s
