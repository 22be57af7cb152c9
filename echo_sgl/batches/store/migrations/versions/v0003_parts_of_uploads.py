"""A part of an upload is read without the rest of its megabyte"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # What PostgreSQL compresses it has to read whole.
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE blob_chunks ALTER COLUMN content SET STORAGE EXTERNAL")
