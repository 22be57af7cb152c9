"""Files, batches, lines, ranges, servers and blob chunks"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _create_batches()
    _create_files()
    _create_lines()


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=128), nullable=False),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("input_file_id", sa.String(length=64), nullable=False),
        sa.Column("completion_window_s", sa.BigInteger(), nullable=False),
        sa.Column("output_expires_s", sa.BigInteger(), nullable=True),
        sa.Column("request_metadata", sa.JSON(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("ends_as", sa.String(length=16), nullable=True),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("errors", sa.JSON(), nullable=True),
        sa.Column("total", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("completed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("failed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("error_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output_file_id", sa.String(length=64), nullable=True),
        sa.Column("error_file_id", sa.String(length=64), nullable=True),
        sa.Column("created_at_s", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at_s", sa.Float(precision=53), nullable=False),
        sa.Column("paused_at_s", sa.Float(precision=53), nullable=True),
        sa.Column("in_progress_at_s", sa.Float(precision=53), nullable=True),
        sa.Column("finalizing_at_s", sa.Float(precision=53), nullable=True),
        sa.Column("completed_at_s", sa.Float(precision=53), nullable=True),
        sa.Column("failed_at_s", sa.Float(precision=53), nullable=True),
        sa.Column("expired_at_s", sa.Float(precision=53), nullable=True),
        sa.Column("cancelling_at_s", sa.Float(precision=53), nullable=True),
        sa.Column("cancelled_at_s", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
    )
    op.create_index("batches_by_status", "batches", ["status"], unique=False)
    op.create_index("batches_by_tenant", "batches", ["tenant", "number"], unique=False)


def _create_files() -> None:
    op.create_table(
        "blob_chunks",
        sa.Column("blob_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("blob_id", "number"),
    )
    op.create_table(
        "files",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=128), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_lines", sa.BigInteger(), nullable=False),
        sa.Column("created_at_s", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at_s", sa.Float(precision=53), nullable=True),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column(
            "batch_number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
    )
    op.create_index("files_by_tenant", "files", ["tenant", "number"], unique=False)


def _create_lines() -> None:
    op.create_table(
        "servers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("lease_until_s", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "lines",
        sa.Column(
            "batch_number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("line_number", sa.Integer(), nullable=False),
        sa.Column("custom_id", sa.String(length=64), nullable=False),
        sa.Column("offset_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.SmallInteger(), nullable=True),
        sa.Column("record", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["batch_number"],
            ["batches.number"],
        ),
        sa.PrimaryKeyConstraint("batch_number", "position"),
    )
    op.create_table(
        "ranges",
        sa.Column(
            "batch_number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("start", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("end", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(
            ["batch_number"],
            ["batches.number"],
        ),
        sa.PrimaryKeyConstraint("batch_number", "start"),
    )
