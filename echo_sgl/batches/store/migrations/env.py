"""Runs migrations on the connection that `database.open_database` hands over."""

from __future__ import annotations

from alembic import context

from echo_sgl.batches.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
