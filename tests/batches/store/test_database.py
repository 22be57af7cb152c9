"""The database is checked before it is used, and never written over."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import update

from echo_sgl.batches.store import work
from echo_sgl.batches.store.database import DATABASE_NAME, StoreError, open_database
from echo_sgl.batches.store.job_store import JobStore, open_store
from echo_sgl.batches.store.schema import COMPLETED, lines, metadata
from tests.batches.conftest import OpenStore
from tests.batches.rows import add_batch


def test_the_migrations_make_the_schema_that_the_code_has(store: JobStore) -> None:
    with store.database.write() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_what_is_deleted_is_not_written_over_first(tmp_path: Path) -> None:
    """A full disk has no room for that, and others would wait meanwhile."""
    store = open_store(tmp_path)
    number = add_batch(store, 40)
    with store.database.write() as connection:
        connection.execute(update(lines).values(outcome=COMPLETED, record=b"x" * 100_000))
    with store.database.read() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    with store.database.write() as connection:
        work.delete_lines(connection, number)
    assert (tmp_path / f"{DATABASE_NAME}-wal").stat().st_size < 400_000
    store.close()


def test_a_journal_that_grew_does_not_stay_that_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_sgl.batches.store.database._MAX_IDLE_JOURNAL_BYTES", 500_000)
    store = open_store(tmp_path)
    number = add_batch(store, 40)
    with store.database.write() as connection:
        connection.execute(update(lines).values(outcome=COMPLETED, record=b"x" * 100_000))
    journal = tmp_path / f"{DATABASE_NAME}-wal"
    assert journal.stat().st_size > 4_000_000
    with store.database.write() as connection:
        work.delete_lines(connection, number)
    assert journal.stat().st_size <= 500_000
    store.close()


def test_a_newer_schema_is_refused_and_left_alone(store_at: OpenStore) -> None:
    store = store_at()
    with store.database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    store.abandon()
    with pytest.raises(StoreError, match=r"schema version 9999.*nothing was changed"):
        store_at()


def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_NAME
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE songs (name TEXT)")
    other.commit()
    other.close()
    with pytest.raises(StoreError, match=r"tables that are not echo-sgl's \(songs\)"):
        open_database(tmp_path)


@pytest.mark.parametrize("damage", ["page", "header", "not a database", "cut"])
def test_a_damaged_database_is_refused_and_left_alone(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path)
    add_batch(store, 3000)
    store.close()
    path = tmp_path / DATABASE_NAME
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(path.read_bytes())
    if damage == "page":
        data[8 * 4096 : 12 * 4096] = b"\xaa" * 4096 * 4
    elif damage == "header":
        data[:16] = b"\0" * 16
    elif damage == "not a database":
        data = bytearray(b"hello world" * 5000)
    else:
        del data[len(data) // 2 :]
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"damaged.*nothing was changed"):
        open_store(tmp_path)
    assert path.read_bytes() == data


def test_a_state_directory_belongs_to_one_server(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match="another server uses"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/db", "not a URL of PostgreSQL"),
        ("nonsense", "not a URL of PostgreSQL"),
        ("postgresql://user:secret@127.0.0.1:1/db", "cannot be used"),
        ("postgresql://user:secret@127.0.0.1:x/db", "not a URL of PostgreSQL"),
        ("sqlite:///q.db", "not a URL of PostgreSQL; write it as postgresql://"),
    ],
)
def test_a_database_url_that_does_not_work_is_explained_without_its_password(
    tmp_path: Path, url: str, message: str
) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        open_store(tmp_path, url)
    assert "secret" not in str(caught.value)


def test_a_state_directory_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        open_store(tmp_path / "file" / "state")
