"""How often a server died with a line"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column(
        "lines", sa.Column("crashes", sa.SmallInteger(), server_default="0", nullable=False)
    )
