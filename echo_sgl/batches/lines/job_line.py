"""One line of a job file in OpenAI's batch format: read it, or say what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from echo_sgl.config import MAX_POOL_REQUESTS

MAX_CUSTOM_ID_CHARS = 64
MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_MODEL_CHARS = 4096  # a model may be named by its path
MOST_REQUESTS = MAX_POOL_REQUESTS + 1  # no server takes in more; what counts them stays small
MAX_DEPTH = 254  # orjson reads more levels than it writes
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"
URLS = (CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL)
INPUT_FIELDS = {CHAT_URL: "messages", COMPLETIONS_URL: "prompt", EMBEDDINGS_URL: "input"}
CHAT_ANSWER_TOKENS = 256  # taken for granted: SGLang lets it fill the context
COMPLETION_ANSWER_TOKENS = 16  # SGLang's own limit, as OpenAI's
EMBEDDING_ANSWER_TOKENS = 1  # the step that computes it
_MAX_SHOWN_CHARS = 80
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A valid line: where its body goes and under which name the answer comes back."""

    custom_id: str
    url: str
    body: Mapping[str, Any]

    @property
    def model(self) -> str:
        return str(self.body["model"])

    @property
    def num_prompts(self) -> int:
        """A list of texts or of lists is so many prompts, a list of token ids is one."""
        given = self.body.get(INPUT_FIELDS[self.url])
        if self.url == CHAT_URL or not isinstance(given, list) or not given:
            return 1
        return 1 if isinstance(given[0], int | float) else len(given)

    @property
    def num_requests(self) -> int:
        """Requests that the engine makes of it: `n` for each prompt. SGLang reads no `best_of`."""
        num_answers = 1 if self.url == EMBEDDINGS_URL else whole_number(self.body.get("n"))
        return min(self.num_prompts * max(1, num_answers), MOST_REQUESTS)


class LineError(ValueError):
    """A line is not a valid request.

    `code` and `param` are the ones that OpenAI puts in a batch's `errors.data`.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def too_many_answers(line: BatchLine, max_requests: int | None) -> LineError | None:
    """What is wrong with a line of which the server would refuse a part each time.

    `max_requests` is how many may wait in it at a time; None where it does not say.
    """
    if max_requests is None or line.num_requests <= max_requests:
        return None
    num_answers = max(1, whole_number(line.body.get("n")))
    return LineError(
        "too_many_answers",
        f"the line asks for {num_answers:,} answers to each of {line.num_prompts:,} prompts; the "
        f"server takes in {max_requests:,} in all (offline.max_pool_requests). Split it",
        "body.n" if num_answers > 1 else f"body.{INPUT_FIELDS[line.url]}",
    )


def answer_limits(url: str) -> tuple[tuple[str, ...], int]:
    """The fields that bound an answer there, the first one given counts; and its tokens without."""
    if url == COMPLETIONS_URL:
        return ("max_tokens",), COMPLETION_ANSWER_TOKENS
    if url == EMBEDDINGS_URL:
        return (), EMBEDDING_ANSWER_TOKENS
    return ("max_completion_tokens", "max_tokens"), CHAT_ANSWER_TOKENS


def whole_number(value: object) -> int:
    """As SGLang reads it, to which "3" and 3.0 are 3, too; 0 for what is no number."""
    try:
        return int(value) if isinstance(value, int | float | str) else 0
    except (ValueError, OverflowError):
        return 0


def parse_line(raw: bytes) -> BatchLine:
    """Read one line, without its line end.

    Errors: `LineError` names the first thing that is wrong, the given value and what is allowed.
    """
    document = _load(raw)
    custom_id = _custom_id(document)
    if document.get("method") != "POST":
        raise _wrong(document, "method", "invalid_method", "it must be POST")
    url = document.get("url")
    if url not in URLS:
        raise _wrong(document, "url", "invalid_url", f"allowed are {', '.join(URLS)}")
    return BatchLine(custom_id, url, _body(document, url))


def shortened(text: str, max_chars: int = _MAX_SHOWN_CHARS) -> str:
    """What a user wrote, as it may stand in a message."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def is_blank(raw: bytes) -> bool:
    """Whether a line holds nothing, and is skipped."""
    return not raw.strip()


def _load(raw: bytes) -> Mapping[str, Any]:
    if len(raw) > MAX_LINE_BYTES:
        raise LineError("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    if raw.startswith(_GZIP):
        raise LineError("invalid_json_line", "the file is packed with gzip; unpack it")
    if b"\0" in raw:
        raise LineError("invalid_json_line", "the line holds NUL bytes; the file must be UTF-8")
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise LineError("invalid_json_line", f"the line is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise LineError(
            "invalid_json_line", f"the line is {_kind(document)}; it must be a JSON object"
        )
    _check_depth(document)
    return document


def _check_depth(document: Mapping[str, Any]) -> None:
    try:
        orjson.dumps(document)
    except orjson.JSONEncodeError as error:
        raise LineError(
            "invalid_json_line",
            f"the line is nested deeper than {MAX_DEPTH} levels, which cannot be sent; flatten it",
        ) from error


def _custom_id(document: Mapping[str, Any]) -> str:
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _wrong(document, "custom_id", "invalid_custom_id", "it must be a non-empty string")
    if len(custom_id) > MAX_CUSTOM_ID_CHARS:
        raise LineError(
            "invalid_custom_id",
            f"custom_id has {len(custom_id)} characters; at most {MAX_CUSTOM_ID_CHARS} are allowed",
            "custom_id",
        )
    if "\0" in custom_id:
        raise LineError("invalid_custom_id", "custom_id holds a NUL character", "custom_id")
    return custom_id


def _body(document: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    body = document.get("body")
    if not isinstance(body, dict):
        raise _wrong(document, "body", "invalid_body", "it must be a JSON object")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise _wrong(body, "model", "invalid_model", "it must name a model", "body.model")
    if len(model) > MAX_MODEL_CHARS:
        raise LineError(
            "invalid_model",
            f"body.model has {len(model)} characters; at most {MAX_MODEL_CHARS} are allowed",
            "body.model",
        )
    if body.get("stream") not in (None, False):
        raise LineError(
            "invalid_stream",
            f"body.stream is {_shown(body['stream'])}; a batch line cannot stream, leave it out",
            "body.stream",
        )
    wanted = INPUT_FIELDS[url]
    if not isinstance(body.get(wanted), str | list) or (url == CHAT_URL and _is_text(body)):
        raise _wrong(body, wanted, "invalid_body", f"{url} needs it", f"body.{wanted}")
    return body


def _is_text(body: Mapping[str, Any]) -> bool:
    return isinstance(body["messages"], str)


def _wrong(
    values: Mapping[str, Any], key: str, code: str, wanted: str, param: str | None = None
) -> LineError:
    param = param or key
    if key not in values:
        return LineError(code, f"{param} is missing; {wanted}", param)
    return LineError(code, f"{param} is {_shown(values[key])}; {wanted}", param)


def _shown(value: object) -> str:
    return shortened(orjson.dumps(value).decode(errors="replace"))


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
