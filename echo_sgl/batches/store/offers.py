"""Which models the servers of a database have, as each says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select, update

from echo_sgl.batches.store.schema import servers


@dataclass(frozen=True, slots=True)
class Offer:
    """What a live server said that it has, and when (Unix seconds; 0 if never)."""

    server: str
    models: Sequence[str]
    said_at_s: float


def say_models(
    connection: Connection, server: str, models: Iterable[str], said_at_s: float
) -> None:
    """Let the others know what a server, whose lease runs, had at that time."""
    connection.execute(
        update(servers)
        .where(servers.c.id == server)
        .values(models=list(models), models_said_at_s=said_at_s)
    )


def live_offers(connection: Connection, now_s: float) -> list[Offer]:
    """One of each server whose lease runs."""
    query = select(servers).where(servers.c.lease_until_s > now_s).order_by(servers.c.id)
    return [
        Offer(row.id, row.models or [], row.models_said_at_s or 0.0)
        for row in connection.execute(query)
    ]
