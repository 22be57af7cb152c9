"""The end of a batch, when its server is not the only one at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update

from echo_sgl.batches.dispatch.ending import Ender
from echo_sgl.batches.store import batch_rows, work
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.schema import batches
from tests.batches.rows import NOW_S, add_batch, answer, batch_of, claim, finish


def take_over(store: JobStore, number: int) -> None:
    """As another server does, for which this one is dead."""
    with store.database.write() as connection:
        ours = batches.c.number == number
        connection.execute(update(batches).where(ours).values(owner="other"))


def end_and_retry(store: JobStore, number: int) -> None:
    take_over(store, number)
    answer(store, number, [1, 2, 3], ok=False, done=None)
    ended = finish(store, number)
    with store.database.write() as connection:
        batch_rows.reopen_batch(connection, ended, NOW_S)


def cancelled_batch(store: JobStore) -> int:
    """One of four lines, the first of which is answered."""
    number = add_batch(store, 4)
    claimed = claim(store, number)
    assert claimed is not None
    answer(store, number, [0], done=None)
    with store.database.write() as connection:
        work.release_spans(connection, number, store.server_id, [claimed[0]])
        batch_rows.cancel_batch(connection, number, NOW_S)
    return number


@pytest.mark.parametrize(
    ("meanwhile", "status"), [(take_over, "cancelling"), (end_and_retry, "in_progress")]
)
def test_a_server_that_stalled_while_it_ended_a_batch_fails_no_line_that_is_not_its_own(
    store: JobStore,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[JobStore, int], None],
    status: str,
) -> None:
    number = cancelled_batch(store)
    unanswered = work.unanswered

    def stall(*given: Any, **options: Any) -> Any:
        found = unanswered(*given, **options)
        monkeypatch.setattr(work, "unanswered", unanswered)
        meanwhile(store, number)
        return found

    monkeypatch.setattr(work, "unanswered", stall)
    assert Ender(store, output_days=30).end_one()
    found = batch_of(store, number)
    assert (found.status, found.completed, found.failed) == (status, 1, 0)


def test_a_batch_whose_end_was_taken_over_is_not_finished_twice(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = cancelled_batch(store)
    monkeypatch.setattr("echo_sgl.batches.dispatch.ending._record_unanswered", take_over_of)
    assert Ender(store, output_days=30).end_one()
    assert batch_of(store, number).status == "cancelling"


def take_over_of(store: JobStore, batch: batch_rows.BatchRow) -> None:
    take_over(store, batch.number)
