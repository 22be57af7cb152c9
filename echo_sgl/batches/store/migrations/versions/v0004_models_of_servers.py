"""A batch for another server's model is left to it"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("servers", sa.Column("models", sa.JSON(), nullable=True))
    op.add_column("servers", sa.Column("models_said_at_s", sa.Float(precision=53), nullable=True))
