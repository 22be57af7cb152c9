"""Where deleted files stood, for lists that go on after one"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "gone_files",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=128), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("gone_at_s", sa.Float(precision=53), nullable=False),
    )
    op.create_index("gone_files_by_id", "gone_files", ["id"], unique=False)
