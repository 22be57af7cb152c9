"""Job files as offline work: prompts as hashed blocks, so that shared prefixes stay shared."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echo_sgl.batches.lines.job_line import EMBEDDINGS_URL, URLS, answer_limits
from echo_sgl.sim.text_files import open_text_file
from echo_sgl.sim.trace_columns import MAX_TOKENS, TraceFileError
from echo_sgl.sim.workload import BLOCK_TOKENS, Trace
from echo_sgl.types import Task

CHARS_PER_TOKEN = 4
MAX_JOB_LINES = 1_000_000
MAX_ANSWERS = 1000


def read_job_lines(path: Path, *, output_tokens: int = 0, at_s: float = 0.0) -> Trace:
    """The lines of an OpenAI batch file (may be gzip'd), all there at `at_s`.

    A text is taken to have `CHARS_PER_TOKEN` characters a token, token ids are counted, images
    take none; prompts that begin alike share their whole blocks. A line is as many requests as it
    has prompts, and `n` times that where it asks for so many answers. Answers are as long as a
    line allows, or `output_tokens` where that is above 0 and less; what a line allows is planned
    with in both cases. A line that allows 0 tokens generates nothing, nor does an embedding; each
    counts as an answer of 1 token, which is the step that computes it.

    Errors: `TraceFileError` names the line.
    """
    blocks: list[array[int]] = []
    prompts, outputs, allowed = array("q"), array("q"), array("q")
    for number, line in _lines(path):
        row = _row(path, number, line)
        texts, num_answers = _texts(path, number, row["body"]), _num_answers(path, number, row)
        most, num = _most_tokens(path, number, row), len(texts) * num_answers
        if len(blocks) + num > MAX_JOB_LINES:
            raise TraceFileError(f"jobs {path} asks for more than {MAX_JOB_LINES:,} answers")
        for text in texts:
            prompts.extend([-(-len(text) // CHARS_PER_TOKEN)] * num_answers)
            blocks += [hashed_blocks(text)] * num_answers
        allowed.extend([most] * num)
        outputs.extend([min(most, output_tokens) if output_tokens else most] * num)
    if not blocks:
        raise TraceFileError(f"jobs {path} holds no line")
    return Trace(
        Task.OFFLINE,
        array("d", (at_s,)) * len(blocks),
        prompts,
        outputs,
        blocks=blocks,
        allowed_tokens=allowed,
    )


def hashed_blocks(text: str) -> array[int]:
    """One id per block of a text, each over all that comes before it, too."""
    size, digest = BLOCK_TOKENS * CHARS_PER_TOKEN, b""
    ids = array("q")
    for start in range(0, len(text), size):
        part = text[start : start + size].encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(digest + part, digest_size=8).digest()
        ids.append(int.from_bytes(digest, "big") >> 2)
    return ids


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open_text_file(path) as file:
            for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), 1):
                if number > MAX_JOB_LINES:
                    raise TraceFileError(f"jobs {path} has more than {MAX_JOB_LINES:,} lines")
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceFileError(f"jobs {path} cannot be read: {error}") from error


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"jobs {path}, line {number} is not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("body"), dict):
        raise TraceFileError(
            f"jobs {path}, line {number} has no body; a line is an OpenAI batch request: "
            '{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}'
        )
    if "url" in row and row["url"] not in URLS:
        raise TraceFileError(
            f"jobs {path}, line {number}: url is {row['url']!r:.60}; allowed are {', '.join(URLS)}"
        )
    return row


def _texts(path: Path, number: int, body: dict[str, Any]) -> list[str]:
    """What takes tokens in each prompt; at least one character, as no prompt has no token."""
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        return [_chat(body) or " "]
    for given in (body.get("prompt"), body.get("input")):
        if isinstance(given, str) and given:
            return [given]
        if isinstance(given, list) and given:
            # Token ids are one prompt, all else one each.
            prompts = [given] if type(given[0]) is int else given
            return [_written(one) or " " for one in prompts]
    raise TraceFileError(
        f"jobs {path}, line {number}: nothing in body.messages, body.prompt or body.input; "
        "one of them must hold the prompt"
    )


def _chat(body: dict[str, Any]) -> str:
    """Tools and turns, as a chat template writes them."""
    parts = [_as_json(body.get("tools"))]
    for message in body["messages"]:
        if isinstance(message, dict):
            parts += [_written(message.get("content")), _as_json(message.get("tool_calls"))]
    return "\n".join(filter(None, parts))


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""


def _written(value: object) -> str:
    """A text as it is, parts of one and token ids as one."""
    return "".join(map(_piece, value if isinstance(value, list) else [value]))


def _piece(value: object) -> str:
    if type(value) is int:
        # A token id is as long as a token of text, and equal ids are equal text.
        return chr(value % (sys.maxunicode + 1)).ljust(CHARS_PER_TOKEN, "\0")
    if isinstance(value, dict):
        value = value.get("text")
    return value if isinstance(value, str) else ""


def _num_answers(path: Path, number: int, row: dict[str, Any]) -> int:
    value = row["body"].get("n")
    if value is None or row.get("url") == EMBEDDINGS_URL:
        return 1
    if type(value) is not int or not 1 <= value <= MAX_ANSWERS:
        raise TraceFileError(
            f"jobs {path}, line {number}: n is {value!r:.60}; it must be a whole number from 1 to "
            f"{MAX_ANSWERS:,}, or left out for one answer"
        )
    return value


def _most_tokens(path: Path, number: int, row: dict[str, Any]) -> int:
    names, usual_tokens = answer_limits(str(row.get("url")))
    for name in names:
        most = row["body"].get(name)
        if most is None:
            continue
        if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= MAX_TOKENS:
            raise TraceFileError(
                f"jobs {path}, line {number}: {name} is {most!r:.60}; it must be a whole number "
                f"from 0 to {MAX_TOKENS:,}, or left out for {usual_tokens}"
            )
        return max(1, most)
    return usual_tokens
