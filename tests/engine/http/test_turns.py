"""A job that is sent at once does not stand before online requests at the HTTP server's door."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from echo_sgl.batches.http.api_errors import route_path
from echo_sgl.engine.http.turns import (
    OfflineTurns,
    names_offline,
    one_prompt_at_a_time,
    pass_turn_on,
)
from echo_sgl.types import Task
from eval.load.client import Phase, make_request
from eval.load.records import Status
from eval.servers.server import LOCAL, Server
from tests.engine.traffic import FLEX, completion, post


class Door:
    """An app that notes who came in, and lets `bodies` be tokenised when told to."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.open = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = orjson.loads((await receive())["body"])
        self.entered.append(body["name"])
        if body.get("fails"):
            raise ValueError(body["name"])
        await self.open.wait()
        pass_turn_on()
        await asyncio.sleep(3600)


def visit(door: OfflineTurns, name: str, path: str = "/v1/completions", **body: Any) -> Any:
    content = orjson.dumps({"name": name, **body})

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(_message: Any) -> None:
        raise AssertionError("nobody answers")

    scope = {"type": "http", "path": path}
    return asyncio.create_task(door(scope, receive, send))  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def entered(*visits: dict[str, Any], opens: bool = False) -> list[str]:
    """Who came in when these came at once, in order; `opens`: those who came are tokenised."""

    async def run() -> list[str]:
        door = Door()
        if opens:
            door.open.set()
        turns = OfflineTurns(door)
        tasks = [visit(turns, f"{n}", **one) for n, one in enumerate(visits)]
        await settle()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return door.entered

    return asyncio.run(run())


def test_one_offline_request_is_taken_in_at_a_time_and_online_ones_at_once() -> None:
    assert entered(FLEX, FLEX, {}, FLEX, {"service_tier": "auto"}) == ["2", "4", "0"]


def test_the_turn_goes_to_the_next_in_line_once_a_request_is_tokenised() -> None:
    assert entered(FLEX, FLEX, {}, FLEX, opens=True) == ["2", "0", "1", "3"]


def test_the_path_that_a_proxy_stands_at_changes_no_class() -> None:
    at_proxy = {"path": "/llm/v1/completions", "root_path": "/llm"}
    assert route_path(at_proxy) == "/v1/completions"
    assert route_path({"path": "/v1/completions", "root_path": ""}) == "/v1/completions"
    assert route_path({"path": "/v1/completions"}) == "/v1/completions"


