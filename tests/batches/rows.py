"""Files, batches and lines put into a job store, and taken through its steps."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from sqlalchemy import Connection, func, select

from echo_sgl.batches.lines.replies import Usage
from echo_sgl.batches.store import batch_rows, files, work
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.schema import lines
from echo_sgl.batches.store.work import Result, Span

NOW_S = 1_000_000.0
DAY_S = 86_400.0


def add_file(store: JobStore, content: bytes = b"{}\n", tenant: str = "one") -> files.FileRow:
    file_id = files.new_file_id()
    draft = store.new_draft()
    draft.write(content)
    found: list[files.FileRow] = []
    store.blobs.keep(
        draft,
        file_id,
        lambda connection: found.append(
            files.insert_file(
                connection,
                id=file_id,
                tenant=tenant,
                purpose="batch",
                filename="jobs.jsonl",
                num_bytes=draft.num_bytes,
                num_lines=draft.num_lines,
                created_at_s=NOW_S,
                expires_at_s=NOW_S + DAY_S,
                source="blob",
            )
        ),
    )
    return found[0]


def add_batch(store: JobStore, num_lines: int, tenant: str = "one") -> int:
    """A batch in progress with lines named after their position; returns its number."""
    file = add_file(store, tenant=tenant)
    with store.database.write() as connection:
        batch = batch_rows.insert_batch(
            connection,
            tenant=tenant,
            endpoint="/v1/completions",
            input_file_id=file.id,
            completion_window_s=DAY_S,
            created_at_s=NOW_S,
            expires_at_s=NOW_S + DAY_S,
        )
        work.insert_lines(connection, batch.number, [line(index) for index in range(num_lines)])
        start(connection, batch.number, num_lines, "tiny")
    return int(batch.number)


def start(connection: Connection, number: int, num_lines: int, *models: str) -> None:
    """After the check of its file, whose lines name these models."""
    batch_rows.start_batch(
        connection,
        number,
        total=num_lines,
        model=models[0] if len(models) == 1 else None,
        models=models,
        now_s=NOW_S,
    )


def line(position: int) -> dict[str, object]:
    return {
        "position": position,
        "line_number": position + 1,
        "custom_id": f"line-{position}",
        "offset_bytes": 100 * position,
        "num_bytes": 100,
        "tokens": 10,
    }


def claim(
    store: JobStore,
    number: int,
    near: int | None = None,
    max_lines: int = 4,
    max_bytes: int = 10**6,
) -> tuple[Span, list[int]] | None:
    with store.database.write() as connection:
        work.renew_lease(connection, store.server_id, NOW_S + 30)
        live = work.live_servers(connection, NOW_S)
        claimed = work.claim_lines(
            connection,
            number,
            store.server_id,
            live,
            near=near,
            max_lines=max_lines,
            max_bytes=max_bytes,
            now_s=NOW_S,
        )
    return claimed and (claimed[0], [item.position for item in claimed[1]])


def answer(
    store: JobStore, number: int, positions: Sequence[int], *, ok: bool = True, done: Span | None
) -> int:
    results = [
        Result(
            position,
            ok,
            orjson.dumps({"custom_id": f"line-{position}"}),
            Usage(prompt_tokens=10, generated_tokens=2, cached_tokens=5),
        )
        for position in positions
    ]
    with store.database.write() as connection:
        return work.record_results(
            connection,
            number,
            store.server_id,
            results,
            done=[done] if done else [],
            now_s=NOW_S + 5,
        )


def batch_of(store: JobStore, number: int) -> batch_rows.BatchRow:
    with store.database.write() as connection:
        return batch_rows.lock_batch(connection, number)


def crashes(store: JobStore, number: int) -> list[int]:
    query = select(lines.c.crashes).where(lines.c.batch_number == number)
    with store.database.read() as connection:
        return list(connection.execute(query.order_by(lines.c.position)).scalars())


def num_lines(store: JobStore, number: int) -> int:
    query = select(func.count()).where(lines.c.batch_number == number)
    with store.database.read() as connection:
        return int(connection.execute(query).scalar_one())


def finish(store: JobStore, number: int) -> batch_rows.BatchRow:
    with store.database.write() as connection:
        return batch_rows.finish_batch(connection, number, NOW_S + 9, output_days=30)


def content(store: JobStore, file_id: str | None, tenant: str = "one") -> list[str]:
    assert file_id is not None
    with store.database.read() as connection:
        file = files.find_file(connection, file_id, tenant, NOW_S)
    assert file is not None
    data = b"".join(files.record_slices(store.database, file))
    assert len(data) == file.num_bytes
    return [orjson.loads(item)["custom_id"] for item in data.splitlines()]
