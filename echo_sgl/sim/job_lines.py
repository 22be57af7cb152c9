"""Job files as offline work: prompts as hashed blocks, so that shared prefixes stay shared."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from echo_sgl.batches.lines import EMBEDDINGS_URL, answer_limits
from echo_sgl.sim.trace_files import MAX_TOKENS, TraceFileError
from echo_sgl.sim.workload import BLOCK_TOKENS, Trace
from echo_sgl.types import Task

CHARS_PER_TOKEN = 4
MAX_JOB_LINES = 1_000_000
MAX_ANSWERS = 1000


def read_job_lines(path: Path, *, output_tokens: int = 0, at_s: float = 0.0) -> Trace:
    """The lines of an OpenAI batch file, all there at `at_s`.

    A text is taken to have `CHARS_PER_TOKEN` characters a token, token ids are counted, images
    take none; prompts that begin alike share their whole blocks. A line with several prompts is
    planned as one that holds them all, one that asks for `n` answers as so many. Answers are as
    long as a line allows, or `output_tokens` where that is above 0 and less; what a line allows is
    planned with in both cases. A line that allows 0 tokens generates nothing, nor does an
    embedding; each counts as an answer of 1 token, which is the step that computes it.

    Errors: `TraceFileError` names the line.
    """
    blocks, prompts, outputs, allowed = [], array("q"), array("q"), array("q")
    for number, line in _lines(path):
        row = _row(path, number, line)
        text, num_answers = _text(path, number, row["body"]), _num_answers(path, number, row)
        most = _most_tokens(path, number, row)
        prompts.extend([-(-len(text) // CHARS_PER_TOKEN)] * num_answers)
        blocks += [hashed_blocks(text)] * num_answers
        allowed.extend([most] * num_answers)
        outputs.extend([min(most, output_tokens) if output_tokens else most] * num_answers)
        if len(blocks) > MAX_JOB_LINES:
            raise TraceFileError(f"jobs {path} asks for more than {MAX_JOB_LINES:,} answers")
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
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if number > MAX_JOB_LINES:
                    raise TraceFileError(f"jobs {path} has more than {MAX_JOB_LINES:,} lines")
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
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
    return row


def _text(path: Path, number: int, body: dict[str, Any]) -> str:
    """What takes tokens in a prompt; at least one character, as no prompt has no token."""
    given = [body.get(name) for name in ("prompt", "input", "messages")]
    messages = given[2] if isinstance(given[2], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    text = "\n".join(filter(None, map(_written, [*given[:2], *contents])))
    if not text and not any(isinstance(one, list) and one for one in given):
        raise TraceFileError(
            f"jobs {path}, line {number}: nothing in body.messages, body.prompt or body.input; "
            "one of them must hold the prompt"
        )
    return text or " "


def _written(value: object) -> str:
    """A string as it is, a list of strings, parts or token ids (or of lists of ids) as one."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else ""
    flat = chain.from_iterable(one if isinstance(one, list) else [one] for one in value)
    return "".join(map(_piece, flat))


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
