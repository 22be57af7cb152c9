"""The tables of the job store. Alembic's migrations make them; a test holds both together.

Units: `*_s` are Unix seconds or seconds, `*_bytes` bytes. A `number` is internal; clients see ids.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
)

# SQLite counts rows only in a column whose type is exactly INTEGER.
Number = BigInteger().with_variant(Integer, "sqlite")

COMPLETED = 1
FAILED = 2

metadata = MetaData()

# `source` says where the content is: "blob" (what was uploaded), or the records of the batch's
# lines that were answered ("completed") or not ("failed"). `num_lines` are line ends.
files = Table(
    "files",
    metadata,
    Column("number", Number, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("tenant", String(128), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", String(255), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("num_lines", BigInteger, nullable=False),
    Column("created_at_s", Float(53), nullable=False),
    Column("expires_at_s", Float(53)),
    Column("source", String(16), nullable=False),
    Column("batch_number", Number),
    Index("files_by_tenant", "tenant", "number"),
)

# Where files stood that were deleted lately: whoever pages through them may go on after one.
gone_files = Table(
    "gone_files",
    metadata,
    Column("id", String(64), nullable=False),
    Column("tenant", String(128), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("gone_at_s", Float(53), nullable=False),
    Index("gone_files_by_id", "id"),
)

# `owner` is the server that validates or finalises the batch; `ends_as` what it becomes then.
# `model` is the one that all lines name, if it is one, and `models` what servers must have, under
# their full names; none before the file was checked, nor where an echo-sgl did that before 0006.
batches = Table(
    "batches",
    metadata,
    Column("number", Number, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("tenant", String(128), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("completion_window_s", BigInteger, nullable=False),
    Column("output_expires_s", BigInteger),
    Column("request_metadata", JSON),
    Column("status", String(16), nullable=False),
    Column("ends_as", String(16)),
    Column("owner", String(64)),
    Column("model", Text),
    Column("models", JSON),
    Column("errors", JSON),
    Column("total", BigInteger, nullable=False, server_default="0"),
    Column("completed", BigInteger, nullable=False, server_default="0"),
    Column("failed", BigInteger, nullable=False, server_default="0"),
    Column("input_tokens", BigInteger, nullable=False, server_default="0"),
    Column("cached_tokens", BigInteger, nullable=False, server_default="0"),
    Column("output_tokens", BigInteger, nullable=False, server_default="0"),
    Column("reasoning_tokens", BigInteger, nullable=False, server_default="0"),
    Column("output_bytes", BigInteger, nullable=False, server_default="0"),
    Column("error_bytes", BigInteger, nullable=False, server_default="0"),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("created_at_s", Float(53), nullable=False),
    Column("expires_at_s", Float(53), nullable=False),
    Column("paused_at_s", Float(53)),
    Column("in_progress_at_s", Float(53)),
    Column("finalizing_at_s", Float(53)),
    Column("completed_at_s", Float(53)),
    Column("failed_at_s", Float(53)),
    Column("expired_at_s", Float(53)),
    Column("cancelling_at_s", Float(53)),
    Column("cancelled_at_s", Float(53)),
    Index("batches_by_tenant", "tenant", "number"),
    Index("batches_by_status", "status"),
)

# One row per line, by its place in prefix order. `offset_bytes` and `num_bytes` say where the
# request stands in the input file; `outcome` and `record` are written together, once. `crashes`
# counts servers that died while they held the line; the last one only if it was sent alone.
lines = Table(
    "lines",
    metadata,
    Column("batch_number", Number, ForeignKey("batches.number"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("line_number", Integer, nullable=False),
    Column("custom_id", String(64), nullable=False),
    Column("offset_bytes", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("outcome", SmallInteger),
    Column("record", LargeBinary),
    Column("crashes", SmallInteger, nullable=False, server_default="0"),
)

# The positions of a batch that are not finished, as ranges; `owner` is the server that works on
# one. A claim moves a border instead of writing every line once more.
ranges = Table(
    "ranges",
    metadata,
    Column("batch_number", Number, ForeignKey("batches.number"), primary_key=True),
    Column("start", Integer, primary_key=True, autoincrement=False),
    Column("end", Integer, nullable=False),
    Column("owner", String(64)),
)

# Servers that are alive; what a server owns is anybody's once its lease has run out. `models` are
# the names that it serves, as it said at `models_said_at_s`.
servers = Table(
    "servers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("lease_until_s", Float(53), nullable=False),
    Column("models", JSON),
    Column("models_said_at_s", Float(53)),
)

# Uploaded content where servers share a database but no disk.
blob_chunks = Table(
    "blob_chunks",
    metadata,
    Column("blob_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
)
