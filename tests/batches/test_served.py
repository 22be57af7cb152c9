"""Which of several servers, or of one server's starts, works on a batch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from echo_sgl.batches.lines import EMBEDDINGS_URL, URLS
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.validator import Validator
from eval import stub_server
from tests.batches.client import Stub, job
from tests.batches.test_validation import add_batch

Live = Callable[..., None]


def test_a_batch_of_another_model_waits_for_a_server_that_has_it(
    live_sqlite: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang would answer its lines with the model that it has."""

    async def first_life(stub: Stub) -> None:
        stub.model.opened.clear()
        batch = await stub.create(job(["hello"] * 20))
        await stub.until(batch.id, lambda found: found.status == "in_progress")

    async def another_model(stub: Stub) -> None:
        own = await stub.create(job(["hello"]).replace(b'"stub"', b'"another"'))
        assert (await stub.ended(own.id)).status == "completed"
        [waiting, _] = [one async for one in stub.client.batches.list()][::-1]
        assert (waiting.status, waiting.request_counts.completed) == ("in_progress", 0)

    async def first_again(stub: Stub) -> None:
        batches = [one async for one in stub.client.batches.list()]
        assert (await stub.ended(batches[-1].id)).status == "completed"

    live_sqlite(first_life)
    with monkeypatch.context() as patch:
        patch.setattr(stub_server, "MODEL", "another")
        live_sqlite(another_model)
    live_sqlite(first_again)
    said = "is for /v1/completions of stub and waits for a server that has it; this one has"
    assert sum(said in message for message in caplog.messages) == 1


def test_files_for_an_endpoint_of_other_servers_are_left_to_them(store: JobStore) -> None:
    add_batch(store, "early")
    engine: Any = SimpleNamespace(endpoints=(EMBEDDINGS_URL,))
    checks = Validator(store, engine, ThreadPoolExecutor(1), max_lines=9, on_checked=lambda: None)
    assert checks._claim() is None
    engine.endpoints = URLS
    assert checks._claim() is not None
    checks.close()
