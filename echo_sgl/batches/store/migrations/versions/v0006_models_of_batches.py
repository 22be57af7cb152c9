"""A batch of several models is done by servers that have them all"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("batches", sa.Column("models", sa.JSON(), nullable=True))
