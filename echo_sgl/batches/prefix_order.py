"""The order that sends lines with a common prompt prefix one after the other."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from typing import Any

import orjson

from echo_sgl.batches.lines import INPUT_FIELDS, BatchLine

CHUNK_BYTES = 64
BYTES_PER_TOKEN = 4
DEFAULT_OUTPUT_TOKENS = 256
MAX_OUTPUT_TOKENS = 10_000_000  # no context is longer; the engine refuses what asks for more
_NAMESPACE_FIELDS = ("lora_path", "extra_key", "cache_salt")


def prefix_key(line: BatchLine) -> bytes:
    """A short key whose byte order is the depth-first order of the prompts' prefix tree.

    Each 64 bytes of the prompt become a 4-byte checksum of everything up to there, so two keys
    share a prefix exactly as long as their prompts do, at 1/16 of the size: the keys of a
    200 MB file take 12 MB. A collision of checksums only costs some locality.
    """
    prompt = prompt_bytes(line)
    checksum = zlib.crc32(_namespace(line))
    key = array("I", [checksum])
    for start in range(0, len(prompt), CHUNK_BYTES):
        checksum = zlib.crc32(prompt[start : start + CHUNK_BYTES], checksum)
        key.append(checksum)
    return key.tobytes()


def prompt_bytes(line: BatchLine) -> bytes:
    """The prompt in the order in which a chat template writes it: tools, then the turns."""
    given = line.body.get(INPUT_FIELDS[line.url])
    if line.url != "/v1/chat/completions":
        return _flat(given)
    tools = line.body.get("tools")
    head = orjson.dumps(tools) if tools else b""
    turns = given if isinstance(given, list) else []
    return head + b"".join(_turn(message) for message in turns)


def estimated_tokens(line: BatchLine, prompt_size_bytes: int) -> int:
    """About how many tokens the line keeps in the engine: prompt (4 bytes each) and output."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = line.body.get(name)
        if isinstance(limit, int) and limit > 0:
            break
    else:
        limit = DEFAULT_OUTPUT_TOKENS
    return prompt_size_bytes // BYTES_PER_TOKEN + 1 + min(limit, MAX_OUTPUT_TOKENS)


def _namespace(line: BatchLine) -> bytes:
    # Requests that differ here never share KV cache.
    fields: list[Any] = [line.url, line.model]
    return orjson.dumps(fields + [line.body.get(name) for name in _NAMESPACE_FIELDS])


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
    if isinstance(value, list):
        return b"".join(_flat(item) for item in value)
    return orjson.dumps(value)
