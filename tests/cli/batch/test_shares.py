"""Lines are shared by contiguous ranges, and each is settled once."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batches.lines.job_file import Entry
from echo_sgl.cli.batch.shares import Line, LineShares


def entries(sizes: list[int]) -> list[Entry]:
    return [
        Entry(index, 0, 0, f"{index}", "m", tokens, b"", "") for index, tokens in enumerate(sizes)
    ]


def taken(shares: LineShares, server: int, count: int) -> list[int]:
    lines = (shares.try_take(server) for _ in range(count))
    return [line.entry.line_number for line in lines if line is not None]


def test_each_server_starts_with_a_contiguous_range_of_as_many_tokens() -> None:
    shares = LineShares(entries([10] * 6 + [30] * 2 + [1] * 60), 3)
    assert taken(shares, 2, 2) == [8, 9]
    assert taken(shares, 0, 6) == [0, 1, 2, 3, 4, 5]
    assert taken(shares, 1, 2) == [6, 7]


def test_who_is_done_takes_the_far_half_of_the_longest_range() -> None:
    shares = LineShares(entries([1] * 20), 2)
    assert taken(shares, 0, 2) == [0, 1]
    assert taken(shares, 1, 14) == [*range(10, 20), 6, 7, 8, 9]
    assert taken(shares, 1, 4) == [4, 5, 3, 2]
    assert taken(shares, 0, 1) == []


def test_what_a_server_gives_back_is_taken_by_another() -> None:
    async def scenario() -> list[str | None]:
        shares = LineShares(entries([1]), 2)
        line = await shares.take(0)
        assert line is not None
        waiting = asyncio.create_task(shares.take(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        shares.give_back(0, line)
        again = await waiting
        shares.settle()
        return [again and again.entry.custom_id, await shares.take(0), await shares.take(1)]

    assert asyncio.run(scenario()) == ["0", None, None]


@given(
    sizes=st.lists(st.integers(0, 50), max_size=60),
    num_servers=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_every_line_is_settled_once_whoever_gives_it_back(
    sizes: list[int], num_servers: int, seed: int
) -> None:
    shares = LineShares(entries(sizes), num_servers)
    rng = random.Random(seed)
    under_way: list[tuple[int, Line]] = []
    settled: list[int] = []
    while len(settled) < len(sizes):
        server = rng.randrange(num_servers)
        if rng.random() < 0.6 and (line := shares.try_take(server)):
            under_way.append((server, line))
        elif under_way:
            owner, line = under_way.pop(rng.randrange(len(under_way)))
            if rng.random() < 0.3:
                shares.give_back(owner, line)
            else:
                settled.append(line.entry.line_number)
                shares.settle()
    assert sorted(settled) == list(range(len(sizes)))
    assert asyncio.run(shares.take(0)) is None
