"""Who counts as dead after a while in which nobody could renew a lease."""

from __future__ import annotations

import dataclasses

import pytest
from sqlalchemy import update

from echo_sgl.batches.dispatch.active_job import ActiveJob, claim_lines
from echo_sgl.batches.dispatch.lease import LEASE_S, renew
from echo_sgl.batches.store import work
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.peers import Peers
from echo_sgl.batches.store.schema import ranges
from tests.batches.rows import NOW_S, add_batch, batch_of, crashes


class Watch:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def one(store: JobStore, watch: Watch) -> JobStore:
    """A server that goes by the watch, on a database that it shares with "other"."""
    return dataclasses.replace(store, clock=watch)


def renew_other(store: JobStore, watch: Watch) -> None:
    with store.database.write() as connection:
        work.renew_lease(connection, "other", watch.now_s + LEASE_S)


def lines_claimed(store: JobStore, number: int) -> int:
    """How many lines a claim gives, which are then given back."""
    job = ActiveJob.of_row(batch_of(store, number), {})
    claimed = claim_lines(store, job, max_lines=100, max_bytes=10**6)
    if claimed is None:
        return 0
    with store.database.write() as connection:
        work.release_spans(connection, number, store.server_id, [claimed.hold.span])
    return claimed.hold.num_left


def held_by_other(store: JobStore) -> int:
    """A batch of eight lines that "other" holds."""
    number = add_batch(store, 8)
    with store.database.write() as connection:
        connection.execute(update(ranges).values(owner="other"))
    return number


def test_after_an_outage_the_first_server_back_leaves_the_others_what_they_hold(
    one: JobStore, watch: Watch
) -> None:
    number = held_by_other(one)
    renew(one)
    renew_other(one, watch)
    watch.now_s += LEASE_S + 10
    assert lines_claimed(one, number) == 0  # its look comes before anybody's renewal
    renew(one)
    assert lines_claimed(one, number) == 0
    watch.now_s += LEASE_S / 2
    renew(one)
    renew_other(one, watch)
    watch.now_s += LEASE_S / 2
    assert lines_claimed(one, number) == 0
    assert crashes(one, number) == [0] * 8


def test_who_died_in_the_outage_is_found_dead_a_lease_after_it(one: JobStore, watch: Watch) -> None:
    number = held_by_other(one)
    renew(one)
    renew_other(one, watch)
    watch.now_s += LEASE_S
    for _ in range(2):
        assert lines_claimed(one, number) == 0
        renew(one)
        watch.now_s += LEASE_S / 2
    assert lines_claimed(one, number) == 8
    assert crashes(one, number) == [1] * 8


def test_who_was_dead_before_the_outage_is_not_spared(one: JobStore, watch: Watch) -> None:
    number = held_by_other(one)
    renew_other(one, watch)
    watch.now_s += LEASE_S
    renew(one)
    watch.now_s += 2 * LEASE_S
    assert lines_claimed(one, number) == 8


def test_a_second_outage_before_the_others_were_back_is_one_with_the_first() -> None:
    peers = Peers("one")
    assert peers.judged_at_s(5.0) == 5.0
    peers.note_renewal(10.0, 40.0)
    assert peers.judged_at_s(39.0) == 39.0
    assert peers.judged_at_s(70.0) == 10.0
    peers.note_renewal(70.0, 100.0)
    peers.note_renewal(76.0, 106.0)
    assert peers.judged_at_s(99.0) == 10.0
    assert peers.judged_at_s(140.0) == 10.0  # from 106 to here nobody could renew again
    peers.note_renewal(140.0, 170.0)
    assert peers.judged_at_s(169.0) == 10.0
    peers.note_renewal(165.0, 195.0)
    assert peers.judged_at_s(170.0) == 170.0
