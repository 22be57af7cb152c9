"""What the machine does to the store: full disks, a clock that is set."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from echo_sgl.batches import clock
from echo_sgl.batches.clock import MAX_STEP_S
from echo_sgl.batches.dispatch.line_engine import AsgiEngine
from echo_sgl.batches.dispatch.validator import Validator
from echo_sgl.batches.http.service import BatchService
from echo_sgl.batches.lines.replies import Reply
from echo_sgl.batches.store.blobs import DiskBlobs
from echo_sgl.batches.store.database import StoreError
from echo_sgl.batches.store.job_store import open_store
from tests.batches.client import job, running_stub


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own; skips where mounting is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_refuses_uploads_and_loses_no_line(tmp_path: Path) -> None:
    async def main(folder: Path) -> None:
        async with running_stub(folder / "state", delay_s=0.01, window_lines=8) as stub:
            batch = await stub.create(job([f"prompt {index}" for index in range(200)]))
            await stub.until(batch.id, lambda found: found.status == "in_progress")
            filler = folder / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * 4096)
            with pytest.raises(openai.InternalServerError) as caught:
                await stub.upload(b"x" * 300_000)
            assert caught.value.status_code == 503
            assert caught.value.body is not None
            await stub.until(batch.id, lambda _: stub.model.num_running == 0)
            filler.unlink()
            ended = await stub.ended(batch.id)
            assert ended.status == "completed"
            assert len(await stub.records(ended.output_file_id)) == 200

    with small_disk(tmp_path / "disk", "size=3m") as folder:
        asyncio.run(main(folder))


def test_lines_of_an_input_file_that_was_removed_fail_and_the_batch_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_stub(tmp_path, window_lines=4, delay_s=0.02) as stub:
            batch = await stub.create(job(["hello"] * 40))
            await stub.until(
                batch.id,
                lambda batch: (
                    batch.request_counts is not None and batch.request_counts.completed > 0
                ),
            )
            (tmp_path / "files" / batch.input_file_id).unlink()
            ended = await stub.ended(batch.id)
            assert ended.status == "completed"
            errors = await stub.records(ended.error_file_id)
            assert {item["error"]["code"] for item in errors.values()} == {"input_damaged"}
            assert len(errors) + len(await stub.records(ended.output_file_id)) == 40

    asyncio.run(main())


def test_a_store_that_cannot_be_read_for_a_while_only_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        failures = iter(range(3))
        read = DiskBlobs.read

        def fail_at_first(self: DiskBlobs, *given: Any) -> list[bytes]:
            if next(failures, None) is not None:
                raise OSError(5, "Input/output error")
            return read(self, *given)

        monkeypatch.setattr(DiskBlobs, "read", fail_at_first)
        async with running_stub(tmp_path, window_lines=4) as stub:
            ended = await stub.ended((await stub.create(job(["hello"] * 20))).id)
            assert ended.status == "completed"
            assert len(await stub.records(ended.output_file_id)) == 20

    asyncio.run(main())


def test_an_error_in_the_service_fails_its_line_and_is_named_in_the_record_and_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send = AsgiEngine.send

    async def stumble(self: AsgiEngine, url: str, content: bytes, within_s: float) -> Reply:
        if b"stumble" in content:
            raise ZeroDivisionError("as a fault of ours would")
        return await send(self, url, content, within_s)

    monkeypatch.setattr(AsgiEngine, "send", stumble)

    async def main() -> None:
        async with running_stub(tmp_path, max_line_attempts=2) as stub:
            ended = await stub.ended((await stub.create(job(["hello", "stumble", "hello"]))).id)
            failed = (await stub.records(ended.error_file_id))["line-1"]["response"]
            assert failed["status_code"] == 500
            assert "ZeroDivisionError" in failed["body"]["error"]["message"]
            assert len(await stub.records(ended.output_file_id)) == 2

    asyncio.run(main())
    causes = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(cause) for cause in causes] == ["as a fault of ours would"] * 2


def test_a_step_that_stumbles_is_logged_with_its_cause_and_comes_round_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = iter([ZeroDivisionError("once"), OSError("twice")])
    claim = Validator._claim

    def stumble(self: Validator) -> Any:
        if fault := next(faults, None):
            raise fault
        return claim(self)

    monkeypatch.setattr(Validator, "_claim", stumble)

    async def main() -> None:
        async with running_stub(tmp_path) as stub:
            assert (await stub.ended((await stub.create(job(["hello"]))).id)).status == "completed"

    asyncio.run(main())
    assert "ZeroDivisionError: once" in caplog.text
    assert "twice" in caplog.text


def test_an_error_in_a_route_is_a_500_in_the_envelope_and_logged_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(self: BatchService, *given: Any, **options: Any) -> Any:
        raise ZeroDivisionError("as a fault of ours would")

    monkeypatch.setattr(BatchService, "list_batches", stumble)

    async def main() -> None:
        async with running_stub(tmp_path) as stub:
            with pytest.raises(openai.InternalServerError) as caught:
                await stub.client.batches.list()
            assert caught.value.code == "internal_error"
            assert "fault of ours" not in str(caught.value)

    asyncio.run(main())
    assert "ZeroDivisionError: as a fault of ours would" in caplog.text


def test_a_read_only_state_directory_is_refused_at_start(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "size=1m,ro") as folder,
        pytest.raises(StoreError, match="cannot be written"),
    ):
        open_store(folder / "state")


DAY_S = 86_400.0
REAL_TIME = time.time


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the wall clock so many seconds ahead of what it really is."""
    return lambda ahead_s: monkeypatch.setattr(time, "time", lambda: REAL_TIME() + ahead_s)


