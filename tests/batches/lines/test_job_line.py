"""What a job file's line may be, and what is said about one that is not."""

from __future__ import annotations

import gzip
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batches.dispatch.line_engine import request_head
from echo_sgl.batches.lines.job_line import MAX_DEPTH, URLS, BatchLine, LineError, parse_line

CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def line(**changes: Any) -> bytes:
    """A valid chat line with some fields changed; a field that is `...` is left out."""
    fields = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": CHAT_BODY,
    } | changes
    return orjson.dumps({key: value for key, value in fields.items() if value is not ...})


def body(**changes: Any) -> bytes:
    fields = CHAT_BODY | changes
    return line(body={key: value for key, value in fields.items() if value is not ...})


BAD_LINES = [
    (b"{", "invalid_json_line", "not valid JSON"),
    (b"nonsense", "invalid_json_line", "not valid JSON"),
    (b'{"custom_id": NaN}', "invalid_json_line", "not valid JSON"),
    (b"[" * 100_000, "invalid_json_line", "not valid JSON"),
    (line()[:-1], "invalid_json_line", "not valid JSON"),
    (line() + line(), "invalid_json_line", "not valid JSON"),
    (b'{"custom_id": "\xff"}', "invalid_json_line", "not valid JSON"),
    (b'{"custom_id": "\\ud800"}', "invalid_json_line", "not valid JSON"),
    (line().decode().encode("utf-16"), "invalid_json_line", "NUL"),
    (line() + b"\0", "invalid_json_line", "NUL"),
    (gzip.compress(line()), "invalid_json_line", "the file is packed with gzip; unpack it"),
    (b"[]", "invalid_json_line", "an array; it must be a JSON object"),
    (b'"text"', "invalid_json_line", "a string; it must be a JSON object"),
    (b"null", "invalid_json_line", "null; it must be a JSON object"),
    (b"7", "invalid_json_line", "a number; it must be a JSON object"),
    (line(custom_id=...), "invalid_custom_id", "custom_id is missing"),
    (line(custom_id=""), "invalid_custom_id", 'custom_id is ""'),
    (line(custom_id=None), "invalid_custom_id", "custom_id is null"),
    (line(custom_id=7), "invalid_custom_id", "custom_id is 7"),
    (line(custom_id="x" * 65), "invalid_custom_id", "65 characters; at most 64"),
    (line(method=...), "invalid_method", "method is missing; it must be POST"),
    (line(method="GET"), "invalid_method", 'method is "GET"; it must be POST'),
    (line(method="post"), "invalid_method", "it must be POST"),
    (line(url=...), "invalid_url", "url is missing"),
    (line(url="/v1/chat"), "invalid_url", 'url is "/v1/chat"; allowed are /v1/chat/completions'),
    (line(url=["/v1/completions"]), "invalid_url", "allowed are"),
    (line(body=...), "invalid_body", "body is missing"),
    (line(body=[]), "invalid_body", "body is []; it must be a JSON object"),
    (line(body="{}"), "invalid_body", "it must be a JSON object"),
    (body(model=...), "invalid_model", "body.model is missing; it must name a model"),
    (body(model=""), "invalid_model", 'body.model is ""'),
    (body(model=3), "invalid_model", "body.model is 3"),
    (body(model="x" * 4097), "invalid_model", "4097 characters; at most 4096"),
    (body(stream=True), "invalid_stream", "body.stream is true; a batch line cannot stream"),
    (body(stream=1), "invalid_stream", "body.stream is 1"),
    (body(stream="no"), "invalid_stream", "a batch line cannot stream"),
    (body(messages=...), "invalid_body", "body.messages is missing"),
    (body(messages="hi"), "invalid_body", 'body.messages is "hi"; /v1/chat/completions needs'),
    (line(url="/v1/completions"), "invalid_body", "body.prompt is missing"),
    (line(url="/v1/embeddings"), "invalid_body", "body.input is missing"),
    (line(url="/v1/completions", body={"model": "m", "prompt": 3}), "invalid_body", "is 3"),
]


@pytest.mark.parametrize(("raw", "code", "message"), BAD_LINES)
def test_a_bad_line_is_refused_with_its_code_and_what_is_allowed(
    raw: bytes, code: str, message: str
) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(raw)
    assert caught.value.code == code
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [
        line(),
        line(custom_id="x" * 64),
        line(custom_id="ä" * 64),
        line(extra="is ignored"),
        body(stream=False),
        body(stream=None),
        body(messages=[]),
        line(url="/v1/completions", body={"model": "m", "prompt": [1, 2]}),
        line(url="/v1/embeddings", body={"model": "m", "input": "text"}),
        b"  " + line() + b" ",
    ],
)
def test_a_valid_line_keeps_its_name_url_and_body(raw: bytes) -> None:
    fields = orjson.loads(raw)
    assert parse_line(raw) == BatchLine(fields["custom_id"], fields["url"], fields["body"])


def test_a_long_value_is_shown_shortened() -> None:
    with pytest.raises(LineError) as caught:
        parse_line(line(url="/v1/" + "x" * 10_000))
    assert len(str(caught.value)) < 300


def nested(num_levels: int) -> Any:
    value: Any = []
    for _ in range(num_levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("field", ["custom_id", "method", "url", "extra"])
def test_a_line_that_could_not_be_written_again_is_refused(field: str) -> None:
    raw = line(**{field: "DEEP"}).replace(b'"DEEP"', b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(LineError, match=f"nested deeper than {MAX_DEPTH} levels") as caught:
        parse_line(raw)
    assert caught.value.code == "invalid_json_line"


def test_a_line_that_is_as_deep_as_may_be_can_be_sent() -> None:
    raw = body(response_format=nested(MAX_DEPTH - 2))
    sent = orjson.loads(request_head(parse_line(raw), {}) + b"}")
    assert sent["response_format"] == nested(MAX_DEPTH - 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": JSON | st.text(min_size=1, max_size=70),
        "method": JSON | st.just("POST"),
        "url": JSON | st.sampled_from(URLS),
        "body": JSON
        | st.fixed_dictionaries(
            {"model": JSON | st.just("m")},
            optional={"messages": JSON, "prompt": JSON, "input": JSON, "stream": JSON},
        ),
    },
)


@given(raw=st.binary() | JSON.map(orjson.dumps) | FIELDS.map(orjson.dumps))
def test_any_bytes_are_a_usable_request_or_a_line_error(raw: bytes) -> None:
    try:
        parsed = parse_line(raw)
    except LineError as error:
        assert str(error)
        return
    assert 1 <= len(parsed.custom_id) <= 64
    assert parsed.url in URLS
    assert isinstance(parsed.body["model"], str)
    assert not parsed.body.get("stream")
