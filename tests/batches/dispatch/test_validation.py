"""Checking the file of a new batch: by one server at a time, never in another batch's way."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from openai.types import Batch
from sqlalchemy import Connection, select

from echo_sgl.batches.dispatch import validation
from echo_sgl.batches.dispatch.validation import Validation
from echo_sgl.batches.dispatch.validator import Validator
from echo_sgl.batches.lines.check_upload import CheckRules
from echo_sgl.batches.lines.job_line import URLS
from echo_sgl.batches.store import batch_rows, work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.schema import lines
from tests.batches.client import WAIT_S, Stub, error_of, job, until
from tests.batches.client import line as job_line
from tests.batches.rows import DAY_S, NOW_S, add_file, batch_of, line, start
from tests.batches.slow_checker import SlowChecker

RULES = CheckRules("/v1/completions", {"m": "m"}, 100)
ROW = b'[1,0,9,"a",5]\n'
PROBLEM = {"code": "invalid_body", "message": "wrong", "param": None, "line": 1}
OTHER = "server-other"


def head(num_lines: int, problems: tuple[dict[str, Any], ...] = ()) -> bytes:
    fields = {"problems": problems, "model": "m", "models": ["m"], "num_lines": num_lines}
    return orjson.dumps(fields) + b"\n"


@pytest.fixture
def slow_checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[SlowChecker] = []

    def make(output: bytes = b"") -> SlowChecker:
        folder = tmp_path / "checker"
        folder.mkdir()
        made.append(SlowChecker(folder, output))
        monkeypatch.setattr(validation, "CHECKER", made[0].command)
        return made[0]

    yield make
    for checker in made:
        checker.let_go()


def add_batch(store: JobStore, tenant: str = "one") -> None:
    file = add_file(store, job_line("a"))
    with store.database.write() as connection:
        batch_rows.insert_batch(
            connection,
            tenant=tenant,
            endpoint="/v1/completions",
            input_file_id=file.id,
            completion_window_s=DAY_S,
            created_at_s=NOW_S,
            expires_at_s=NOW_S + DAY_S,
        )


def claimed(store: JobStore, owner: str | None = None) -> batch_rows.BatchRow:
    """A batch that is to be validated by this server or another one."""
    add_batch(store)
    with store.database.write() as connection:
        found = batch_rows.claim_batch(connection, owner or store.server_id, set(), ("validating",))
    assert found is not None
    return found


def num_lines(store: JobStore, number: int) -> int:
    query = select(lines.c.position).where(lines.c.batch_number == number)
    with store.database.read() as connection:
        return len(connection.execute(query).all())


def holds(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.01)


@contextmanager
def while_checking(store: JobStore, batch: BatchRow, checker: SlowChecker) -> Iterator[Connection]:
    """A transaction of somebody else in the middle of a check, which then goes on to its end."""
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(Validation(store, batch, RULES).run)
        holds(lambda: checker.is_there)
        with store.database.write() as connection:
            yield connection
        checker.let_go()
        ended.result()


OUTPUTS = {
    "starts": head(0),
    "puts lines in": head(1) + ROW,
    "fails": head(0, (PROBLEM,)),
    "breaks off": b"",
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_who_was_taken_for_dead_while_it_checked_changes_nothing(
    store: JobStore, slow_checker: Callable[[bytes], SlowChecker], output: bytes
) -> None:
    batch = claimed(store)
    with while_checking(store, batch, slow_checker(output)) as connection:
        taken = batch_rows.claim_batch(connection, OTHER, {OTHER}, ("validating",))
        assert taken is not None
        work.insert_lines(connection, batch.number, [line(7)])
    found = batch_of(store, batch.number)
    assert (found.status, found.owner, found.total, found.errors) == ("validating", OTHER, 0, None)
    assert num_lines(store, batch.number) == 1


def test_who_comes_back_after_another_server_took_over_deletes_no_lines(store: JobStore) -> None:
    batch = claimed(store)
    with store.database.write() as connection:
        assert batch_rows.claim_batch(connection, OTHER, {OTHER}, ("validating",)) is not None
        work.insert_lines(connection, batch.number, [line(0)])
    Validation(store, batch, RULES).run()
    assert num_lines(store, batch.number) == 1
    with store.database.write() as connection:
        start(connection, batch.number, 1, "m")
    Validation(store, batch, RULES).run()
    assert num_lines(store, batch.number) == 1
    assert batch_of(store, batch.number).status == "in_progress"


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_a_batch_that_is_cancelled_while_it_is_checked_promises_no_line(
    store: JobStore, slow_checker: Callable[[bytes], SlowChecker], output: bytes
) -> None:
    batch = claimed(store)
    with while_checking(store, batch, slow_checker(output)) as connection:
        batch_rows.cancel_batch(connection, batch.number, NOW_S)
    found = batch_of(store, batch.number)
    assert (found.status, found.total, found.errors) == ("cancelling", 0, None)
    assert num_lines(store, batch.number) == 0


def test_a_check_is_ended_with_its_process_from_another_thread(
    store: JobStore, slow_checker: Callable[[], SlowChecker]
) -> None:
    batch = claimed(store)
    checker = slow_checker()
    check = Validation(store, batch, RULES)
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(check.run)
        holds(lambda: checker.is_there)
        check.stop()
        ended.result()
    assert not checker.is_running
    check.stop()
    check.run()
    assert batch_of(store, batch.number).status == "validating"


def test_a_batch_that_fails_while_it_is_paused_is_paused_no_more(store: JobStore) -> None:
    batch = claimed(store)
    with store.database.write() as connection:
        batch_rows.set_paused(connection, batch.number, NOW_S)
    Validation(store, batch, RULES).fail("wrong", "wrong")
    found = batch_of(store, batch.number)
    assert (found.status, found.paused_at_s) == ("failed", None)


def test_a_checker_that_dies_at_once_fails_the_batch(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "CHECKER", (sys.executable, "-c", "raise SystemExit(1)"))
    rules = CheckRules("/v1/completions", {"m": "m" * 1_000_000}, 100)  # more than a pipe holds
    batch = claimed(store)
    Validation(store, batch, rules).run()
    found = batch_of(store, batch.number)
    assert (found.status, found.errors[0]["code"]) == ("failed", "file_not_checked")


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTERM"])
def test_a_checker_that_is_told_to_end_with_its_server_fails_no_batch(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ends = f"import os, signal as s; s.signal(s.{name}, s.SIG_DFL); os.kill(os.getpid(), s.{name})"
    monkeypatch.setattr(validation, "CHECKER", (sys.executable, "-c", ends))
    batch = claimed(store)
    with pytest.raises(InterruptedError, match=str(int(getattr(signal, name)))):
        Validation(store, batch, RULES).run()
    found = batch_of(store, batch.number)
    assert (found.status, found.errors) == ("validating", None)


def test_an_input_file_that_is_gone_is_said_to_be(live_sqlite: Any, tmp_path: Path) -> None:
    async def life(stub: Stub) -> None:
        file_id = await stub.upload(job(["hello"]))
        (tmp_path / "state" / "files" / file_id).unlink()
        batch = await stub.client.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        )
        assert error_of(await stub.ended(batch.id)) == "file_not_found"

    live_sqlite(life)


def test_a_cancel_ends_the_check_and_lets_the_next_batch_go_first(
    live: Any, slow_checker: Callable[[], SlowChecker], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = validation.CHECKER

    async def life(stub: Stub) -> None:
        checker = slow_checker()
        batch = await stub.create(job(["hello"]))
        await until(lambda: as_found(checker.is_there))
        monkeypatch.setattr(validation, "CHECKER", real)
        second = await stub.create(job(["hello"]))
        await stub.client.batches.cancel(batch.id)
        assert (await stub.ended(batch.id)).status == "cancelled"
        assert not checker.is_running
        assert (await stub.ended(second.id)).status == "completed"

    live(life)


def test_a_server_that_stops_ends_the_check_and_the_next_one_does_it(
    live: Any, slow_checker: Callable[[], SlowChecker], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = validation.CHECKER
    created: list[Batch] = []
    checker = slow_checker()

    async def life(stub: Stub) -> None:
        created.append(await stub.create(job(["hello"])))
        await until(lambda: as_found(checker.is_there))

    async def next_life(stub: Stub) -> None:
        assert (await stub.ended(created[0].id)).status == "completed"

    live(life)
    assert not checker.is_running
    monkeypatch.setattr(validation, "CHECKER", real)
    live(next_life)


@pytest.mark.usefixtures("often")
def test_a_check_that_was_told_to_end_is_done_again(
    live_sqlite: Any, slow_checker: Callable[[], SlowChecker], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = validation.CHECKER

    async def life(stub: Stub) -> None:
        checker = slow_checker()
        batch = await stub.create(job(["hello"]))
        await until(lambda: as_found(checker.is_there))
        monkeypatch.setattr(validation, "CHECKER", real)
        checker.terminate()
        assert (await stub.ended(batch.id)).status == "completed"

    live_sqlite(life)


def test_tenants_take_turns_however_many_batches_one_of_them_has(store: JobStore) -> None:
    for tenant in ("many", "many", "many", "few", "other"):
        add_batch(store, tenant)
    engine: Any = SimpleNamespace(endpoints=URLS)
    checks = Validator(store, engine, ThreadPoolExecutor(1), max_lines=9, on_checked=lambda: None)
    order = []
    for _ in range(5):
        batch = checks._claim()
        assert batch is not None
        order.append(batch.tenant)
        Validation(store, batch, RULES).fail("wrong", "wrong")
    checks.close()
    assert order == ["many", "few", "other", "many", "many"]


async def as_found(value: bool) -> bool:
    return value