def test_a_clock_that_is_set_expires_nothing(
    tmp_path: Path, set_clock: Callable[[float], None]
) -> None:
    async def main() -> None:
        async with running_stub(tmp_path, window_lines=4) as stub:
            stub.model.opened.clear()
            batch = await stub.create(job(["hello"] * 100), window="1h")
            await stub.until(batch.id, lambda found: found.status == "in_progress")
            for days in (+400, -400):
                set_clock(days * DAY_S)
                other = await stub.create(job(["slow"]))
                await stub.client.batches.cancel(other.id)
                await stub.ended(other.id)  # so the service has looked at all batches
                assert (await stub.client.batches.retrieve(batch.id)).status == "in_progress"
            stub.model.opened.set()
            assert (await stub.ended(batch.id)).status == "completed"

    asyncio.run(main())


@pytest.mark.parametrize("days", [+400, -400])
def test_a_clock_that_is_set_while_the_server_is_down_expires_nothing(
    tmp_path: Path, days: int, set_clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def before() -> Batch:
        async with running_stub(tmp_path) as stub:
            stub.model.opened.clear()
            return await stub.create(job(["hello"] * 20), window="1h")

    async def after(batch: Batch) -> None:
        async with running_stub(tmp_path) as stub:
            ended = await stub.ended(batch.id)
            assert ended.status == "completed"
            assert len(await stub.records(ended.output_file_id)) == 20
            assert (await stub.client.files.retrieve(batch.input_file_id)).id

    batch = asyncio.run(before())
    set_clock(days * DAY_S)
    asyncio.run(after(batch))
    assert ("the clock was set forward" if days > 0 else "has been used until") in caplog.text


def test_a_batch_of_a_clock_that_was_wrong_holds_no_later_start_there(
    tmp_path: Path, set_clock: Callable[[float], None]
) -> None:
    async def create() -> Batch:
        async with running_stub(tmp_path) as stub:
            return await stub.ended((await stub.create(job(["hello"]), window="1h")).id)

    set_clock(400 * DAY_S)
    wrong = asyncio.run(create())
    set_clock(0)
    right = asyncio.run(create())
    assert wrong.created_at - right.created_at == pytest.approx(400 * DAY_S, rel=0.01)


@pytest.mark.parametrize(
    ("wall_s", "is_same_boot", "last_stored_s", "expected_s"),
    [
        (5_100.0, True, 5_000.0, 5_100.0),
        (5_000.0 + 2 * MAX_STEP_S, True, 5_000.0, 5_100.0),  # set forward: 100 s have passed
        (5_000.0 + 2 * MAX_STEP_S, False, 5_000.0, 5_000.0 + 2 * MAX_STEP_S),  # or it was off
        (4_000.0, False, 5_000.0, 5_000.0),
        (5_100.0, False, 6_000.0 + MAX_STEP_S, 5_100.0),
        (5_100.0, True, 6_000.0 + MAX_STEP_S, 5_100.0),
    ],
)
def test_the_clock_starts_where_wall_store_and_last_start_agree(
    tmp_path: Path, wall_s: float, is_same_boot: bool, last_stored_s: float, expected_s: float
) -> None:
    record = tmp_path / "clock"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 5_000.0)
        patch.setattr(clock, "since_boot_s", lambda: 70.0)
        assert clock.steady_clock(record)() == 5_000.0
        if not is_same_boot:
            record.write_text(f"another {record.read_text().split(maxsplit=1)[1]}")
        patch.setattr(time, "time", lambda: wall_s)
        patch.setattr(clock, "since_boot_s", lambda: 170.0)
        now_s = clock.steady_clock(record, last_stored_s)
        assert now_s() == expected_s
        patch.setattr(clock, "since_boot_s", lambda: 180.0)
        assert now_s() == expected_s + 10.0


@pytest.mark.parametrize("content", [b"", b"one two", b"a b c", b"\xff"])
def test_a_damaged_record_of_the_clock_is_no_hindrance(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "clock").write_bytes(content)
    assert clock.steady_clock(tmp_path / "clock")() == pytest.approx(time.time(), abs=1000)


def test_a_client_that_goes_away_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_stub(tmp_path) as stub:

            async def half():  # type: ignore[no-untyped-def]
                yield (
                    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
                    + b"x" * 200_000
                )
                raise ConnectionError("gone")

            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            with contextlib.suppress(ConnectionError, httpx.HTTPError):
                await stub.http().post("/v1/files", content=half(), headers=headers)
            assert list((tmp_path / "files").iterdir()) == []

    asyncio.run(main())
