"""Servers that come after each other, or share one database."""

from __future__ import annotations

import asyncio
import time
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select, text

from echo_sgl.batches.clock import SharedClock
from echo_sgl.batches.dispatch import job_table
from echo_sgl.batches.dispatch.active_job import ActiveJob, Claim, claim_lines
from echo_sgl.batches.dispatch.lease import LEASE_S
from echo_sgl.batches.store import batch_rows, work
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.schema import lines
from eval.servers.stub_server import StubModel
from tests.batches.client import job, running_stub, until
from tests.batches.conftest import OpenStore
from tests.batches.faults import FullModel, async_
from tests.batches.rows import add_batch


def test_what_a_stopped_server_left_is_done_by_the_next(tmp_path: Path, database_url) -> None:
    async def first() -> str:
        async with running_stub(tmp_path / "a", database_url=database_url, delay_s=0.01) as stub:
            batch = await stub.create(job([f"p {index}" for index in range(400)]))
            await stub.until(
                batch.id,
                lambda batch: (
                    batch.request_counts is not None and batch.request_counts.completed > 20
                ),
            )
            return batch.id

    async def second(batch_id: str) -> None:
        async with running_stub(tmp_path / "a", database_url=database_url) as stub:
            batch = await stub.ended(batch_id)
            assert len(await stub.records(batch.output_file_id)) == 400
            assert batch.usage is not None
            assert batch.usage.total_tokens == 400 * 12

    batch_id = asyncio.run(first())
    asyncio.run(second(batch_id))


def test_two_servers_on_one_database_share_a_batch(tmp_path: Path, postgres_server, database_url):
    if database_url is None:
        pytest.skip("SQLite belongs to one server")

    async def main() -> None:
        options = {"database_url": database_url, "window_lines": 10}
        async with (
            running_stub(tmp_path / "a", **options) as one,
            running_stub(tmp_path / "b", **options) as two,
        ):
            models = (one.model, two.model)

            async def both_run() -> bool:
                return all(model.num_running == 10 for model in models)

            for model in models:
                model.opened.clear()
            batch = await one.create(job([f"p {index}" for index in range(400)]))
            await until(both_run)
            for model in models:
                model.opened.set()
            batch = await two.ended(batch.id)
            assert len(await two.records(batch.output_file_id)) == 400
            assert one.model.max_running == two.model.max_running == 10
            content = await two.client.files.content(batch.input_file_id)
            assert content.content.count(b"custom_id") == 400

    asyncio.run(main())


def test_what_a_dead_server_held_is_done_by_another_when_its_lease_ends(
    tmp_path: Path, database_url: str | None
) -> None:
    if database_url is None:
        pytest.skip("SQLite belongs to one server")

    async def main() -> None:
        options = {"database_url": database_url, "delay_s": 0.02, "window_lines": 4}
        async with running_stub(tmp_path / "a", **options) as stub:
            file_id = await stub.upload(job(["hello"] * 50))
            batch = await stub.client.batches.create(
                input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
            )
            await stub.http().post(f"/v1/batches/{batch.id}/pause")
            await stub.until(batch.id, lambda found: found.status == "in_progress")
            engine = create_engine(database_url.replace("postgresql", "postgresql+psycopg"))
            with engine.begin() as connection:
                held = "UPDATE ranges SET owner = 'dead'"
                assert connection.execute(text(held)).rowcount >= 1
                lease = {"until": time.time() + 3}
                connection.execute(text("INSERT INTO servers VALUES ('dead', :until)"), lease)
            engine.dispose()
            await stub.http().post(f"/v1/batches/{batch.id}/resume")
            batch = await stub.ended(batch.id)
            assert batch.completed_at is not None
            assert batch.completed_at >= int(lease["until"])
            assert len(await stub.records(batch.output_file_id)) == 50

    asyncio.run(main())


