"""What the dispatcher does when something goes wrong, is slow, or comes at the wrong moment."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text

from echo_sgl.batches.dispatch import active_job, dispatcher, ending, job_table, lease, recorder
from echo_sgl.batches.dispatch.active_job import ActiveJob, Claim, Hold
from echo_sgl.batches.dispatch.dispatcher import Dispatcher
from echo_sgl.batches.dispatch.line_engine import request_head
from echo_sgl.batches.dispatch.metrics import _NoJobMetrics
from echo_sgl.batches.dispatch.recorder import RateMeter, Recorder
from echo_sgl.batches.http.tenants import Tenants
from echo_sgl.batches.lines.job_line import BatchLine
from echo_sgl.batches.store import batch_rows
from echo_sgl.batches.store.blobs import DatabaseBlobs, DiskBlobs
from echo_sgl.batches.store.work import Span
from tests.batches.client import Stub, job, running_stub, until
from tests.batches.faults import (
    HoldingModel,
    async_,
    connection_lost,
    failing_once,
    jobs_of,
    lose_first_release,
)

ANNS_KEY = "a-key-of-enough-letters"
Live = Callable[..., None]


async def change(stub: Stub, batch_id: str, what: str) -> None:
    (await stub.http().post(f"/v1/batches/{batch_id}/{what}")).raise_for_status()


def test_a_line_that_cannot_be_prepared_fails_alone(
    live_sqlite: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(line: BatchLine, names: Mapping[str, str]) -> bytes:
        if line.body["prompt"] == "stumble":
            raise TypeError("Recursion limit reached")
        return request_head(line, names)

    monkeypatch.setattr(active_job, "request_head", stumble)

    async def life(stub: Stub) -> None:
        ended = await stub.ended((await stub.create(job(["hello", "stumble", "hello"]))).id)
        assert ended.status == "completed"
        errors = await stub.records(ended.error_file_id)
        assert errors["line-1"]["error"]["code"] == "internal_error"
        assert "TypeError" in errors["line-1"]["error"]["message"]
        assert len(await stub.records(ended.output_file_id)) == 2

    live_sqlite(life)
    assert "TypeError: Recursion limit reached" in caplog.text


def test_ranges_are_given_back_although_the_connection_was_lost_when_they_were(
    live: Live, monkeypatch: pytest.MonkeyPatch, made: list[Dispatcher]
) -> None:
    lost = lose_first_release(monkeypatch)

    async def life(stub: Stub) -> None:
        stub.model.opened.clear()
        batch = await stub.create(job(["hello"] * 20))
        await until(async_(lambda: stub.model.num_running == 4))
        # Those in the engine are recorded; what is given back is what was claimed beside them.
        await until(async_(lambda: have_claimed_ahead(made[0])))
        await change(stub, batch.id, "pause")
        await until(async_(lambda: are_dropped(made[0])))
        stub.model.opened.set()
        await until(async_(lambda: bool(lost)))
        await change(stub, batch.id, "cancel")
        assert (await stub.ended(batch.id)).status == "cancelled"

    live(life, window_lines=4)


def test_a_range_whose_claim_was_written_although_it_seemed_lost_is_claimed_again(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    claim_lines, lost = dispatcher.claim_lines, []

    def lose_first_answer(*given: Any, **bounds: Any) -> Claim | None:
        claim = claim_lines(*given, **bounds)
        if not lost:
            lost.append(claim)
            raise connection_lost()
        return claim

    monkeypatch.setattr(dispatcher, "claim_lines", lose_first_answer)

    async def life(stub: Stub) -> None:
        ended = await stub.ended((await stub.create(job(["hello"] * 20))).id)
        assert ended.status == "completed"
        assert len(await stub.records(ended.output_file_id)) == 20

    live(life)
    assert lost[0] is not None
    assert "claimed in vain" in caplog.text


def test_a_range_that_could_be_neither_read_nor_given_back_is_claimed_again(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_first_release(monkeypatch)
    for kind in (DiskBlobs, DatabaseBlobs):
        fault = OSError(5, "Input/output error")
        monkeypatch.setattr(kind, "read", failing_once(kind.read, fault))

    async def life(stub: Stub) -> None:
        ended = await stub.ended((await stub.create(job(["hello"] * 20))).id)
        assert len(await stub.records(ended.output_file_id)) == 20

    live(life)
    assert lost


def test_a_batch_that_could_not_be_ended_nor_given_back_is_ended_later(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = batch_rows.release_batch
    failing = failing_once(release, connection_lost())

    def fail_for_its_end(connection: Connection, number: int, owner: str) -> None:
        is_ending = batch_rows.lock_batch(connection, number).status == "finalizing"
        (failing if is_ending else release)(connection, number, owner)

    finish = failing_once(batch_rows.finish_batch, connection_lost())
    monkeypatch.setattr(batch_rows, "finish_batch", finish)
    monkeypatch.setattr(batch_rows, "release_batch", fail_for_its_end)

    async def life(stub: Stub) -> None:
        assert (await stub.ended((await stub.create(job(["hello"]))).id)).status == "completed"

    live(life)


def test_another_tenant_gets_a_place_while_the_lines_of_the_first_go_on(
    live_sqlite: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_table, "MAX_ACTIVE_JOBS", 2)
    key = hashlib.sha256(ANNS_KEY.encode()).hexdigest()

    async def life(stub: Stub) -> None:
        model = stub.model
        assert isinstance(model, HoldingModel)
        stub.client = stub.client_with("operator")
        ann = Stub(stub.app, model)
        ann.client = stub.client_with(ANNS_KEY)
        held = [await stub.create(job(["hold"])) for _ in range(2)]
        await until(async_(lambda: model.num_held == 2))
        assert (await ann.ended((await ann.create(job(["hello"]))).id)).status == "completed"
        assert model.num_held == 2
        model.released.set()
        for batch in held:
            assert (await stub.ended(batch.id)).status == "completed"

    live_sqlite(life, model=HoldingModel(), tenants=Tenants("operator", {key: "ann"}))


def test_a_resumed_batch_goes_on_while_its_last_line_is_still_in_the_engine(
    live_sqlite: Live, made: list[Dispatcher]
) -> None:
    async def life(stub: Stub) -> None:
        model = stub.model
        assert isinstance(model, HoldingModel)
        stub.model.opened.clear()
        batch = await stub.create(job(["hold", *["p"] * 20]))
        await until(async_(lambda: model.num_running == 4))
        await change(stub, batch.id, "pause")
        await until(async_(lambda: are_dropped(made[0])))
        model.opened.set()
        await until(async_(lambda: model.num_running == model.num_held == 1))
        await change(stub, batch.id, "resume")
        await stub.until(batch.id, lambda found: num_done(found) == 20)
        assert model.num_held == 1
        model.released.set()
        assert len(await stub.records((await stub.ended(batch.id)).output_file_id)) == 21

    live_sqlite(life, model=HoldingModel(), window_lines=4)


def are_dropped(dispatcher: Dispatcher) -> bool:
    """Whether it has seen that none of its jobs is to go on now."""
    return all(job.is_dropped for job in jobs_of(dispatcher))


def have_claimed_ahead(dispatcher: Dispatcher) -> bool:
    """Whether each of its jobs has lines that wait for the window."""
    return all(job.pending for job in jobs_of(dispatcher))


def num_done(batch: Any) -> int:
    return int(batch.request_counts.completed)


def test_a_long_end_delays_neither_the_lease_nor_other_batches(
    live: Live, monkeypatch: pytest.MonkeyPatch, database_url: str | None
) -> None:
    goes_on, is_ending = threading.Event(), threading.Event()

    def record_slowly(store: Any, batch: Any) -> None:
        is_ending.set()
        goes_on.wait(300)

    monkeypatch.setattr(ending, "_record_unanswered", record_slowly)
    monkeypatch.setattr(lease, "RENEW_S", 0.05)

    async def life(stub: Stub) -> None:
        first = await stub.create(job(["hello"]))
        await until(async_(is_ending.is_set))
        try:
            other = await stub.create(job(["hello"] * 30))
            await stub.until(other.id, lambda found: num_done(found) == 30)
            if database_url:
                before_s = lease_until_s(database_url)
                await until(async_(lambda: lease_until_s(database_url) > before_s))
        finally:
            goes_on.set()
        for batch in (first, other):
            assert (await stub.ended(batch.id)).status == "completed"

    live(life)


def lease_until_s(database_url: str) -> float:
    engine = create_engine(database_url.replace("postgresql", "postgresql+psycopg"))
    with engine.connect() as connection:
        found = connection.execute(text("SELECT max(lease_until_s) FROM servers")).scalar_one()
    engine.dispose()
    return float(found)


def test_a_result_that_cannot_be_written_fails_its_line_alone(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    async def life(stub: Stub) -> None:
        ended = await stub.ended((await stub.create(job(["hello", "huge", "hello"]))).id)
        assert ended.status == "completed"
        errors = await stub.records(ended.error_file_id)
        assert errors["line-1"]["error"]["code"] == "internal_error"
        assert len(await stub.records(ended.output_file_id)) == 2

    live(life, model=HoldingModel())
    assert "the result of line line-1" in caplog.text


def test_an_error_after_results_were_written_is_logged_and_recording_goes_on(
    live_sqlite: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault = ZeroDivisionError("as a fault of ours would")
    stumble = failing_once(_NoJobMetrics.count_lines, fault)
    monkeypatch.setattr(_NoJobMetrics, "count_lines", stumble)

    async def life(stub: Stub) -> None:
        ended = await stub.ended((await stub.create(job(["hello"] * 20))).id)
        assert len(await stub.records(ended.output_file_id)) == 20

    live_sqlite(life, window_lines=4)
    assert "ZeroDivisionError: as a fault of ours would" in caplog.text


def test_a_server_that_cannot_record_says_so_and_another_takes_its_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    database_url: str | None,
) -> None:
    if database_url is None:
        pytest.skip("SQLite belongs to one server")
    fault = MemoryError("as a fault of ours would")
    monkeypatch.setattr(Recorder, "_record", failing_once(Recorder._record, fault))
    monkeypatch.setattr(lease, "LEASE_S", 3.0)
    monkeypatch.setattr(lease, "RENEW_S", 0.5)

    async def main() -> None:
        async with running_stub(tmp_path / "a", database_url=database_url) as one:
            batch = await one.create(job(["hello"] * 20))
            await until(async_(lambda: "the batch service has stopped" in caplog.text))
            async with running_stub(tmp_path / "b", database_url=database_url) as two:
                ended = await two.ended(batch.id)
                assert len(await two.records(ended.output_file_id)) == 20

    asyncio.run(main())
    assert "MemoryError: as a fault of ours would" in caplog.text


def test_two_claims_of_one_range_are_counted_by_themselves() -> None:
    """The first was taken by another server, and given back, while a line of it was under way."""
    batch = ActiveJob(1, "batch_1", "/v1/completions", "file-1", 0.0, 0.0, lines_left=2)
    first, second = (Claim(Hold(Span(0, 2), 2), (), ()) for _ in range(2))
    batch.add(first)
    batch.count_written(first.hold)
    batch.add(second)
    assert batch.done_with([first.hold]) == []
    batch.count_written(first.hold)
    assert batch.done_with([second.hold]) == []
    assert batch.done_with([second.hold] * 2) == [Span(0, 2)]
    batch.count_written(second.hold)
    batch.count_written(second.hold)
    assert batch.holds == {}


def test_what_is_held_ahead_is_bounded_in_bytes_over_all_jobs(
    live_sqlite: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_bytes = 0
    take_claim = Dispatcher._take_claim

    def measure(self: Dispatcher, *given: Any) -> None:
        nonlocal most_bytes
        take_claim(self, *given)
        pending = [line for job in self._table.jobs.values() for line in job.pending]
        most_bytes = max(most_bytes, sum(len(line.head) for line in pending))

    monkeypatch.setattr(Dispatcher, "_take_claim", measure)
    monkeypatch.setattr(dispatcher, "MAX_CLAIM_BYTES", 20_000)
    monkeypatch.setattr(dispatcher, "MAX_AHEAD_BYTES", 100_000)

    async def life(stub: Stub) -> None:
        stub.model.opened.clear()
        content = job(["x" * 5000] * 60)
        batches = [await stub.create(content) for _ in range(3)]
        for batch in batches:
            await stub.until(batch.id, lambda found: found.status == "in_progress")
        await until(async_(lambda: most_bytes > 60_000))
        stub.model.opened.set()
        for batch in batches:
            ended = await stub.ended(batch.id)
            assert len(await stub.records(ended.output_file_id)) == 60

    live_sqlite(life, window_lines=64, window_tokens=20_000)
    assert most_bytes <= 100_000 + 3 * 20_000


def test_time_without_lines_is_no_work_when_the_last_ones_were_given_up(
    live_sqlite: Live, monkeypatch: pytest.MonkeyPatch, made: list[Dispatcher]
) -> None:
    skipped_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped_s)
    monkeypatch.setattr(dispatcher, "time", clock)
    monkeypatch.setattr(recorder, "MIN_MEASURED_S", 0.0)

    async def life(stub: Stub) -> None:
        nonlocal skipped_s
        batch = await stub.create(job(["slow"] * 4))
        await until(async_(lambda: stub.model.num_running == 4))
        await change(stub, batch.id, "cancel")
        await stub.ended(batch.id)
        skipped_s = 36_000.0  # an idle night
        ended = await stub.ended((await stub.create(job(["hello"] * 200))).id)
        assert ended.status == "completed"
        assert made[0].lines_per_s is not None
        assert made[0].lines_per_s > 200 / 18_000

    live_sqlite(life)


def test_the_rate_leaves_out_the_time_between_work() -> None:
    meter = RateMeter()
    meter.start(0.0)
    meter.add(0, 5.0, is_busy=False)
    meter.start(36_000.0)
    meter.add(30, 36_010.0, is_busy=True)
    assert meter.lines_per_s == 2.0
