"""Answers count as stored too: whose files and answers are at the bound gets no more of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from echo_sgl.batches.dispatch import dispatcher
from echo_sgl.batches.http import limits
from echo_sgl.batches.http.limits import SUM_INTERVAL_S, FullTenants
from echo_sgl.batches.http.tenants import Tenants
from echo_sgl.batches.store import batch_rows, files
from echo_sgl.batches.store.job_store import JobStore
from tests.batches.client import Stub, job, until
from tests.batches.faults import async_
from tests.batches.rows import add_batch, add_file, answer, claim, finish

ANNS_KEY = "a-key-of-enough-letters"


def test_a_key_at_its_bound_waits_until_it_deletes_files_and_others_go_on(
    live: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "SUM_INTERVAL_S", 0.0)
    monkeypatch.setattr(dispatcher, "LOOK_INTERVAL_S", 0.02)
    spare, content = b"x" * 200_000, job(["hello"] * 200)

    async def life(stub: Stub) -> None:
        stub.client = stub.client_with("operator")
        ann = Stub(stub.app, stub.model)
        ann.client = ann.client_with(ANNS_KEY)
        spare_id = await ann.upload(spare)
        batch = await ann.create(content)
        await until(async_(lambda: "max_stored_bytes" in caplog.text))
        other = await stub.ended((await stub.create(content)).id)
        assert other.status == "completed"
        waits = await ann.client.batches.retrieve(batch.id)
        assert waits.status == "in_progress"
        assert waits.request_counts is not None
        assert 0 < waits.request_counts.completed < 100  # it had a head start
        await ann.client.files.delete(spare_id)
        assert len(await ann.records((await ann.ended(batch.id)).output_file_id)) == 200

    key = hashlib.sha256(ANNS_KEY.encode()).hexdigest()
    live(
        life,
        tenants=Tenants("operator", {key: "ann"}),
        delay_s=0.05,
        window_lines=4,
        max_stored_bytes=len(spare) + len(content) + 5_000,
    )
    assert caplog.text.count("batches of the key 'ann' wait") == 1


def test_what_was_answered_is_seen_at_each_look_and_files_are_summed_up_seldom(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[set[str]] = []
    sum_up = files.stored_bytes

    def note(connection: Any, tenants: set[str]) -> dict[str, int]:
        sums.append(tenants)
        return sum_up(connection, tenants)

    monkeypatch.setattr(files, "stored_bytes", note)
    number = add_batch(store, 4)
    claimed = claim(store, number)
    assert claimed is not None
    full = FullTenants(70)

    def look(now_s: float) -> set[str]:
        with store.database.read() as connection:
            return full.look(connection, batch_rows.open_batches(connection), now_s)

    assert look(0.0) == set()
    answer(store, number, [0, 1, 2], done=None)  # 69 bytes, beside the 3 of the input file
    assert look(1.0) == {"one"}
    assert sums == [{"one"}]
    add_batch(store, 1, tenant="two")
    assert look(2.0) == {"one"}
    add_file(store, b"x" * 100, tenant="two")
    assert look(3.0) == {"one"}
    assert look(2.0 + SUM_INTERVAL_S) == {"one", "two"}
    answer(store, number, [3], done=claimed[0])
    finish(store, number)
    assert look(2.0 + SUM_INTERVAL_S) == {"two"}  # no batch of the first is left to wait
    assert len(sums) == 4
