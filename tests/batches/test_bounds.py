"""What a tenant may have and begin is bounded, also where several servers let it in at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import func, select, text

from echo_sgl.batches.dispatch.ending import delete_expired_files
from echo_sgl.batches.http.api_errors import ApiError
from echo_sgl.batches.http.limits import Rate, UploadsUnderWay
from echo_sgl.batches.http.service import DAY_S, BatchService
from echo_sgl.batches.http.uploads import Upload
from echo_sgl.batches.store import batch_rows, bounds, files, work
from echo_sgl.batches.store.blobs import Draft
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.schema import batches, blob_chunks, lines
from echo_sgl.config import BatchesConfig
from tests.batches.conftest import OpenStore
from tests.batches.rows import add_batch, add_file, answer, claim, finish, num_lines

TENANT = "one"


class Idle:
    """A dispatcher that does nothing."""

    endpoints = ("/v1/completions",)
    lines_per_s = 1.0

    def __init__(self) -> None:
        self.num_deletes = 0

    def wake(self) -> None:
        pass

    def wake_deleter(self) -> None:
        self.num_deletes += 1


def service_of(store: JobStore, **settings: object) -> BatchService:
    return BatchService(store, BatchesConfig(**settings), Idle())  # type: ignore[arg-type]


def upload(service: BatchService, data: bytes = b"{}\n") -> str:
    draft = service.admit_upload(TENANT)
    draft.write(data)
    try:
        form = Upload({"purpose": "batch"}, "jobs.jsonl")
        return str(service.add_file(TENANT, draft, form)["id"])
    finally:
        service.end_upload(TENANT, draft)


def create(service: BatchService, file_id: str, window: str = "1h") -> str:
    batch = service.create_batch(
        TENANT,
        input_file_id=file_id,
        endpoint="/v1/completions",
        completion_window=window,
        metadata=None,
        output_expires_after=None,
    )
    return str(batch["id"])


@pytest.fixture
def shared_at(store_at: OpenStore, database_url: str | None) -> OpenStore:
    if database_url is None:
        pytest.skip("SQLite belongs to one server")
    return store_at


def code_of(call: Callable[[], object]) -> str | None:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value.code


def test_what_open_batches_have_answered_counts_as_stored(store: JobStore) -> None:
    number = add_batch(store, 4)
    claim(store, number)
    service = service_of(store, max_stored_bytes=50)
    file_id = upload(service)
    answer(store, number, [0, 1, 2, 3], done=None)
    assert code_of(lambda: create(service, file_id)) == "storage_limit_reached"
    assert code_of(lambda: upload(service)) == "storage_limit_reached"


def test_results_are_gone_at_once_and_taken_away_by_somebody_else(store: JobStore) -> None:
    number = add_batch(store, 4)
    claimed = claim(store, number)
    assert claimed is not None
    answer(store, number, [0, 1, 2, 3], done=claimed[0])
    with store.database.write() as connection:
        ended = batch_rows.finish_batch(connection, number, store.clock(), output_days=30)
    deleter = Idle()
    service = BatchService(store, BatchesConfig(max_stored_bytes=50), deleter)
    assert code_of(lambda: upload(service)) == "storage_limit_reached"
    service.delete_file(TENANT, ended.output_file_id)
    assert deleter.num_deletes == 1
    assert num_lines(store, number) == 4
    assert code_of(lambda: service.file_content(TENANT, ended.output_file_id)) is not None
    assert upload(service)
    assert list(delete_expired_files(store)) == []
    assert num_lines(store, number) == 0


def test_new_batches_are_bounded_in_a_minute(store: JobStore) -> None:
    service = service_of(store, max_uploads_per_minute=2)
    file_id = upload(service)
    create(service, file_id)
    create(service, file_id)
    assert code_of(lambda: create(service, file_id)) == "rate_limit_exceeded"


def test_a_rate_lets_go_on_after_a_minute() -> None:
    rate = Rate(1, "uploads")
    rate.admit("ann", 100.0)
    rate.admit("bob", 100.0)
    with pytest.raises(ApiError, match="more than 1 uploads in a minute") as caught:
        rate.admit("ann", 130.0)
    assert caught.value.retry_after_s == 31
    rate.admit("ann", 160.0)


def test_uploads_under_way_are_counted_with_what_they_have_written(tmp_path: Path) -> None:
    config = BatchesConfig(max_uploads_per_minute=2, max_files=4, max_stored_bytes=100)
    uploads = UploadsUnderWay(config, lambda: Draft(tmp_path))
    one = uploads.begin(TENANT, 2, 0)
    two = uploads.begin(TENANT, 2, 0)
    assert code_of(lambda: uploads.begin(TENANT, 0, 0)) == "rate_limit_exceeded"
    uploads.begin("two", 0, 0)
    uploads.end(TENANT, two)
    assert code_of(lambda: uploads.begin(TENANT, 3, 0)) == "storage_limit_reached"
    one.write(b"x" * 60)
    assert code_of(lambda: uploads.begin(TENANT, 0, 40)) == "storage_limit_reached"
    uploads.end(TENANT, one)
    uploads.end(TENANT, uploads.begin(TENANT, 3, 99))
    assert len(list(tmp_path.iterdir())) == 1


def test_servers_that_admit_uploads_at_once_store_no_file_too_many(shared_at: OpenStore) -> None:
    services = [service_of(shared_at(name), max_files=1) for name in ("a", "b")]
    drafts = [service.admit_upload(TENANT) for service in services]
    form = Upload({"purpose": "batch"}, "jobs.jsonl")
    services[0].add_file(TENANT, drafts[0], form)
    late = code_of(lambda: services[1].add_file(TENANT, drafts[1], form))
    assert late == "storage_limit_reached"
    with services[0].store.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(blob_chunks)).scalar() == 0


def test_of_two_batches_at_once_the_second_sees_the_first(shared_at: OpenStore) -> None:
    store = shared_at("a")
    service = service_of(store, max_open_batches=1)
    file_id = upload(service)
    with ThreadPoolExecutor(1) as thread:
        with store.database.write() as connection:
            bounds.lock_tenant(connection, TENANT)
            batch_rows.insert_batch(
                connection,
                tenant=TENANT,
                endpoint="/v1/completions",
                input_file_id=file_id,
                completion_window_s=3600,
                created_at_s=store.clock(),
                expires_at_s=store.clock() + 3600,
            )
            second = thread.submit(create, service, file_id)
            wait_blocked(store, second)
        assert code_of(second.result) == "too_many_open_batches"


def wait_blocked(store: JobStore, other: Future[str]) -> None:
    """Until it waits for a lock, or has ended because it needs none."""
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    while not other.done():
        with store.database.read() as connection:
            if connection.execute(waiting).scalar():
                return


def test_batches_are_forgotten_a_while_after_their_results(store: JobStore) -> None:
    number = add_batch(store, 3)
    claimed = claim(store, number)
    assert claimed is not None
    answer(store, number, [0, 1, 2], done=claimed[0])
    old = finish(store, number)
    service = service_of(store)
    create(service, upload(service))
    assert service.get_batch(TENANT, old.id)  # for its output file is there
    assert list(delete_expired_files(store)) == []
    kept = create(service, upload(service))
    with pytest.raises(ApiError, match=f"no batch has the id '{old.id}'"):
        service.get_batch(TENANT, old.id)
    assert service.get_batch(TENANT, kept)
    with store.database.read() as connection:
        numbers = connection.execute(select(lines.c.batch_number)).scalars().all()
        assert number not in numbers


def test_a_batch_that_just_ended_without_results_is_remembered(store: JobStore) -> None:
    service = service_of(store)
    file_id = upload(service)
    cancelled = create(service, file_id)
    service.cancel_batch(TENANT, cancelled)
    with store.database.write() as connection:
        number = connection.execute(select(batches.c.number)).scalar_one()
        batch_rows.finish_batch(connection, number, store.clock(), output_days=30)
    create(service, file_id)
    assert service.get_batch(TENANT, cancelled)["status"] == "cancelled"
    with pytest.raises(ApiError, match="there is no line to retry; create a new batch"):
        service.retry_batch(TENANT, cancelled)
    later = dataclasses.replace(store, clock=lambda: store.clock() + 40 * DAY_S)
    in_40_days = service_of(later)
    create(in_40_days, upload(in_40_days))
    with pytest.raises(ApiError, match="no batch has the id"):
        in_40_days.get_batch(TENANT, cancelled)


def test_chunks_of_a_file_whose_row_is_gone_are_swept_at_a_start(shared_at: OpenStore) -> None:
    store = shared_at("a")
    kept, gone = add_file(store, b"kept"), add_file(store, b"gone")
    with store.database.write() as connection:
        files.delete_file(connection, gone, store.clock())  # and then the server dies
    again = shared_at("b")
    with again.database.read() as connection:
        left = connection.execute(select(blob_chunks.c.blob_id)).scalars().all()
    assert left == [kept.id]
    assert b"".join(again.blobs.stream(kept.id)) == b"kept"


def test_a_window_is_feasible_by_the_rate_of_all_servers(shared_at: OpenStore) -> None:
    store = shared_at("a")
    service = service_of(store, infeasible="refuse")
    file_id = upload(service, b"\n" * 5000)
    assert code_of(lambda: create(service, file_id)) == "window_infeasible"
    with store.database.write() as connection:
        for name in ("a", "b"):
            work.renew_lease(connection, name, store.clock() + 1000)
        work.renew_lease(connection, "dead", store.clock() - 1000)
    create(service, file_id)
    assert code_of(lambda: create(service, file_id)) == "window_infeasible"
