"""What a reply means for a line."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from echo_sgl.batches.lines.replies import Reply, Usage, Verdict, output_record


def chat(finish_reason: str = "stop", **fields: Any) -> bytes:
    choices = [{"index": 0, "finish_reason": finish_reason, "message": {"content": "x"}}]
    return orjson.dumps({"id": "r1", "choices": choices, **fields})


@pytest.mark.parametrize(
    ("status", "content", "verdict"),
    [
        (200, chat(), Verdict.ANSWERED),
        (200, chat("length"), Verdict.ANSWERED),
        (200, b'{"object": "list", "data": []}', Verdict.ANSWERED),
        (200, chat("abort"), Verdict.BROKEN),
        (200, chat()[:-4], Verdict.BROKEN),
        (200, b"[]", Verdict.BROKEN),
        (200, b'{"error": {"message": "late failure"}}', Verdict.BROKEN),
        (307, b"", Verdict.FAILED),
        (400, b'{"object": "error", "message": "too long"}', Verdict.FAILED),
        (404, b"Not Found", Verdict.FAILED),
        (422, b"{}", Verdict.FAILED),
        (408, b"{}", Verdict.BROKEN),
        (409, b"{}", Verdict.BROKEN),
        (429, b"{}", Verdict.REFUSED),
        (503, b"{}", Verdict.REFUSED),
        (500, b"", Verdict.BROKEN),
        (502, b"<html>bad gateway</html>", Verdict.BROKEN),
    ],
)
def test_a_reply_has_one_verdict(status: int, content: bytes, verdict: Verdict) -> None:
    reply = Reply.parse(status, content)
    assert reply.verdict is verdict
    assert str(status) in reply.reason


def test_a_bare_sglang_error_is_put_where_openai_has_it() -> None:
    reply = Reply.parse(400, b'{"object":"error","message":"too long","code":400}')
    assert reply.body["error"]["message"] == "too long"
    assert reply.reason == "400: too long"


def test_an_openai_error_stays_as_it_is() -> None:
    body = {"error": {"message": "no", "type": "t", "param": None, "code": None}}
    assert Reply.parse(400, orjson.dumps(body)).body == body


def test_a_record_has_openais_fields() -> None:
    record = orjson.loads(output_record("line-1", Reply.parse(200, chat())))
    assert record["id"].startswith("batch_req_")
    assert record["custom_id"] == "line-1"
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    assert record["response"]["request_id"] == "r1"
    assert record["response"]["body"]["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (503, "Request waiting timeout reached.", True),
        (503, "Request running timeout reached.", False),
        (503, "The request queue is full.", False),
        (500, "Request waiting timeout reached.", False),
    ],
)
def test_only_a_request_that_waited_too_long_says_that_the_server_is_full(
    status: int, message: str, expected: bool
) -> None:
    assert Reply.parse(status, orjson.dumps({"message": message})).says_full is expected


def test_a_records_text_never_breaks_the_line() -> None:
    body = orjson.dumps({"choices": [], "text": "a\nb\r\0"})
    record = output_record("id\n", Reply.parse(200, body))
    assert not {b"\n"[0], b"\r"[0], 0} & set(record)
    assert orjson.loads(record)["response"]["body"]["text"] == "a\nb\r\0"


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2}, Usage(9, 2, None)),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            Usage(9, 2, 0),
        ),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, 0, None)),
        (None, Usage()),
        ("broken", Usage()),
    ],
)
def test_usage_is_read_where_it_is_there(usage: Any, expected: Usage) -> None:
    assert Usage.of_body({"usage": usage}) == expected
