"""Results that are deleted while the server runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from echo_sgl.batches.dispatch import deleter
from echo_sgl.batches.store import files
from tests.batches.client import Stub, job, until
from tests.batches.faults import async_


def test_deleted_results_go_now_and_in_parts_in_no_thread_that_answers_calls(
    live: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_records, threads = files.delete_records, list[str]()

    def note(*given: Any) -> bool:
        threads.append(threading.current_thread().name)
        return delete_records(*given)

    monkeypatch.setattr(files, "delete_records", note)
    monkeypatch.setattr(files, "_DELETE_BYTES", 1)
    monkeypatch.setattr(deleter, "DELETE_PAUSE_S", 0.0)
    monkeypatch.setattr(deleter, "FILES_INTERVAL_S", 1e6)

    async def life(stub: Stub) -> None:
        batch = await stub.ended((await stub.create(job(["hello"] * 5))).id)
        assert (await stub.client.files.delete(str(batch.output_file_id))).deleted
        await until(async_(lambda: len(threads) == 6))  # the last one finds none

    live(life)
    assert all(name.startswith("echo-batches") for name in threads)
