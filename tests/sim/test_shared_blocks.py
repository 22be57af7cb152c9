"""Shared KV blocks: no slot is used twice, and each layout takes what it says."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_sgl.errors import ConfigError
from echo_sgl.sim.block_server import BlockConfig, BlockServer, Row
from echo_sgl.sim.shared_blocks import BlockPool, Layout, Tenant
from tests.sim.fleets import DEVICE


def tenant(number: int, tokens: int, *, is_offline: bool) -> Tenant:
    return Tenant(number, 0.0, tokens, 10, is_offline=is_offline)


def check(pool: BlockPool, tenants: list[Tenant]) -> None:
    """Every slot has at most one token, and pool and requests agree on who has which."""
    for block in pool.blocks:
        assert 0 <= sum(block.used) <= pool.page_tokens
        for side, owner in enumerate(block.owners):
            assert (owner is None) == (block.used[side] == 0)
            assert owner is None or block in owner.blocks
        if pool.layout is not Layout.SHARED:
            assert None in block.owners
    for one in tenants:
        assert one.held_tokens == sum(block.used[one.is_offline] for block in one.blocks)
    assert pool.used_tokens == sum(one.held_tokens for one in tenants)
    owned = sum(1 for block in pool.blocks if block.owners != [None, None])
    assert pool.free_tokens == (pool.num_blocks - owned) * pool.page_tokens
    assert pool.empty_tokens == owned * pool.page_tokens - pool.used_tokens


def test_an_online_request_fills_empty_slots_of_offline_blocks() -> None:
    """BROS 5.1: from the other end, and nothing is lost by it."""
    pool = BlockPool(2, 8, Layout.SHARED)
    line, one = tenant(1, 11, is_offline=True), tenant(2, 5, is_offline=False)
    pool.grow(line, 11)
    assert (pool.free_tokens, pool.room(one)) == (0, 5)
    pool.grow(one, 5)
    assert (line.held_tokens, pool.lost_tokens, one.blocks) == (11, 0, [line.blocks[1]])
    check(pool, [line, one])


def test_without_sharing_the_same_slots_stay_empty() -> None:
    pool = BlockPool(2, 8, Layout.PARK)
    line, one = tenant(1, 11, is_offline=True), tenant(2, 5, is_offline=False)
    pool.grow(line, 11)
    assert (pool.room(one), pool.empty_tokens) == (0, 5)


def test_only_the_tokens_that_are_overwritten_are_lost() -> None:
    """BROS 5.2, lazy checkpointing: figure 9's a3 makes room for B8."""
    pool = BlockPool(2, 8, Layout.SHARED)
    line, one = tenant(1, 11, is_offline=True), tenant(2, 6, is_offline=False)
    pool.grow(line, 11)
    pool.grow(one, 5)
    assert pool.overwrite(one, [line], 1) == 1
    assert (line.held_tokens, line.missing_tokens, pool.lost_tokens) == (10, 1, 1)
    check(pool, [line, one])


def test_the_block_with_the_most_empty_slots_is_preempted_first() -> None:
    """BROS 5.2."""
    pool = BlockPool(2, 8, Layout.SHARED)
    lines = [tenant(n, tokens, is_offline=True) for n, tokens in ((1, 7), (2, 3))]
    for line in lines:
        pool.grow(line, line.missing_tokens)
    one = tenant(3, 8, is_offline=False)
    assert pool.overwrite(one, lines, 8) == 8
    assert [line.held_tokens for line in lines] == [7, 0]
    check(pool, [*lines, one])


def test_what_was_overwritten_comes_back_where_the_online_request_left() -> None:
    pool = BlockPool(1, 8, Layout.SHARED)
    line, one = tenant(1, 6, is_offline=True), tenant(2, 4, is_offline=False)
    pool.grow(line, 6)
    pool.grow(one, 2)
    pool.overwrite(one, [line], 2)
    assert (line.held_tokens, pool.room(line)) == (4, 0)
    pool.release(one)
    pool.grow(line, 2)
    assert (line.held_tokens, line.missing_tokens) == (6, 0)
    check(pool, [line])


def test_parking_takes_the_last_block_and_retracting_takes_all() -> None:
    left = {}
    for layout in (Layout.PARK, Layout.RETRACT):
        pool = BlockPool(3, 8, layout)
        line = tenant(1, 20, is_offline=True)
        pool.grow(line, 20)
        if layout is Layout.PARK:
            pool.release_last(line)
        else:
            pool.drop_all(line)
        left[layout] = (line.held_tokens, line.missing_tokens, pool.lost_tokens)
        check(pool, [line])
    assert left == {Layout.PARK: (16, 4, 4), Layout.RETRACT: (0, 20, 20)}


@settings(max_examples=150)
@given(
    st.sampled_from(list(Layout)),
    st.sampled_from([1, 4, 16]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), max_size=40),
)
def test_slots_are_conserved_whatever_is_asked(
    layout: Layout, page_tokens: int, asked: list[tuple[int, int]]
) -> None:
    pool = BlockPool(6, page_tokens, layout)
    tenants = [tenant(n, 1000, is_offline=bool(n % 2)) for n in range(6)]
    for number, tokens in asked:
        one = tenants[number]
        if tokens == 20:
            pool.release(one)
        elif tokens <= pool.room(one):
            pool.grow(one, tokens)
        elif not one.is_offline and layout is Layout.SHARED:
            pool.overwrite(one, [line for line in tenants if line.is_offline], tokens)
        elif one.is_offline and one.blocks:
            pool.release_last(one)
        check(pool, tenants)
        assert all(one.tokens == 1000 for one in tenants)


def server(layout: Layout, online: list[Row], **changes: int) -> BlockServer:
    config = BlockConfig(DEVICE, 2000, 16, layout, limit_s=0.05)
    return BlockServer(dataclasses.replace(config, **changes), online, [(300, 20), (500, 50)])


BUSY: list[Row] = [(0.5 + n / 4, 150 + 13 * (n % 9), 30) for n in range(40)]


@pytest.mark.parametrize("layout", list(Layout))
def test_all_online_requests_end_and_the_pool_is_whole(layout: Layout) -> None:
    one = server(layout, BUSY)
    results = one.run(40.0)
    assert len(results.tpot_s) == len(results.ttft_s) == len(BUSY)
    assert results.offline_done > 0
    assert min(results.ttft_s) > 0
    check(one.pool, [*one.online, *one.waiting, *one.offline])


def test_the_same_server_does_the_same_to_the_last_bit() -> None:
    first, second = (server(Layout.SHARED, BUSY).run(30.0) for _ in range(2))
    assert first == second


def test_only_layouts_with_a_copy_read_back_and_only_the_others_compute_again() -> None:
    for layout in Layout:
        results = server(layout, BUSY).run(30.0)
        assert results.lost_tokens > 0
        assert (results.read_tokens > 0) == layout.reads_back
        assert (results.recomputed_tokens > 0) != layout.reads_back


def test_a_page_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_tokens is 4000 and kv_tokens 2000"):
        server(Layout.PARK, [], page_tokens=4000)
