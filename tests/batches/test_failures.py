"""What the machine does to the store: full disks, lost power, a clock that is set."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from echo_sgl.batches.clock import steady_clock
from echo_sgl.batches.line_engine import AsgiEngine
from echo_sgl.batches.replies import Reply
from echo_sgl.batches.service import BatchService
from echo_sgl.batches.store.blobs import DiskBlobs
from echo_sgl.batches.store.database import StoreError
from echo_sgl.batches.store.job_store import open_store
from echo_sgl.batches.validator import Validator
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


def test_what_was_not_synced_when_the_power_failed_was_never_promised(tmp_path: Path) -> None:
    """The files as a disk would hold them: copied while the server runs, without its WAL index."""

    async def main() -> tuple[str, int]:
        async with running_stub(tmp_path / "state", delay_s=0.005, window_lines=16) as stub:
            batch = await stub.create(job([f"prompt {index}" for index in range(300)]))
            found = await stub.until(
                batch.id,
                lambda batch: (
                    batch.request_counts is not None and batch.request_counts.completed >= 60
                ),
            )
            shutil.copytree(
                tmp_path / "state", tmp_path / "after", ignore=shutil.ignore_patterns("*-shm")
            )
            assert found.request_counts is not None
            return batch.id, found.request_counts.completed

    async def after(batch_id: str, at_least: int) -> None:
        wal = tmp_path / "after" / "jobs.sqlite3-wal"
        with wal.open("ab") as file:
            file.write(os.urandom(5000))  # a torn write that was on its way
        async with running_stub(tmp_path / "after", delay_s=0.005) as stub:
            batch = await stub.client.batches.retrieve(batch_id)
            assert batch.request_counts is not None
            assert batch.request_counts.completed >= at_least
            ended = await stub.ended(batch_id)
            assert len(await stub.records(ended.output_file_id)) == 300

    asyncio.run(after(*asyncio.run(main())))


def test_a_clock_that_is_set_expires_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time

    async def main() -> None:
        async with running_stub(tmp_path, delay_s=0.01, window_lines=4) as stub:
            batch = await stub.create(job(["hello"] * 100), window="1h")
            await stub.until(batch.id, lambda found: found.status == "in_progress")
            for days in (+400, -400):
                with monkeypatch.context() as patch:
                    patch.setattr(time, "time", lambda days=days: real() + days * 86_400)
                    await asyncio.sleep(0.1)
                    assert (await stub.client.batches.retrieve(batch.id)).status in (
                        "in_progress",
                        "finalizing",
                        "completed",
                    )
            assert (await stub.ended(batch.id)).status == "completed"

    asyncio.run(main())


def test_the_clock_never_goes_behind_what_is_stored() -> None:
    future_s = time.time() + 1000
    clock = steady_clock(future_s)
    first = clock()
    assert first >= future_s
    assert clock() >= first


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
