"""Rows as the objects that OpenAI's clients know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.files import FileRow

HOUR_S = 3600
_TIMES = (
    "in_progress",
    "expires",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)


def file_object(file: FileRow) -> dict[str, Any]:
    """OpenAI's `file`."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at_s),
        "expires_at": _seconds(file.expires_at_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: BatchRow) -> dict[str, Any]:
    """OpenAI's `batch`; `paused_at` is ours."""
    times = {f"{name}_at": _seconds(getattr(batch, f"{name}_at_s")) for name in _TIMES}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": f"{batch.completion_window_s // HOUR_S}h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at_s),
        **times,
        "paused_at": _seconds(batch.paused_at_s),
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.request_metadata,
    }


def page_object(objects: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """One page of a list."""
    return {
        "object": "list",
        "data": list(objects),
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }


def _seconds(value: float | None) -> int | None:
    return None if value is None else int(value)
