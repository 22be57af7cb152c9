"""The job store keeps what it is told, on SQLite and on PostgreSQL."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batches.dispatch.ending import delete_expired_files
from echo_sgl.batches.store import batch_rows, files, work
from echo_sgl.batches.store.blobs import DatabaseBlobs
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.work import Span, choose_start
from tests.batches.conftest import OpenStore
from tests.batches.rows import (
    DAY_S,
    NOW_S,
    add_batch,
    add_file,
    answer,
    batch_of,
    claim,
    content,
    finish,
    num_lines,
)


def test_a_batch_is_worked_through_in_ranges_and_its_files_hold_every_line_once(
    store: JobStore,
) -> None:
    number = add_batch(store, 10)
    first, second, third = (claim(store, number), claim(store, number, 4), claim(store, number, 8))
    assert first == (Span(0, 4), [0, 1, 2, 3])
    assert second == (Span(4, 8), [4, 5, 6, 7])
    assert third == (Span(8, 10), [8, 9])
    assert claim(store, number) is None
    assert answer(store, number, [0, 1, 2, 3], done=Span(0, 4)) == 4
    assert answer(store, number, [8, 9], ok=False, done=Span(8, 10)) == 2
    assert batch_of(store, number).status == "in_progress"
    assert answer(store, number, [4, 5, 6, 7], done=Span(4, 8)) == 4
    assert batch_of(store, number).status == "finalizing"
    batch = finish(store, number)
    assert (batch.status, batch.completed, batch.failed, batch.total) == ("completed", 8, 2, 10)
    assert (batch.input_tokens, batch.cached_tokens, batch.output_tokens) == (100, 50, 20)
    assert content(store, batch.output_file_id) == [f"line-{index}" for index in range(8)]
    assert content(store, batch.error_file_id) == ["line-8", "line-9"]


def test_a_store_in_a_shared_database_leaves_another_ones_files_alone(
    store: JobStore, tmp_path: Path
) -> None:
    """Whoever tries one in the state directory of SQLite goes back to all that was uploaded."""
    folder = tmp_path / "files"
    folder.mkdir()
    kept, draft = folder / f"file-{'a' * 32}", folder / "0123.part"
    for path in (kept, draft):
        path.write_text("a line")
    DatabaseBlobs(folder, store.database).sweep(set())
    assert list(folder.iterdir()) == [kept]


def test_a_result_that_comes_twice_is_kept_and_counted_once(store: JobStore) -> None:
    number = add_batch(store, 3)
    claim(store, number)
    assert answer(store, number, [0, 1], done=None) == 2
    assert answer(store, number, [1, 2], ok=False, done=Span(0, 3)) == 1
    batch = finish(store, number)
    assert (batch.completed, batch.failed) == (2, 1)
    assert content(store, batch.output_file_id) == ["line-0", "line-1"]
    assert content(store, batch.error_file_id) == ["line-2"]


def test_what_a_dead_server_held_is_claimed_again_without_its_finished_lines(
    store_at: OpenStore,
) -> None:
    store = store_at()
    number = add_batch(store, 6)
    claim(store, number)
    answer(store, number, [1, 2], done=None)
    store.abandon()
    again = store_at()
    with again.database.write() as connection:
        work.forget_servers(connection)  # as its lease would end
    assert claim(again, number) == (Span(0, 4), [0, 3])
    assert claim(again, number, 4) == (Span(4, 6), [4, 5])
    assert claim(again, number) is None


def test_a_claim_is_bounded_in_bytes_but_gives_at_least_one_line(store: JobStore) -> None:
    number = add_batch(store, 4)
    assert claim(store, number, max_bytes=250) == (Span(0, 2), [0, 1])
    assert claim(store, number, 2, max_bytes=1) == (Span(2, 3), [2])


def test_servers_that_share_a_batch_work_on_halves_of_it(
    store_at: OpenStore, database_url: str | None
) -> None:
    if database_url is None:
        pytest.skip("a SQLite store belongs to one server")
    one, two = store_at("one"), store_at("two")
    number = add_batch(one, 40)
    assert claim(one, number) == (Span(0, 4), [0, 1, 2, 3])
    assert claim(two, number) == (Span(22, 26), [22, 23, 24, 25])
    assert claim(one, number, 4) == (Span(4, 8), [4, 5, 6, 7])
    assert claim(two, number, 26) == (Span(26, 30), [26, 27, 28, 29])
    assert answer(two, number, [0], done=Span(0, 4)) == 1
    near, claimed = 8, []
    while found := claim(one, number, near):
        near = found[0].end
        claimed += found[1]
    assert sorted(claimed) == [*range(8, 22), *range(30, 40)]


@given(
    borders=st.lists(st.integers(0, 300), min_size=2, max_size=12, unique=True).map(sorted),
    near=st.none() | st.integers(0, 300),
    has_others=st.booleans(),
    max_lines=st.integers(1, 50),
)
def test_the_chosen_start_is_always_in_a_free_range(
    borders: list[int], near: int | None, has_others: bool, max_lines: int
) -> None:
    pairs = zip(borders[::2], borders[1::2], strict=False)
    free = [Span(start, end) for start, end in pairs]
    start = choose_start(free, near=near, has_others=has_others, max_lines=max_lines)
    assert any(span.start <= start < span.end for span in free)
    if near in [span.start for span in free]:
        assert start == near


def test_a_retried_batch_does_its_failed_lines_again_and_keeps_its_answers(
    store: JobStore,
) -> None:
    number = add_batch(store, 5)
    claim(store, number, max_lines=5)
    answer(store, number, [0, 2, 4], done=None)
    answer(store, number, [1, 3], ok=False, done=Span(0, 5))
    ended = finish(store, number)
    with store.database.write() as connection:
        batch_rows.reopen_batch(connection, ended, NOW_S + 50)
    batch = batch_of(store, number)
    assert (batch.status, batch.completed, batch.failed) == ("in_progress", 3, 0)
    assert (batch.output_file_id, batch.error_file_id, batch.completed_at_s) == (None, None, None)
    assert batch.expires_at_s == NOW_S + 50 + DAY_S
    assert claim(store, number) == (Span(1, 4), [1, 3])
    answer(store, number, [1, 3], done=Span(1, 4))
    batch = finish(store, number)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 5, 0)
    assert sorted(content(store, batch.output_file_id)) == [f"line-{index}" for index in range(5)]
    assert batch.error_file_id is None


def test_an_output_file_that_a_retry_took_away_takes_no_answers_with_it(store: JobStore) -> None:
    number = add_batch(store, 4)
    claim(store, number)
    answer(store, number, [0, 2], done=None)
    answer(store, number, [1, 3], ok=False, done=Span(0, 4))
    ended = finish(store, number)
    with store.database.read() as connection:
        output = files.find_file(connection, ended.output_file_id, "one", NOW_S)
    assert output is not None
    with store.database.write() as connection:
        batch_rows.reopen_batch(connection, ended, NOW_S)
    with store.database.write() as connection:
        files.delete_file(connection, output, NOW_S)  # asked for before, and late
        assert not files.delete_records(connection, output)
    claim(store, number)
    answer(store, number, [1, 3], done=Span(1, 4))
    batch = finish(store, number)
    assert sorted(content(store, batch.output_file_id)) == [f"line-{index}" for index in range(4)]


def test_a_large_output_file_is_deleted_in_parts_and_never_seen_without_one(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = add_batch(store, 12)
    claim(store, number, max_lines=12)
    answer(store, number, list(range(9)), done=None)
    answer(store, number, [9, 10, 11], ok=False, done=Span(0, 12))
    ended = finish(store, number)
    output = found_file(store, ended.output_file_id)
    assert output is not None
    monkeypatch.setattr(files, "_DELETE_BYTES", 4 * output.num_bytes // 9)
    with store.database.write() as connection:
        files.delete_file(connection, output, NOW_S)
    at_once = dataclasses.replace(store, clock=lambda: NOW_S)
    assert next(delete_expired_files(at_once)) == output.id  # and then the server dies
    assert num_lines(store, number) == 12 - 4
    assert found_file(store, output.id) is None
    assert list(delete_expired_files(at_once)) == [output.id]
    assert num_lines(store, number) == 3
    assert content(store, ended.error_file_id) == ["line-9", "line-10", "line-11"]
    with store.database.read() as connection:
        assert len(files.expired_files(connection, NOW_S)) == 0


def test_where_a_deleted_file_stood_is_known_for_a_day_and_to_its_tenant_only(
    store: JobStore,
) -> None:
    file = add_file(store)
    with store.database.write() as connection:
        files.delete_file(connection, file, NOW_S)
        assert files.find_number(connection, file.id, "one") == file.number
        assert files.find_number(connection, file.id, "two") is None
        files.forget_gone(connection, NOW_S + DAY_S)
        assert files.find_number(connection, file.id, "one") == file.number
        files.forget_gone(connection, NOW_S + DAY_S + 1)
        assert files.find_number(connection, file.id, "one") is None


def found_file(store: JobStore, file_id: str | None) -> files.FileRow | None:
    assert file_id is not None
    with store.database.read() as connection:
        return files.find_file(connection, file_id, "one", NOW_S)


def test_cancelled_and_paused_batches_give_no_lines(store: JobStore) -> None:
    number = add_batch(store, 5)
    with store.database.write() as connection:
        batch_rows.set_paused(connection, number, NOW_S)
    assert claim(store, number) is None
    with store.database.write() as connection:
        batch_rows.set_paused(connection, number, None)
    assert claim(store, number, max_lines=2) is not None
    with store.database.write() as connection:
        batch_rows.cancel_batch(connection, number, NOW_S)
    assert claim(store, number) is None
    assert batch_of(store, number).status == "cancelling"


def test_a_batch_that_ends_is_finalised_by_one_server_once_nobody_works_on_it(
    store: JobStore,
) -> None:
    number = add_batch(store, 5)
    claimed = claim(store, number)
    assert claimed is not None
    ends, live = ("finalizing", "cancelling"), {store.server_id}
    with store.database.write() as connection:
        batch_rows.cancel_batch(connection, number, NOW_S)
        assert batch_rows.claim_batch(connection, store.server_id, live, ends) is None
        work.release_spans(connection, number, store.server_id, [claimed[0]])
        taken = batch_rows.claim_batch(connection, store.server_id, live, ends)
        assert taken is not None
        assert batch_rows.claim_batch(connection, "other", live, ends) is None
        batch_rows.release_batch(connection, number, store.server_id)
        assert batch_rows.claim_batch(connection, "other", live | {"other"}, ends) is not None


def test_a_window_that_is_over_ends_the_batch(store: JobStore) -> None:
    number = add_batch(store, 2)
    with store.database.write() as connection:
        assert batch_rows.expire_batches(connection, NOW_S + DAY_S - 1) == 0
        assert batch_rows.expire_batches(connection, NOW_S + DAY_S) == 1
    assert finish(store, number).status == "expired"


def test_blobs_are_read_whole_and_in_parts_and_only_after_they_are_kept(store: JobStore) -> None:
    data = bytes(range(256)) * 9000  # two chunks and a bit
    file = add_file(store, data)
    assert b"".join(store.blobs.stream(file.id)) == data
    spans = [(0, 5), (2**20 - 3, 7), (7, 0), (len(data) - 4, 4), (0, len(data))]
    spans += [(start, 3) for start in range(99, len(data) - 3, 20_000)]
    parts = store.blobs.read(file.id, spans)
    assert parts == [data[offset : offset + length] for offset, length in spans]
    with store.blobs.local_path(file.id) as path:
        assert path.read_bytes() == data
    store.blobs.delete(file.id)
    store.blobs.delete(file.id)


def test_an_upload_cut_short_leaves_nothing(store_at: OpenStore, tmp_path: Path) -> None:
    store = store_at()
    kept = add_file(store, b"kept")
    draft = store.new_draft()
    draft.write(b"x" * 10_000)
    failed = store.new_draft()

    def refuse(_: object) -> None:
        raise RuntimeError("as if the database were full")

    with pytest.raises(RuntimeError):
        store.blobs.keep(failed, files.new_file_id(), refuse)
    store.abandon()
    again = store_at()
    assert b"".join(again.blobs.stream(kept.id)) == b"kept"
    left = {path.name for path in (tmp_path / "state" / "files").iterdir()}
    assert left <= {kept.id}


def test_files_belong_to_their_tenant_and_expire(store: JobStore) -> None:
    file = add_file(store)
    with store.database.read() as connection:
        assert files.find_file(connection, file.id, "one", NOW_S) is not None
        assert files.find_file(connection, file.id, "two", NOW_S) is None
        assert files.find_file(connection, file.id, "one", NOW_S + DAY_S) is None
        assert files.expired_files(connection, NOW_S + DAY_S) == [file]
        assert files.count_files(connection, "one") == (1, 3)
