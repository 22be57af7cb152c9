"""The order that sends lines with a common prompt prefix one after the other."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import orjson

from echo_sgl.batches.lines.job_line import (
    CHAT_URL,
    INPUT_FIELDS,
    BatchLine,
    answer_limits,
    whole_number,
)

CHUNK_BYTES = 64
BYTES_PER_TOKEN = 4
MAX_PART_TOKENS = 1500  # about what a model makes of a picture of a megapixel
MAX_OUTPUT_TOKENS = 10_000_000  # no context is longer; the engine refuses what asks for more
_NAMESPACE_FIELDS = ("lora_path", "extra_key", "cache_salt")


def prefix_key(line: BatchLine, prompt: bytes) -> bytes:
    """A short key whose byte order is the depth-first order of the prompts' prefix tree.

    Each 64 bytes of the prompt become a 4-byte checksum of everything up to there, so two keys
    share a prefix exactly as long as their prompts do, at 1/16 of the size: the keys of a
    200 MB file take 12 MB. A collision of checksums only costs some locality.
    `prompt`: `prompt_bytes` of the line.
    """
    checksum = zlib.crc32(_namespace(line))
    key = array("I", [checksum])
    for start in range(0, len(prompt), CHUNK_BYTES):
        checksum = zlib.crc32(prompt[start : start + CHUNK_BYTES], checksum)
        key.append(checksum)
    return key.tobytes()


def prompt_bytes(line: BatchLine) -> bytes:
    """The prompt in the order in which a chat template writes it: tools, then the turns."""
    given = line.body.get(INPUT_FIELDS[line.url])
    if line.url != CHAT_URL:
        return _flat(given)
    tools = line.body.get("tools")
    head = orjson.dumps(tools) if tools else b""
    turns = given if isinstance(given, list) else []
    return head + b"".join(_turn(message) for message in turns)


def estimated_tokens(line: BatchLine, prompt_size_bytes: int) -> int:
    """About how many tokens the line keeps in the engine: prompts (4 bytes each) and answers.

    Answers to the same prompt share its KV. Of an image or a sound, whose bytes say little of
    that, at most `MAX_PART_TOKENS`.
    """
    names, usual_tokens = answer_limits(line.url)
    limits = (whole_number(line.body.get(name)) for name in names)
    limit = next((tokens for tokens in limits if tokens > 0), usual_tokens)
    text_bytes = prompt_size_bytes - sum(map(_excess_bytes, _parts(line)))
    answer_tokens = line.num_requests * min(limit, MAX_OUTPUT_TOKENS)
    return text_bytes // BYTES_PER_TOKEN + line.num_prompts + answer_tokens


def _namespace(line: BatchLine) -> bytes:
    # Requests that differ here never share KV cache.
    fields: list[Any] = [line.url, line.model]
    return orjson.dumps(fields + [line.body.get(name) for name in _NAMESPACE_FIELDS])


def _parts(line: BatchLine) -> Iterator[object]:
    """The parts of which the contents of a chat's messages consist."""
    if line.url == CHAT_URL:
        for message in line.body["messages"]:
            content = message.get("content") if isinstance(message, Mapping) else None
            yield from content if isinstance(content, list) else ()


def _excess_bytes(part: object) -> int:
    """By how much a part that is no text is larger than what it is counted as."""
    if not isinstance(part, Mapping) or isinstance(part.get("text"), str):
        return 0
    return max(0, len(_flat(part)) - MAX_PART_TOKENS * BYTES_PER_TOKEN)


def _turn(message: object) -> bytes:
    if not isinstance(message, Mapping):
        return _flat(message)
    return _flat(message.get("role")) + b"\n" + _flat(message.get("content")) + b"\n"


def _flat(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        # A token takes 4 bytes, so that sizes in bytes count token ids as tokens.
        return b"".join((item & 0xFFFFFFFF).to_bytes(4, "big") for item in value)
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return _flat(value["text"])
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        return _flat(list(chain.from_iterable(value)))
    if isinstance(value, list):
        return b"".join(map(_flat, value))
    return orjson.dumps(value)
