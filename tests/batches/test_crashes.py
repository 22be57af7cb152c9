"""A line that ends its server is found, fails alone, and takes no neighbour with it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from alembic import command
from sqlalchemy import create_engine, select

from echo_sgl.batches.dispatch.active_job import ActiveJob, claim_lines
from echo_sgl.batches.dispatch.window import MAX_CRASHES, SendLimit, Weight, max_together
from echo_sgl.batches.store import batch_rows, work
from echo_sgl.batches.store.database import DATABASE_NAME, migration_config, open_database
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.schema import lines
from echo_sgl.batches.store.work import Span
from tests.batches.client import ENDED, job
from tests.batches.rows import add_batch, answer, claim, crashes, finish
from tests.cli.stubs import StubServer


def crash(store: JobStore) -> None:
    """As if the server had died: its lease has run out, its ranges are still its own."""
    with store.database.write() as connection:
        connection.exec_driver_sql("UPDATE ranges SET owner = 'dead' WHERE owner IS NOT NULL")


def set_crashes(store: JobStore, values: list[int]) -> None:
    with store.database.write() as connection:
        for position, value in enumerate(values):
            change = lines.update().where(lines.c.position == position)
            connection.execute(change.values(crashes=value))


def test_what_a_dead_server_held_is_suspected_once_and_claimed_in_fewer_lines(
    store: JobStore,
) -> None:
    number = add_batch(store, 40)
    assert claim(store, number, max_lines=16) == (Span(0, 16), [*range(16)])
    answer(store, number, [2, 3], done=None)
    crash(store)
    assert claim(store, number, max_lines=16) == (Span(16, 32), [*range(16, 32)])
    assert crashes(store, number) == [1, 1, 0, 0] + [1] * 12 + [0] * 24
    assert claim(store, number, max_lines=16) == (Span(0, 6), [0, 1, 4, 5])
    crash(store)
    assert claim(store, number, 6, max_lines=16) == (Span(6, 10), [6, 7, 8, 9])
    assert crashes(store, number)[:8] == [2, 2, 0, 0, 2, 2, 1, 1]
    assert claim(store, number, 0, max_lines=16) == (Span(0, 1), [0])
    crash(store)
    assert claim(store, number, 0, max_lines=16) == (Span(0, 1), [0])
    assert crashes(store, number)[0] == MAX_CRASHES - 1  # it was claimed, but not sent alone


def test_a_line_that_was_alone_when_its_server_died_fails_when_it_is_claimed(
    store: JobStore,
) -> None:
    number = add_batch(store, 2)
    set_crashes(store, [2, 0])
    assert claim(store, number, max_lines=16) == (Span(0, 1), [0])
    with store.database.write() as connection:
        work.note_last_try(connection, number, 0, is_sent=True)
    crash(store)
    batch = _active(store, number)
    claimed = claim_lines(store, batch, max_lines=16, max_bytes=10**6)
    assert claimed is not None
    assert not claimed.lines
    record = orjson.loads(claimed.results[0].record)
    assert record["custom_id"] == "line-0"
    assert record["error"]["code"] == "server_crashed"


@pytest.mark.parametrize("how", ["survived", "released"])
def test_a_line_that_its_server_survives_is_not_to_blame(store: JobStore, how: str) -> None:
    number = add_batch(store, 1)
    set_crashes(store, [2])
    claimed = claim(store, number)
    assert claimed is not None
    with store.database.write() as connection:
        work.note_last_try(connection, number, 0, is_sent=True)
        assert connection.execute(select(lines.c.crashes)).scalar() == MAX_CRASHES
        if how == "survived":
            work.note_last_try(connection, number, 0, is_sent=False)
        else:
            work.release_spans(connection, number, store.server_id, [claimed[0]])
    assert crashes(store, number) == [MAX_CRASHES - 1]


def test_a_retried_batch_sends_the_line_alone_once_more(store: JobStore) -> None:
    number = add_batch(store, 2)
    set_crashes(store, [3, 0])
    claimed = claim(store, number)
    assert claimed is not None
    answer(store, number, [0, 1], ok=False, done=claimed[0])
    ended = finish(store, number)
    with store.database.write() as connection:
        batch_rows.reopen_batch(connection, ended, 0.0)
    assert crashes(store, number) == [2, 0]


def test_lines_of_the_first_schema_count_no_crashes(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / DATABASE_NAME}")
    config = migration_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        values = "(1, 0, 1, 'a', 0, 9, 9)"
        names = "batch_number, position, line_number, custom_id, offset_bytes, num_bytes, tokens"
        connection.exec_driver_sql(f"INSERT INTO lines ({names}) VALUES {values}")
    engine.dispose()
    open_database(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE_NAME) as database:
        assert database.execute("SELECT custom_id, crashes FROM lines").fetchall() == [("a", 0)]
    database.close()


def test_suspects_have_few_neighbours_in_the_window_whoever_comes_first() -> None:
    assert [max_together(count, 256) for count in range(5)] == [256, 16, 1, 1, 1]
    limit = SendLimit(16, 1000)
    innocent, suspect, last = (Weight(1, 2, num_crashes) for num_crashes in range(3))
    limit.take(suspect)
    for _ in range(3):
        assert limit.fits(innocent)
        limit.take(innocent)
    assert not limit.fits(innocent)
    limit.give(suspect)
    assert limit.fits(innocent)
    assert not limit.fits(last)
    for _ in range(3):
        limit.give(innocent)
    assert limit.fits(last)
    limit.take(last)
    assert not limit.fits(innocent)


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubServer]:
    config = tmp_path / "echo.toml"
    config.write_text("[batches]\nwindow_lines = 16\n")
    options = ("--state-dir", str(tmp_path / "state"), "--config", str(config))
    server = StubServer(tmp_path, *options, "--delay-ms", "5")
    server.start()
    yield server
    server.stop()


def test_a_prompt_that_ends_the_server_fails_and_all_others_are_answered(
    stub: StubServer,
) -> None:
    prompts = [f"p {index}" for index in range(100)]
    prompts[30] = "die"
    http = httpx.Client(base_url=stub.url, timeout=60)
    content = ("jobs.jsonl", job(prompts))
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": content}).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = http.post("/v1/batches", json=body).json()["id"]
    assert stub.process is not None
    for _ in range(MAX_CRASHES):
        stub.process.wait(300)
        stub.launch()  # which may come as far as the line before it answers anything
    stub.wait_up()
    batch = _ended(http, batch_id)
    assert batch["request_counts"] == {"total": 100, "completed": 99, "failed": 1}
    failed = orjson.loads(http.get(f"/v1/files/{batch['error_file_id']}/content").content)
    assert failed["custom_id"] == "line-30"
    assert failed["response"] is None
    assert failed["error"]["code"] == "server_crashed"
    assert "the last time on no other request" in failed["error"]["message"]
    assert stub.process.poll() is None
    assert http.post(f"/v1/batches/{batch_id}/retry").json()["status"] == "in_progress"
    stub.process.wait(300)  # by the line alone: one crash, not three
    stub.launch()
    stub.wait_up()
    again = _ended(http, batch_id)
    assert again["request_counts"] == {"total": 100, "completed": 99, "failed": 1}
    http.close()


def _ended(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + 300
    while (batch := http.get(f"/v1/batches/{batch_id}").json())["status"] not in ENDED:
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.05)
    found: dict[str, Any] = batch
    return found


def _active(store: JobStore, number: int) -> ActiveJob:
    with store.database.write() as connection:
        return ActiveJob.of_row(batch_rows.lock_batch(connection, number), {})
