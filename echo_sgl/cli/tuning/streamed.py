"""What SGLang streams of an answer of `/generate`, line by line."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Chunk(NamedTuple):
    """How many tokens of the answer there are by now, and why it ends here without the others.

    The stream has begun by the time a request is turned away, so SGLang says so in it, as the end
    of an answer. `status` is the HTTP status that it would have had, 0 where SGLang names none.
    """

    num_tokens: int
    error: str | None = None
    status: int = 0


def read_chunk(line: str) -> Chunk | None:
    """A line of the stream; None for one that tells nothing. Errors: those of `json.loads`."""
    if not line.startswith("data: {"):
        return None
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if (error := chunk.get("error")) is not None:
        if not isinstance(error, dict):
            return Chunk(0, str(error))
        return Chunk(0, str(error.get("message")), int(error.get("code") or 0))
    facts = chunk["meta_info"]
    num_tokens, reason = int(facts["completion_tokens"]), facts.get("finish_reason") or {}
    if reason.get("type") != "abort":
        return Chunk(num_tokens)
    return Chunk(num_tokens, str(reason.get("message")), int(reason.get("status_code") or 0))