def test_what_a_server_holds_and_refuses_is_done_by_another_one(
    tmp_path: Path, database_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database_url is None:
        pytest.skip("SQLite belongs to one server")
    monkeypatch.setattr(job_table, "REFUSED_S", 1.0)

    async def main() -> None:
        options = {"database_url": database_url, "window_lines": 10}
        full = FullModel(0)
        async with (
            running_stub(tmp_path / "a", model=full, **options) as one,
            running_stub(tmp_path / "b", **options) as two,
        ):
            two.model.opened.clear()
            batch = await one.create(job([f"p {index}" for index in range(100)]))
            await until(async_(lambda: full.num_refused > 0))
            two.model.opened.set()
            batch = await two.ended(batch.id)
            assert len(await two.records(batch.output_file_id)) == 100

    asyncio.run(main())


def test_each_job_is_done_by_the_server_that_has_its_model(
    tmp_path: Path, database_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database_url is None:
        pytest.skip("SQLite belongs to one server")
    monkeypatch.setattr("echo_sgl.batches.dispatch.lease.RENEW_S", 0.2)

    async def main() -> None:
        a = StubModel(0.0, name="model-a")
        b = StubModel(0.0, name="model-b", adapters=["sql"])
        async with (
            running_stub(tmp_path / "a", database_url=database_url, model=a) as one,
            running_stub(tmp_path / "b", database_url=database_url, model=b) as two,
        ):
            content = job(["hello"] * 2).replace(b'"stub"', b'"model-b"')
            mixed = content.replace(b'"model-b"', b'"model-b:sql"', 1)
            for server, upload in product((one, two), (content, mixed)):
                batch = await server.create(upload)
                assert len(await server.records((await server.ended(batch.id)).output_file_id)) == 2
            batch = await one.create(job(["hello"]))
            found = await one.ended(batch.id)
            assert found.errors is not None
            assert found.errors.data is not None
            assert found.errors.data[0].code == "model_not_found"
        assert a.max_running == 0

    asyncio.run(main())


@pytest.mark.parametrize("ahead_s", [+300.0, -300.0])
def test_servers_whose_clocks_differ_by_minutes_take_nothing_from_each_other(
    store_at: OpenStore,
    database_url: str | None,
    ahead_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if database_url is None:
        pytest.skip("SQLite belongs to one server")
    one = store_at("one")
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + ahead_s)
        two = store_at("two")
    number = add_batch(one, 8)
    claims = [_claim(store, number) for store in (one, two, one, two)]
    # The lines of `add_batch` cannot be read, so that they come as results.
    claimed = [item.position for claim in claims if claim is not None for item in claim.results]
    assert len(claimed) == len(set(claimed)) >= 7
    with one.database.read() as connection:
        crashes = connection.execute(select(lines.c.crashes)).scalars().all()
    assert list(crashes) == [0] * 8
    assert two.clock() == pytest.approx(one.clock(), abs=100)


def _claim(store: JobStore, number: int) -> Claim | None:
    """As a dispatcher does, whose lease is renewed before it claims."""
    with store.database.write() as connection:
        work.renew_lease(connection, store.server_id, store.clock() + LEASE_S)
        active = ActiveJob.of_row(batch_rows.lock_batch(connection, number), {})
    return claim_lines(store, active, max_lines=2, max_bytes=10**6)


def test_a_shared_clock_follows_the_database_where_the_machine_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uptime_s, database_s = 50.0, 1_000_000.0
    monkeypatch.setattr("echo_sgl.batches.clock.since_boot_s", lambda: uptime_s)
    clock = SharedClock()
    clock.keep(lambda: database_s)
    assert clock() == database_s
    uptime_s += 1.0
    clock.keep(lambda: pytest.fail("it was just read"))
    assert clock() == database_s + 1.0
    uptime_s, database_s = uptime_s + 10.0, database_s + 500.0  # of which 489 s were not counted
    clock.keep(lambda: database_s)
    assert clock() == database_s
