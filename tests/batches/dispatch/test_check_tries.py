"""A check that breaks is tried again a few times, and holds up no other batch meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from echo_sgl.batches.dispatch import validator
from echo_sgl.batches.dispatch.validator import Validator
from echo_sgl.batches.store import batch_rows, work
from tests.batches.client import Stub, error_of, job


def fail_for(
    monkeypatch: pytest.MonkeyPatch, error: Exception, times: int | None = None
) -> list[int]:
    """Let lines be refused by the database for the first batch that comes."""
    insert = work.insert_lines
    failed: list[int] = []

    def refuse(connection: Any, number: int, rows: Any) -> None:
        if number == (failed or [number])[0] and (times is None or len(failed) < times):
            failed.append(number)
            raise error
        insert(connection, number, rows)

    monkeypatch.setattr(work, "insert_lines", refuse)
    return failed


@pytest.mark.usefixtures("often")
def test_a_batch_that_breaks_its_check_fails_after_a_few_tries_and_holds_up_no_other(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_for(monkeypatch, OverflowError("too large to convert"))

    async def life(stub: Stub) -> None:
        poisoned, *others = [await stub.create(job(["hello"])) for _ in range(3)]
        for batch in others:
            assert (await stub.ended(batch.id)).status == "completed"
        ended = await stub.ended(poisoned.id)
        assert error_of(ended) == "file_not_checked"
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert "OverflowError" in str(ended.errors.data[0].message)

    live(life)
    assert len(failed) == validator.MAX_FAULTS


def test_a_batch_that_waits_for_its_next_try_lets_others_go_first(
    live_sqlite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validator, "RETRY_BASE_S", 10_000.0)
    monkeypatch.setattr(validator, "RETRY_CAP_S", 10_000.0)
    failed = fail_for(monkeypatch, OverflowError("too large to convert"))

    async def life(stub: Stub) -> None:
        poisoned, *others = [await stub.create(job(["hello"])) for _ in range(3)]
        for batch in others:
            assert (await stub.ended(batch.id)).status == "completed"
        assert (await stub.client.batches.retrieve(poisoned.id)).status == "validating"
        await stub.client.batches.cancel(poisoned.id)
        assert (await stub.ended(poisoned.id)).status == "cancelled"

    live_sqlite(life)
    assert len(failed) == 1


@pytest.mark.usefixtures("often")
def test_a_store_that_fails_for_a_while_only_delays_a_check(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OperationalError("INSERT", {}, OSError("the disk is full"))
    failed = fail_for(monkeypatch, error, times=2 * validator.MAX_FAULTS)
    release = batch_rows.release_batch
    faults = iter([error] * 3)

    def stumble(*given: Any) -> None:
        if fault := next(faults, None):
            raise fault
        release(*given)

    monkeypatch.setattr(batch_rows, "release_batch", stumble)

    async def life(stub: Stub) -> None:
        assert (await stub.ended((await stub.create(job(["hello"]))).id)).status == "completed"

    live(life)
    assert len(failed) == 2 * validator.MAX_FAULTS
    assert next(faults, None) is None


def test_a_claim_whose_answer_was_lost_is_let_go_again(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Validator._claim
    lost: list[int] = []

    def lose(self: Validator) -> Any:
        batch = claim(self)
        if batch is not None and not lost:
            lost.append(batch.number)
            raise OSError("the connection was lost")
        return batch

    monkeypatch.setattr(Validator, "_claim", lose)

    async def life(stub: Stub) -> None:
        assert (await stub.ended((await stub.create(job(["hello"]))).id)).status == "completed"

    live(life)
    assert lost
