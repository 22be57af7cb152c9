"""Embedding lines on a real SGLang server, through OpenAI's own client."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import openai
import orjson
import pytest

from eval.servers.server import Server
from tests.batches.client import ENDED, WAIT_S

NUM_LINES = 30
EMBEDDING = ("--is-embedding", "--served-model-name", "tiny")


def line(index: int) -> bytes:
    """Every third asks for two embeddings at a time."""
    text = f"text {index}"
    body = {"model": "tiny", "input": text if index % 3 else [text, f"{text} again"]}
    fields = {"custom_id": f"{index}", "method": "POST", "url": "/v1/embeddings", "body": body}
    return orjson.dumps(fields)


@pytest.mark.server
def test_a_batch_of_embeddings_is_answered_as_single_requests_are(
    server_for: Callable[..., Server], tmp_path: Path
) -> None:
    state = ("--echo-state-dir", str(tmp_path / "state"))
    server = server_for((*EMBEDDING, *state), config="echo")
    client = openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True
    )
    content = b"\n".join(line(index) for index in range(NUM_LINES))
    file = client.files.create(file=("jobs.jsonl", content), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="this server's model allows /v1/embeddings"):
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
    with pytest.raises(openai.BadRequestError, match="gives embeddings, and no text"):
        client.completions.create(model="tiny", prompt="word")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    deadline_s = time.monotonic() + WAIT_S
    while (batch := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert batch.status == "completed"
    assert batch.error_file_id is None
    assert batch.usage is not None
    assert batch.usage.input_tokens > NUM_LINES
    output = client.files.content(str(batch.output_file_id)).content
    records = {item["custom_id"]: item for item in map(orjson.loads, output.splitlines())}
    assert set(records) == {f"{index}" for index in range(NUM_LINES)}
    alone = (
        client.embeddings.create(model="tiny", input="text 7", encoding_format="float")
        .data[0]
        .embedding
    )
    pair = records["6"]["response"]["body"]["data"]
    assert [item["index"] for item in pair] == [0, 1]
    found = records["7"]["response"]["body"]["data"][0]["embedding"]
    cosine = sum(one * other for one, other in zip(alone, found, strict=True))
    assert cosine == pytest.approx(1.0, abs=1e-3)  # both are of length 1
