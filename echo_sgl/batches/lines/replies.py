"""What a server's reply means for a line, and the record that is written for it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

_TRANSIENT_CLIENT_ERRORS = (408, 409)
_REFUSALS = (429, 503)
_WAITED = "waiting timeout"  # SGLang's word for what never came out of its queue
# Echo's words for what a server gives back although it had room.
_HANDED_BACK = ("server is shutting down", "weights are being updated")
# How SGLang 0.5.23 and Echo refuse what they would take later; anything else may be for good.
_FOR_NOW = (
    _WAITED,
    "The request queue is full",
    "The offline pool holds",
    "aborted by a higher priority request",
    *_HANDED_BACK,
    "adapter of this request is unloaded",
    "KV cache load failed",
    "Retry later",
)


class Verdict(Enum):
    """What to do with a line after a reply."""

    ANSWERED = auto()  # its answer goes to the output file
    FAILED = auto()  # it would fail again: it goes to the error file
    REFUSED = auto()  # the server is full: ask again for as long as it takes
    BROKEN = auto()  # something went wrong in the server: ask again a few times


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP reply. `body` is parsed JSON, or `{"error": ...}` where it was none."""

    status_code: int
    body: Any
    request_id: str = ""

    @classmethod
    def parse(cls, status_code: int, content: bytes, request_id: str = "") -> Reply:
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            text = content[:1000].decode(errors="replace")
            body = {"error": {"message": text, "type": "invalid_reply"}}
        if status_code >= 400:
            body = _with_error(body)
        elif not request_id and isinstance(body, Mapping):
            request_id = str(body.get("id") or "")
        return cls(status_code, body, request_id)

    @property
    def verdict(self) -> Verdict:
        if self.status_code in _REFUSALS:
            return Verdict.REFUSED
        if self.status_code >= 500 or self.status_code in _TRANSIENT_CLIENT_ERRORS:
            return Verdict.BROKEN
        if self.status_code >= 300:
            return Verdict.FAILED
        is_whole = isinstance(self.body, Mapping) and not self.body.get("error")
        return Verdict.ANSWERED if is_whole and not self._is_aborted() else Verdict.BROKEN

    @property
    def reason(self) -> str:
        """Status and message in one short line, for logs."""
        error = self.body.get("error") if isinstance(self.body, Mapping) else None
        message = error.get("message") if isinstance(error, Mapping) else error
        if self.status_code < 300 and not message:
            message = "the server aborted the request"
        return f"{self.status_code}: {str(message or 'no message')[:200]}"

    @property
    def says_full(self) -> bool:
        """Whether the request was refused for having waited too long: others went before it."""
        return self.verdict is Verdict.REFUSED and _WAITED in self.reason

    @property
    def says_handed_back(self) -> bool:
        """Whether the server gave the request back for a reason that says nothing of its room."""
        return self.verdict is Verdict.REFUSED and any(text in self.reason for text in _HANDED_BACK)

    @property
    def says_for_now(self) -> bool:
        """Whether the request was refused for something that passes, as that the server is full."""
        is_for_now = self.status_code == 429 or any(text in self.reason for text in _FOR_NOW)
        return self.verdict is Verdict.REFUSED and is_for_now

    def _is_aborted(self) -> bool:
        # SGLang answers 200 with what it had when an operator aborts or pauses requests.
        choices = self.body.get("choices")
        return isinstance(choices, list) and any(
            isinstance(choice, Mapping) and choice.get("finish_reason") == "abort"
            for choice in choices
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one reply; `cached_tokens` is None where the server does not report them."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int = 0

    @classmethod
    def of_body(cls, body: Any) -> Usage:
        usage = _mapping(_mapping(body).get("usage"))
        cached = _mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
        details = _mapping(usage.get("completion_tokens_details"))
        return cls(
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
            cached if isinstance(cached, int) else None,
            _count(details.get("reasoning_tokens") or usage.get("reasoning_tokens")),
        )


def output_record(custom_id: str, reply: Reply) -> bytes:
    """One line of an output or error file, in OpenAI's format, without its line end."""
    record = {
        "id": new_request_id(),
        "custom_id": custom_id,
        "response": {
            "status_code": reply.status_code,
            "request_id": reply.request_id,
            "body": reply.body,
        },
        "error": None,
    }
    return orjson.dumps(record)


def unanswered_record(custom_id: str, code: str, message: str) -> bytes:
    """One line of an error file for a request that was never answered by HTTP."""
    record = {
        "id": new_request_id(),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return orjson.dumps(record)


def crashed_record(custom_id: str) -> bytes:
    """One line of an error file for a request that its server never survived."""
    message = (
        "the server died each time that it worked on this request, the last time on no other "
        "request of a batch; it is not sent again by itself"
    )
    return unanswered_record(custom_id, "server_crashed", message)


def new_request_id() -> str:
    """128 random bits that name one request of a batch."""
    return f"batch_req_{uuid.uuid4().hex}"


def _with_error(body: Any) -> Any:
    """OpenAI puts an error under `error`; SGLang sends the same object bare."""
    if isinstance(body, Mapping) and "error" in body:
        return body
    return {"error": body if isinstance(body, Mapping) else {"message": str(body)}}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
