"""Which of several servers, or of one server's starts, works on a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from sqlalchemy import select

from echo_sgl.batches.dispatch.active_job import ActiveJob, claim_lines
from echo_sgl.batches.dispatch.served import ServedBatches
from echo_sgl.batches.dispatch.validator import Validator
from echo_sgl.batches.lines.job_line import EMBEDDINGS_URL, URLS
from echo_sgl.batches.store import offers, work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.schema import batches
from eval.servers.stub_server import StubModel
from tests.batches.client import Stub, line
from tests.batches.conftest import OpenStore
from tests.batches.dispatch.test_validation import add_batch
from tests.batches.rows import NOW_S, start
from tests.batches.rows import line as line_row

Live = Callable[..., None]


def named_line(model: str) -> bytes:
    """A line for a model, which is its `custom_id` as well."""
    return line(model, body={"model": model, "prompt": "hello", "max_tokens": 4})


@pytest.mark.parametrize(
    ("models", "shown", "needed"),
    [
        (["stub"], "stub", "stub"),
        (["sql"], "sql", "stub:sql"),
        (["stub", "stub:sql"], None, "stub, stub:sql"),
    ],
)
def test_a_batch_waits_for_a_server_that_has_all_of_its_models(
    live_sqlite: Live,
    caplog: pytest.LogCaptureFixture,
    models: list[str],
    shown: str | None,
    needed: str,
) -> None:
    """SGLang would answer its lines with the model that it has."""

    async def first_life(stub: Stub) -> None:
        stub.model.opened.clear()
        batch = await stub.create(b"\n".join(map(named_line, models)))
        begun = await stub.until(batch.id, lambda found: found.status == "in_progress")
        assert begun.model == shown

    async def another_model(stub: Stub) -> None:
        own = await stub.create(named_line("another"))
        assert (await stub.ended(own.id)).status == "completed"
        [waiting, _] = [one async for one in stub.client.batches.list()][::-1]
        assert (waiting.status, waiting.request_counts.completed) == ("in_progress", 0)

    async def first_again(stub: Stub) -> None:
        batches = [one async for one in stub.client.batches.list()]
        assert (await stub.ended(batches[-1].id)).request_counts.completed == len(models)

    live_sqlite(first_life, model=StubModel(0.0, adapters=["sql"]))
    live_sqlite(another_model, model=StubModel(0.0, name="another", adapters=["sql"]))
    live_sqlite(first_again, model=StubModel(0.0, adapters=["sql"]))
    said = f"is for /v1/completions of {needed} and waits for a server that has it; this one has"
    assert sum(said in message for message in caplog.messages) == 1


def test_an_adapter_answers_the_lines_that_name_it_as_it_is_listed(live_sqlite: Live) -> None:
    """SGLang would answer them with the base model."""

    async def life(stub: Stub) -> None:
        models = ("stub", "sql", "stub:sql")
        batch = await stub.create(b"\n".join(named_line(model) for model in models))
        records = await stub.records((await stub.ended(batch.id)).output_file_id)
        found = {name: record["response"]["body"]["model"] for name, record in records.items()}
        assert found == {"stub": "stub", "sql": "stub:sql", "stub:sql": "stub:sql"}

    live_sqlite(life, model=StubModel(0.0, adapters=["sql"]))


def checked_before(store_at: OpenStore, *models: str) -> tuple[JobStore, BatchRow]:
    """A batch of one line, for `stub`, from before more than one model was kept of a batch."""
    old = store_at()
    add_batch(old)
    with old.database.write() as connection:
        number = connection.execute(select(batches.c.number)).scalar_one()
        place = {"custom_id": "a", "num_bytes": len(line("a"))}
        work.insert_lines(connection, number, [line_row(0) | place])
        start(connection, number, 1, *models)
        connection.exec_driver_sql("ALTER TABLE batches DROP COLUMN models")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0005'")
    old.abandon()
    store = store_at()
    with store.database.read() as connection:
        return store, connection.execute(select(batches)).one()


def test_a_batch_of_one_model_from_before_several_were_kept_waits_as_well(
    store_at: OpenStore,
) -> None:
    _, found = checked_before(store_at, "stub")
    assert (found.model, found.models) == ("stub", None)
    assert asyncio.run(ServedBatches(engine_with("mine")).foreign([found])) == {found.number}


def test_a_line_of_a_batch_whose_models_were_not_kept_is_answered_by_no_other(
    store_at: OpenStore,
) -> None:
    store, found = checked_before(store_at)
    served = ServedBatches(engine_with("mine"))
    assert asyncio.run(served.foreign([found])) == set()
    job = ActiveJob.of_row(found, served.names)
    claim = claim_lines(store, job, max_lines=9, max_bytes=10**6)
    assert claim is not None
    assert not claim.lines
    [result] = claim.results
    assert orjson.loads(result.record)["error"]["code"] == "model_not_found"


def engine_with(*models: str) -> Any:
    """An engine that has these models."""

    async def named() -> dict[str, str]:
        return {model: model for model in models}

    return SimpleNamespace(endpoints=URLS, models=named, max_requests=None)


def validator_of(store: JobStore, *models: str) -> Validator:
    """The validator of a server that has these models."""
    threads = ThreadPoolExecutor(1)
    return Validator(store, engine_with(*models), threads, max_lines=9, on_checked=lambda: None)


def say(store: JobStore, server: str, *models: str, at_s: float = NOW_S) -> None:
    with store.database.write() as connection:
        work.renew_lease(connection, server, store.clock() + 1000)
        offers.say_models(connection, server, models, at_s)


def check(validator: Validator, store: JobStore) -> BatchRow:
    """The only batch, after its file was checked if it was to be."""
    asyncio.run(validator._check_waiting())
    with store.database.read() as connection:
        return connection.execute(select(batches)).one()


def test_a_file_for_a_model_of_another_server_is_left_to_it_while_it_lives(
    store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    add_batch(store)
    say(store, "other", "its own", "stub")
    ours = validator_of(store, "mine")
    for _ in range(2):
        found = check(ours, store)
        assert (found.status, found.owner) == ("validating", None)
    assert sum("waits for one that has them" in message for message in caplog.messages) == 1
    with store.database.write() as connection:
        work.forget_servers(connection, "other")
    found = check(ours, store)
    assert (found.status, found.errors[0]["code"]) == ("failed", "model_not_found")
    ours.close()


def test_the_server_that_has_the_model_checks_what_another_one_left(store: JobStore) -> None:
    add_batch(store)
    say(store, "other", "stub")
    ours, other = validator_of(store, "mine"), validator_of(store, "stub")
    assert check(ours, store).status == "validating"
    assert check(other, store).status == "in_progress"
    ours.close()
    other.close()


def test_what_a_server_said_before_the_batch_was_created_decides_nothing(store: JobStore) -> None:
    """It may have loaded the adapter since that the lines name."""
    add_batch(store)
    ours = validator_of(store, "mine")
    say(store, "other", "its own", at_s=NOW_S - 1)
    assert check(ours, store).status == "validating"
    say(store, "other", "its own")
    assert check(ours, store).status == "failed"
    ours.close()


def test_files_for_an_endpoint_of_other_servers_are_left_to_them(store: JobStore) -> None:
    add_batch(store, "early")
    engine: Any = SimpleNamespace(endpoints=(EMBEDDINGS_URL,))
    checks = Validator(store, engine, ThreadPoolExecutor(1), max_lines=9, on_checked=lambda: None)
    assert checks._claim() is None
    engine.endpoints = URLS
    assert checks._claim() is not None
    checks.close()
