"""Job stores and stub servers on both databases, which every test of the contract runs on."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from echo_sgl.batches import assembly
from echo_sgl.batches.dispatch import validator
from echo_sgl.batches.dispatch.dispatcher import Dispatcher
from echo_sgl.batches.store.job_store import JobStore, open_store
from eval.servers.postgres import MISSING, binaries, running_postgres
from tests.batches.client import Stub, running_stub

OpenStore = Callable[..., JobStore]
Life = Callable[[Stub], Awaitable[None]]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that broke is tried again at once."""
    monkeypatch.setattr(validator, "RETRY_BASE_S", 0.01)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    folder = binaries()
    if folder is None:
        pytest.skip(MISSING)
    with running_postgres(folder) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str | None:
    """None for SQLite in the state directory, else the URL of an empty database."""
    if request.param == "sqlite":
        return None
    server: str = request.getfixturevalue("postgres_server")
    name = f"echo_{uuid.uuid4().hex}"
    engine = create_engine(server.replace("postgresql", "postgresql+psycopg"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f'CREATE DATABASE "{name}"'))
    engine.dispose()
    return f"{server.rpartition('/')[0]}/{name}"


@pytest.fixture
def store_at(tmp_path: Path, database_url: str | None) -> Iterator[OpenStore]:
    """Opens stores on one database; with another name, as another server with its own disk."""
    opened: list[JobStore] = []

    def open_at(name: str = "state") -> JobStore:
        opened.append(open_store(tmp_path / name, database_url))
        return opened[-1]

    yield open_at
    for store in opened:
        store.abandon()


@pytest.fixture
def store(store_at: OpenStore) -> JobStore:
    return store_at()


@pytest.fixture
def live(tmp_path: Path, database_url: str | None) -> Callable[..., None]:
    """Runs a coroutine against a stub server, on both databases."""

    def run(life: Life, **options: Any) -> None:
        async def main() -> None:
            async with running_stub(
                tmp_path / "state", database_url=database_url, **options
            ) as stub:
                await life(stub)

        asyncio.run(main())

    return run


@pytest.fixture
def live_sqlite(tmp_path: Path) -> Callable[..., None]:
    def run(life: Life, **options: Any) -> None:
        async def main() -> None:
            async with running_stub(tmp_path / "state", **options) as stub:
                await life(stub)

        asyncio.run(main())

    return run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Dispatcher]:
    """The dispatchers that are made."""
    found: list[Dispatcher] = []

    def make(*given: Any) -> Dispatcher:
        found.append(Dispatcher(*given))
        return found[-1]

    monkeypatch.setattr(assembly, "Dispatcher", make)
    return found
