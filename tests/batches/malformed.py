"""Uploads that are wrong, each with the code that its batch must fail with."""

from __future__ import annotations

from typing import Any

import orjson

from echo_sgl.batches.lines.job_line import MAX_DEPTH
from eval.servers.stub_server import MODEL

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


def line(**changes: Any) -> bytes:
    """A valid line with some fields changed; a field that is `...` is left out."""
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY} | changes
    return orjson.dumps({key: value for key, value in fields.items() if value is not ...})


def body(**changes: Any) -> bytes:
    fields = BODY | changes
    return line(body={key: value for key, value in fields.items() if value is not ...})


def lines(count: int) -> bytes:
    return b"\n".join(line(custom_id=f"line-{index}") for index in range(count))


def deep(field: str) -> bytes:
    """A line with a field that can be read and not be written again."""
    return _filled(line(**{field: "DEEP"}))


def deep_body(field: str) -> bytes:
    return _filled(body(**{field: "DEEP"}))


def _filled(content: bytes) -> bytes:
    return content.replace(b'"DEEP"', b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


GOOD = line(custom_id="good")
DEEP = b"[" * 100_000 + b"]" * 100_000
DEEP_TEXT = b"[" * 900 + b'"x"' + b"]" * 900
JSON = "invalid_json_line"

# Name of the case -> (content of the file, code of the first error).
MALFORMED: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "empty_file"),
    "one line end": (b"\n", "empty_file"),
    "only blanks": (b" \t \r\n\n   ", "empty_file"),
    "only a BOM": (b"\xef\xbb\xbf", "empty_file"),
    "two BOMs": (b"\xef\xbb\xbf\xef\xbb\xbf" + GOOD, JSON),
    "BOM in the second line": (GOOD + b"\n\xef\xbb\xbf" + line(), JSON),
    "UTF-16 with BOM": (GOOD.decode().encode("utf-16"), JSON),
    "UTF-16 big endian": (GOOD.decode().encode("utf-16-be"), JSON),
    "UTF-32": (GOOD.decode().encode("utf-32"), JSON),
    "Latin-1": (b'{"custom_id": "caf\xe9"}', JSON),
    "overlong UTF-8": (b'{"custom_id": "\xc0\xaf"}', JSON),
    "surrogate in UTF-8": (b'{"custom_id": "\xed\xa0\x80"}', JSON),
    "lone surrogate escape": (b'{"custom_id": "\\ud800"}', JSON),
    "NUL byte": (GOOD + b"\0", JSON),
    "only NUL bytes": (b"\0" * 5000, JSON),
    "NUL in custom_id": (line(custom_id="a\0b"), "invalid_custom_id"),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab", JSON),
    "zip": (b"PK\x03\x04\x14\x00\x00\x00", JSON),
    "PNG": (b"\x89PNG\r\n\x1a\n\x00\x00", JSON),
    "HTML": (b"<html><body>not found</body></html>", JSON),
    "CSV": (b"custom_id,method,url\na,POST,/v1/completions\n", JSON),
    "Python literal": (b"{'custom_id': 'a'}", JSON),
    "comment": (b"// jobs\n" + GOOD, JSON),
    "trailing comma": (GOOD[:-1] + b",}", JSON),
    "cut in the middle": (GOOD[: len(GOOD) // 2], JSON),
    "last line cut": (GOOD + b"\n" + line()[:-5], JSON),
    "two objects on a line": (GOOD + line(), JSON),
    "one JSON array of lines": (b"[" + GOOD + b"," + line() + b"]", JSON),
    "pretty-printed": (orjson.dumps(orjson.loads(GOOD), option=orjson.OPT_INDENT_2), JSON),
    "lines end with CR": (GOOD + b"\r" + line(), JSON),
    "NaN": (b'{"custom_id": NaN}', JSON),
    "Infinity": (b'{"custom_id": "a", "body": Infinity}', JSON),
    "bare word": (b"nonsense", JSON),
    "a number": (b"7", JSON),
    "a string": (b'"text"', JSON),
    "null": (b"null", JSON),
    "true": (b"true", JSON),
    "an array": (b"[]", JSON),
    "deep arrays": (DEEP, JSON),
    "deep objects": (b'{"a":' * 50_000, JSON),
    "deep prompt": (GOOD.replace(b'"hello"', DEEP_TEXT), JSON),
    "deep custom_id": (deep("custom_id"), JSON),
    "deep method": (deep("method"), JSON),
    "deep url": (deep("url"), JSON),
    "deep body": (deep("body"), JSON),
    "deep unknown field": (deep("extra"), JSON),
    "deep model": (deep_body("model"), JSON),
    "deep tools": (deep_body("tools"), JSON),
    "deep stream": (deep_body("stream"), JSON),
    "deep response_format": (deep_body("response_format"), JSON),
    "prompt a little too deep": (deep_body("prompt"), JSON),
    "an empty object": (b"{}", "invalid_custom_id"),
    "custom_id missing": (line(custom_id=...), "invalid_custom_id"),
    "custom_id empty": (line(custom_id=""), "invalid_custom_id"),
    "custom_id null": (line(custom_id=None), "invalid_custom_id"),
    "custom_id a number": (line(custom_id=7), "invalid_custom_id"),
    "custom_id an object": (line(custom_id={"a": 1}), "invalid_custom_id"),
    "custom_id too long": (line(custom_id="x" * 65), "invalid_custom_id"),
    "custom_id enormous": (line(custom_id="x" * 10**6), "invalid_custom_id"),
    "custom_id twice": (line() + b"\n" + line(), "duplicate_custom_id"),
    "custom_id twice, far apart": (lines(500) + b"\n" + line(custom_id="line-0"), "duplicate"),
    "method missing": (line(method=...), "invalid_method"),
    "method GET": (line(method="GET"), "invalid_method"),
    "method in small letters": (line(method="post"), "invalid_method"),
    "url missing": (line(url=...), "invalid_url"),
    "url of another host": (line(url="http://elsewhere/v1/completions"), "invalid_url"),
    "url that climbs": (line(url="/v1/../flush_cache"), "invalid_url"),
    "url of administration": (line(url="/abort_request"), "invalid_url"),
    "url with a query": (line(url="/v1/completions?x=1"), "invalid_url"),
    "url a list": (line(url=["/v1/completions"]), "invalid_url"),
    "url of another endpoint": (
        line(url="/v1/chat/completions", body={"model": MODEL, "messages": [{"role": "user"}]}),
        "mismatched_url",
    ),
    "body missing": (line(body=...), "invalid_body"),
    "body null": (line(body=None), "invalid_body"),
    "body a string": (line(body="{}"), "invalid_body"),
    "body a list": (line(body=[BODY]), "invalid_body"),
    "model missing": (body(model=...), "invalid_model"),
    "model empty": (body(model=""), "invalid_model"),
    "model a number": (body(model=3), "invalid_model"),
    "model enormous": (body(model="x" * 10**6), "invalid_model"),
    "model long and unknown": (body(model="\u202e" * 4096), "model_not_found"),
    "model unknown": (body(model="gpt-none"), "model_not_found"),
    "prompt missing": (body(prompt=...), "invalid_body"),
    "prompt null": (body(prompt=None), "invalid_body"),
    "prompt an object": (body(prompt={"a": 1}), "invalid_body"),
    "stream": (body(stream=True), "invalid_stream"),
    "stream a string": (body(stream="yes"), "invalid_stream"),
    "too many lines": (lines(1001), "too_many_lines"),
    "too many blank lines": (b"\n" * 10_001 + GOOD, "too_many_lines"),
    "all lines wrong": (b"{\n" * 900, JSON),
    "a line of 70 MB": (
        GOOD.replace(b"hello", b"x" * 70_000_000) + b"\n" + line(),
        "line_too_long",
    ),
}

# Unusual, but right: these must be answered.
UNUSUAL: dict[str, bytes] = {
    "BOM": b"\xef\xbb\xbf" + GOOD,
    "CRLF": GOOD + b"\r\n" + line() + b"\r\n",
    "blank lines": b"\n\n" + GOOD + b"\n  \n\n" + line() + b"\n\n",
    "no last line end": GOOD + b"\n" + line(),
    "a field twice": GOOD[:-1] + b',"method":"POST"}',
    "unknown fields": line(extra=[1, 2], priority=None),
    "stream false": body(stream=False),
    "stream null": body(stream=None),
    "a rid of its own": body(rid="batch_req_0"),
    "an integer beyond 64 bits": body(seed="x").replace(b'"x"', b"123456789012345678901234567890"),
    "an absurd number of tokens": body(max_tokens=2**64 - 1),
    "every kind of letter": line(custom_id="ключ-鍵-🔑-é", body=BODY | {"prompt": "字" * 1000}),
    "custom_id of 64 letters": line(custom_id="鍵" * 64),
    "custom_id like a path": line(custom_id="../../etc/passwd"),
    "custom_id like SQL": line(custom_id="'; DROP TABLE lines; --"),
    "prompt as token ids": body(prompt=[1, 2, 3]),
    "several prompts": body(prompt=["one", "two"]),
    "an empty prompt": body(prompt=""),
}

# File names are shown, and are never paths.
NAMES = (
    "../../../etc/passwd",
    "/etc/passwd",
    "..\\..\\windows\\system.ini",
    "a\0b.jsonl",
    "a\r\nSet-Cookie: x=1",
    "x" * 3000,
    "",
    ".",
    "..",
    "con.jsonl",
    "job.jsonl; rm -rf /",
    "\u202elnosj.exe",
    "%2e%2e%2fetc%2fpasswd",
    "<script>alert(1)</script>",
)
