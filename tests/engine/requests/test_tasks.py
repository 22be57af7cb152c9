"""Which class a request belongs to, and that the tag reaches the scheduler."""

from __future__ import annotations

import json

import httpx
import pytest

from eval.servers.server import Server
from tests.engine.traffic import completion, metric, post

pytestmark = pytest.mark.server
CHAT = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def native(tier: str | None) -> dict[str, object]:
    params: dict[str, object] = {"max_new_tokens": 2}
    if tier:
        params["custom_params"] = {"service_tier": tier}
    return {"text": "hello", "sampling_params": params}


def bodies(tier: str | None) -> dict[str, dict[str, object]]:
    extra = {"service_tier": tier} if tier else {}
    return {
        "/v1/chat/completions": {**CHAT, **extra},
        "/v1/completions": completion("hello", 2, **extra),
        "/generate": native(tier),
    }


def finished(server: Server, task: str) -> float:
    return metric(server, "echo_sgl_requests_total", task=task, outcome="finished")


@pytest.mark.parametrize("path", bodies(None))
@pytest.mark.parametrize(
    ("tier", "task"),
    [
        (None, "online"),
        ("auto", "online"),
        ("default", "online"),
        ("priority", "online"),
        ("flex", "offline"),
    ],
)
def test_each_service_tier_is_counted_in_its_class(echo_server, path, tier, task):
    before = {name: finished(echo_server, name) for name in ("online", "offline")}
    assert post(echo_server, path, bodies(tier)[path]).status_code == 200
    before[task] += 1
    assert {name: finished(echo_server, name) for name in before} == before


@pytest.mark.parametrize("path", bodies(None))
@pytest.mark.parametrize("tier", ["scale", "FLEX"])
def test_any_other_service_tier_is_answered_with_400_and_the_allowed_ones(echo_server, path, tier):
    answer = post(echo_server, path, bodies(tier)[path])
    assert answer.status_code == 400
    assert f"service_tier is {tier!r}; allowed are auto, default, priority, flex" in answer.text


@pytest.mark.parametrize("tier", [7, ["flex"], {"flex": 1}])
def test_a_service_tier_that_is_no_string_is_answered_with_400(echo_server, tier):
    answer = post(echo_server, "/v1/completions", completion("hello", 2, service_tier=tier))
    assert answer.status_code == 400
    assert "allowed are" in answer.json()["message"]


NO_TERMS = dict.fromkeys(("ttft_s", "tpot_s", "deadline_s"))


@pytest.mark.parametrize(
    ("params", "status"),
    [
        (NO_TERMS, 200),
        ({**NO_TERMS, "service_tier": None}, 200),
        ({**NO_TERMS, "service_tier": "flex"}, 200),
        ({"echo_arrival_s": "long ago"}, 200),
        ({"deadline_s": "soon"}, 400),
        ({"deadline_s": True}, 400),
        ({"deadline_s": [1]}, 400),
        ({"tpot_s": -1}, 400),
    ],
)
@pytest.mark.parametrize("path", bodies(None))
def test_odd_terms_are_none_or_answered_with_400_and_the_server_lives_on(
    echo_server, path, params, status
):
    body = dict(bodies(None)[path])
    if path == "/generate":
        body["sampling_params"] = {"max_new_tokens": 2, "custom_params": params}
    else:
        body["custom_params"] = params
    assert post(echo_server, path, body).status_code == status
    assert post(echo_server, "/generate", native("flex")).status_code == 200


def test_an_offline_answer_streams_like_any_other(echo_server):
    body = completion("hello there", 12, service_tier="flex")
    whole = post(echo_server, "/v1/completions", body).json()["choices"][0]["text"]
    stream = {**body, "stream": True}
    with httpx.stream("POST", f"{echo_server.url}/v1/completions", json=stream) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert len(chunks) > 1
    assert "".join(chunks) == whole


def test_the_official_client_sends_flex_unchanged(echo_server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{echo_server.url}/v1", api_key="none")
    before = finished(echo_server, "offline")
    answer = client.chat.completions.create(**CHAT, service_tier="flex")
    assert answer.usage.completion_tokens == 2
    assert finished(echo_server, "offline") == before + 1
    with pytest.raises(openai.BadRequestError, match="service_tier"):
        client.chat.completions.create(**CHAT, extra_body={"service_tier": "gold"})
