"""The objects of the API as its OpenAPI document describes them.

They describe and are not applied: `objects.py` makes the answers, and a test holds both together.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class ErrorBody(BaseModel):
    """What went wrong; `param` names the parameter where one did."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's envelope of every answer that is not 200."""

    error: ErrorBody


class File(BaseModel):
    """An uploaded file, or the output of a batch."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(BaseModel):
    """One page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class LineError(BaseModel):
    """What is wrong with the input file, with the line where it stands."""

    code: str
    message: str
    param: str | None
    line: int | None


class LineErrors(BaseModel):
    """Why validation failed."""

    object: Literal["list"]
    data: list[LineError]


class RequestCounts(BaseModel):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class InputDetails(BaseModel):
    """`cached_tokens` is what sharing prefixes saved."""

    cached_tokens: int


class OutputDetails(BaseModel):
    """Part of the output tokens."""

    reasoning_tokens: int


class BatchUsage(BaseModel):
    """Tokens of all answered lines."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Batch(BaseModel):
    """A batch; all `*_at` are Unix seconds, `paused_at` is an extension."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    paused_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """One page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


_ERRORS = {
    400: "The request is wrong; `param` says where.",
    401: "The API key is missing or wrong.",
    404: "There is no such file or batch, or it is another key's.",
    408: "The body came no further.",
    409: "Its state does not allow that.",
    413: "The body is too large.",
    429: "A bound of this key is reached; `Retry-After` may say when to come back.",
    500: "An error of the server.",
    503: "The job store cannot be used now.",
}


def answers(model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: 200 with `model`, and the errors that it can answer beside 401."""
    found: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    for status in sorted({400, 401, *statuses, 500, 503}):
        found[status] = {"model": Error, "description": _ERRORS[status]}
    # FastAPI would add its own 422 to a route without this, which no route answers.
    return found | {"4XX": {"model": Error, "description": "Any other refusal."}}
