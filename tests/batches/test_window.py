"""The window: bounded in requests and tokens, first come first served, smaller after refusals."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batches.window import Window, backoff_s


@given(
    sizes=st.lists(st.integers(1, 50), max_size=30),
    max_requests=st.integers(1, 5),
    max_tokens=st.integers(1, 60),
)
def test_the_bounds_hold_and_places_are_given_in_order(
    sizes: list[int], max_requests: int, max_tokens: int
) -> None:
    window = Window(max_requests, max_tokens)
    inside: list[int] = []
    order: list[int] = []

    async def use(index: int, tokens: int) -> None:
        async with window.slot(tokens):
            inside.append(tokens)
            order.append(index)
            assert len(inside) <= max_requests
            assert len(inside) == 1 or sum(inside) <= max_tokens
            await asyncio.sleep(0)
            inside.remove(tokens)

    async def use_all() -> None:
        await asyncio.gather(*(use(index, size) for index, size in enumerate(sizes)))

    asyncio.run(use_all())
    assert order == list(range(len(sizes)))


def test_a_cancelled_wait_gives_its_place_to_the_next() -> None:
    async def scenario() -> list[str]:
        window = Window(1, 100)
        order = []

        async def use(name: str) -> None:
            async with window.slot(1):
                order.append(name)

        async with window.slot(1):
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
        async with window.slot(1), window.slot(1), window.slot(1), window.slot(1):
            for _ in range(6):
                window.shrink()
                limits.append(window.limit)
        for _ in range(3000):
            window.grow()
        return [*limits, window.limit]

    assert asyncio.run(scenario()) == [2, 1, 1, 1, 1, 1, 64]


@given(attempt=st.integers(0, 10**6), seed=st.integers(0, 9))
def test_back_off_doubles_up_to_its_cap_and_is_never_zero(attempt: int, seed: int) -> None:
    delay_s = backoff_s(attempt, random.Random(seed), base_s=0.25, cap_s=30.0)
    full_s = min(30.0, 0.25 * 2 ** min(attempt, 20))
    assert full_s / 2 <= delay_s <= full_s
