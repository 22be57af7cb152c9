"""Open the database of the job store: SQLite in the state directory, or PostgreSQL by URL.

It is checked before anything is written to it: a damaged file, a database of something else or
one of a newer echo-sgl is left exactly as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from echo_sgl.batches.clock import SharedClock
from echo_sgl.errors import EchoError

DATABASE_NAME = "jobs.sqlite3"
# Any constant will do, as long as all servers of a fleet use the same.
_MIGRATION_LOCK = 0x6563686F
_BUSY_TIMEOUT_MS = 30_000
_MAX_IDLE_JOURNAL_BYTES = 64_000_000


class StoreError(EchoError, RuntimeError):
    """The job store cannot be opened; the message says why and what to do."""


class Database:
    """Transactions on the job store. Safe to use from several threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_shared = engine.dialect.name != "sqlite"

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction; on SQLite it holds the only write lock from its first statement."""
        with self._engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view, which waits for no writer."""
        with self._engine.connect().execution_options(is_read=True) as connection:
            yield connection

    def shared_clock(self) -> SharedClock:
        """The clock of PostgreSQL, which transactions read again when it is time to."""
        clock = SharedClock()
        event.listen(self._engine, "begin", lambda begun: clock.keep(partial(_read_clock, begun)))
        return clock

    def close(self) -> None:
        self._engine.dispose()


def open_database(state_dir: Path, url: str | None = None) -> Database:
    """Open, check and migrate to the newest schema.

    Errors: `StoreError` when it cannot be reached, is damaged, or is of a newer version.
    """
    engine = _postgresql(url) if url else _sqlite(state_dir / DATABASE_NAME)
    shown = engine.url.render_as_string(hide_password=True)
    try:
        _check_and_migrate(engine, shown)
    except DBAPIError as error:
        engine.dispose()
        raise StoreError(_explain(error, shown)) from error
    except BaseException:
        engine.dispose()
        raise
    return Database(engine)


def migration_config() -> Config:
    """Alembic's config for the migrations that ship in the package."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def _sqlite(path: Path) -> Engine:
    engine = create_engine(URL.create("sqlite", database=str(path)))
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _postgresql(name: str) -> Engine:
    """Errors: `StoreError`, which does not show the URL: it holds a password."""
    try:
        url = make_url(name)
        if url.get_backend_name() != "postgresql":
            raise ArgumentError(f"{url.get_backend_name()} is not supported")
        return create_engine(url.set(drivername="postgresql+psycopg"), pool_pre_ping=True)
    except (ArgumentError, ModuleNotFoundError, ValueError) as error:
        raise StoreError(
            "--echo-database-url is not a URL of PostgreSQL; write it as "
            f"postgresql://USER:PASSWORD@HOST:PORT/DATABASE ({type(error).__name__}). Leave it out "
            "for SQLite in --echo-state-dir"
        ) from error


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin in `_begin_sqlite`, not by themselves
    # Debian's SQLite would write zeros over all that is deleted, which takes as much disk again.
    for pragma in (
        f"busy_timeout = {_BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        "secure_delete = OFF",
        f"journal_size_limit = {_MAX_IDLE_JOURNAL_BYTES}",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A reader that later writes could not wait for its turn: writers ask for it at once.
    is_read = connection.get_execution_options().get("is_read", False)
    connection.exec_driver_sql("BEGIN" if is_read else "BEGIN IMMEDIATE")


def _read_clock(connection: Connection) -> float:
    query = "SELECT extract(epoch FROM clock_timestamp())::float8"
    return float(connection.exec_driver_sql(query).scalar_one())


def _check_and_migrate(engine: Engine, shown: str) -> None:
    if engine.dialect.name == "sqlite":
        _check_sqlite(engine, shown)
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
        config = migration_config()
        if _needs_migration(connection, ScriptDirectory.from_config(config), shown):
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _check_sqlite(engine: Engine, shown: str) -> None:
    with engine.connect().execution_options(is_read=True) as connection:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise StoreError(_damaged(shown, str(found)))


def _needs_migration(connection: Connection, scripts: ScriptDirectory, shown: str) -> bool:
    current = MigrationContext.configure(connection).get_current_revision()
    if current is None:
        if tables := set(inspect(connection).get_table_names()):
            raise StoreError(
                f"{shown} holds tables that are not echo-sgl's ({', '.join(sorted(tables)[:5])}); "
                "nothing was changed. Name an empty database or another --echo-state-dir"
            )
        return True
    try:
        scripts.get_revision(current)
    except CommandError as error:
        raise StoreError(
            f"{shown} has schema version {current}, this echo-sgl knows up to "
            f"{scripts.get_current_head()}; nothing was changed. Start a newer echo-sgl, or name "
            "another --echo-state-dir"
        ) from error
    return current != scripts.get_current_head()


def _explain(error: DBAPIError, shown: str) -> str:
    reason = str(error.orig).strip()
    damage = ("malformed", "not a database", "disk image", "disk I/O error")
    if any(sign in reason for sign in damage):
        return _damaged(shown, reason)
    return f"{shown} cannot be used: {reason}"


def _damaged(shown: str, reason: str) -> str:
    why = " ".join(reason.split())
    return (
        f"{shown} is damaged ({why}); nothing was changed. Put a backup in its place, or move the "
        "state directory away to start with an empty one"
    )