def refused(
    path: str, *, is_stopping: bool, body: dict[str, Any] = FLEX
) -> tuple[int, dict[str, Any]] | None:
    """Status and error of a request, an offline one by default; None when it is let in."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": orjson.dumps(body), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    async def run() -> None:
        await OfflineTurns(app)({"type": "http", "path": path}, receive, send)

    OfflineTurns.is_stopping = is_stopping
    try:
        asyncio.run(run())
    finally:
        OfflineTurns.is_stopping = False
    return (sent[0]["status"], orjson.loads(sent[1]["body"])["error"]) if sent else None


def test_a_server_that_stops_takes_no_offline_request_in() -> None:
    """Clients send what was refused again, and would keep it busy for as long as it drains."""
    assert refused("/v1/completions", is_stopping=False) is None
    answer = refused("/v1/completions", is_stopping=True)
    assert answer is not None
    assert answer[0] == 503 and "shutting down" in answer[1]["message"]
    assert refused("/health", is_stopping=True) is None


def test_where_sglang_knows_no_class_an_offline_request_is_refused() -> None:
    answer = refused("/v1/responses", is_stopping=False)
    assert answer is not None
    assert (answer[0], answer[1]["param"]) == (400, "service_tier")


def test_who_has_the_word_in_its_metadata_or_its_schema_is_online() -> None:
    for path in ("/v1/responses", "/v1/completions"):
        assert refused(path, is_stopping=True, body={"metadata": FLEX}) is None
    params = {"sampling_params": {"custom_params": FLEX}}
    assert refused("/generate", is_stopping=True, body=params) is not None
    assert not names_offline("/v1/completions", orjson.dumps([FLEX]))
    assert names_offline("/v1/completions", orjson.dumps(FLEX)[:-1] + b', "top_p": NaN}')


def test_the_class_may_stand_among_custom_parameters_where_the_body_names_none() -> None:
    custom = {"custom_params": FLEX}
    assert entered(custom, custom) == ["0"]
    assert entered({**custom, "service_tier": None}, custom) == ["0"]
    named = {**custom, "service_tier": "auto"}
    assert entered(named, named) == ["0", "1"]
    assert refused("/v1/responses", is_stopping=False, body=custom) is None
    assert not names_offline(
        "/v1/completions", b'{"custom_params": "\\"service_tier\\": \\"flex\\""}'
    )


def test_the_prompts_of_one_offline_request_let_others_in_between() -> None:
    """And its choices, which are asked for at once."""
    order: list[str] = []

    async def tokenise(manager: Any, obj: Any) -> None:
        order.append(obj.name)

    async def online() -> None:
        for number in range(3):
            order.append(f"online {number}")
            await asyncio.sleep(0)

    async def run() -> None:
        manager = SimpleNamespace()
        params = {"custom_params": FLEX}
        prompts = [SimpleNamespace(name=f"{n}", sampling_params=params) for n in range(4)]
        others = asyncio.create_task(online())
        await asyncio.gather(*(one_prompt_at_a_time(tokenise, manager, one) for one in prompts))
        await others

    asyncio.run(run())
    assert [name for name in order if len(name) == 1] == ["0", "1", "2", "3"]
    assert order.index("online 2") < order.index("3")


def test_a_request_that_is_refused_gives_its_turn_back() -> None:
    assert entered({**FLEX, "fails": True}, FLEX, opens=True) == ["0", "1"]


def test_a_tier_in_the_words_of_a_prompt_is_none() -> None:
    prompt = {"prompt": orjson.dumps(FLEX).decode()}
    assert entered(prompt, prompt) == ["0", "1"]
    native = {"path": "/generate", "sampling_params": {"custom_params": FLEX}}
    assert entered(native, native) == ["0"]
    other = {"path": "/v1/files", **FLEX}
    assert entered(other, other) == ["0", "1"]


@pytest.mark.server
def test_a_request_of_several_prompts_does_not_keep_its_turn(echo_server: Server) -> None:
    prompts = {"prompt": ["one", "two"], "max_tokens": 2000, "ignore_eos": True}
    long = {**completion("", 2000, **FLEX), **prompts}
    short = completion("three", 1, **FLEX)

    async def run() -> list[str]:
        phase = Phase(echo_server.url)
        requests = [
            make_request(name, Task.OFFLINE, "/v1/completions", body, stream=False)
            for name, body in (("long", long), ("short", short))
        ]
        await phase.closed_loop(requests, window=2, limit_s=300)
        assert {record.error for record in phase.records} == {""}
        return [one.id for one in sorted(phase.records, key=lambda record: record.end_s or 0.0)]

    assert asyncio.run(run()) == ["short", "long"]


@pytest.mark.server
def test_while_one_is_taken_in_only_offline_requests_wait(echo_server: Server) -> None:
    """A pause keeps the first inside; what is refused tells who has come that far."""
    body = completion("hello", 1)
    refused = {**body, "max_tokens": "many"}

    async def run() -> list[Status]:
        phase = Phase(echo_server.url)
        sent: list[asyncio.Task[None]] = []

        async def send(body: dict[str, Any]) -> None:
            request = make_request(f"{len(sent)}", Task.OFFLINE, "/v1/completions", body)
            sent.append(asyncio.create_task(phase.open_loop([(0.0, request)], limit_s=300)))
            while len(phase.records) < len(sent) or phase.records[-1].sent_s is None:
                await asyncio.sleep(0.01)
            for _ in range(5):  # what came before these has come as far as it can
                await asyncio.to_thread(LOCAL.get, f"{echo_server.url}/v1/models", timeout=60)

        await asyncio.to_thread(post, echo_server, "/pause_generation", {"mode": "in_place"})
        try:
            await send({**body, **FLEX})
            await send({**refused, **FLEX})
            await send(refused)
            await sent[2]
            meanwhile = [record.status for record in phase.records]
        finally:
            await asyncio.to_thread(post, echo_server, "/continue_generation", {})
        await asyncio.gather(*sent)
        return [*meanwhile, *(record.status for record in phase.records)]

    pending, error, ok = Status.PENDING, Status.ERROR, Status.OK
    assert asyncio.run(run()) == [pending, pending, error, ok, error, error]
