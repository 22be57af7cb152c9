"""LoRA adapters: of more than a step can hold, those of online requests come first."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from echo_sgl.engine.decodes.adapters import MOST_AWAITED, AdapterRoom, claimed_adapters
from echo_sgl.types import Task
from eval.servers.adapters import build_adapter
from eval.servers.server import Server
from tests.engine.decodes.test_running import decoding
from tests.engine.tight import num_running
from tests.engine.traffic import (
    FLEX,
    completion,
    decided_texts,
    documents,
    is_idle,
    metric,
    pooled,
    send_all,
    texts,
    until,
    wait_until,
)
from tests.servers import COMMON_ARGS, NAMED, STRICT

NAMES = ("a", "b", "c")


def using(rid: str, adapter: str | None, task: Task = Task.OFFLINE, **given: Any) -> Any:
    return dataclasses.replace(decoding(task), rid=rid, lora_id=adapter, **given)


def room(most: int = 2) -> AdapterRoom:
    return AdapterRoom(lambda adapters: len(adapters) <= most)


def online(rid: str, adapter: str | None, **given: Any) -> Any:
    return using(rid, adapter, Task.ONLINE, **given)


def test_offline_requests_keep_what_online_ones_leave_in_their_order() -> None:
    running = [online("1", "a"), using("2", "b"), using("3", "c"), using("4", "a")]
    assert not room().has(running)
    assert room(3).has(running)
    assert room().without_room(running, running[1:]) == {"3"}
    assert room().without_room(running, [running[2], running[1], running[3]]) == {"2"}
    assert room(1).without_room(running, running[1:]) == {"2", "3"}


def test_no_adapter_takes_room_as_well() -> None:
    running = [online("1", None), using("2", "b"), using("3", None)]
    assert room(1).without_room(running, running[1:]) == {"2"}


def test_who_may_not_sit_out_is_in_the_step_before_online_requests() -> None:
    ending = using("2", "b", to_finish=object())
    running = [online("1", "a"), ending, online("3", "c"), online("4", "a")]
    assert room().without_room(running, []) == {"3"}
    assert room(1).without_room(running, []) == {"1", "3", "4"}


def test_who_has_ended_takes_no_room() -> None:
    running = [online("1", "a"), online("2", "b", is_over=True), using("3", "c")]
    assert room().has(running)


def test_offline_requests_make_way_for_those_that_start_in_the_same_step() -> None:
    running, waiting = [using("1", "a"), using("2", "b")], [online("3", "c"), online("4", "d")]
    assert room().has(running)
    assert not room().has(running, waiting)
    assert room().without_room(running, running, waiting) == {"2"}  # somebody decodes
    assert room().without_room([online("0", "c"), *running], running, waiting) == {"1", "2"}
    assert room(3).without_room(running, running, waiting) == {"2"}
    far = [online(f"{number}", "a") for number in range(MOST_AWAITED)]
    assert room().has(running, [*far, *waiting])


def test_an_online_request_starts_beside_online_ones_an_offline_one_beside_all() -> None:
    others = {
        "running": [online("1", "a"), using("2", "b"), using("3", "c", beam_group=object())],
        "starting": [using("4", "d")],
        "parked": [using("5", "e")],
    }
    assert claimed_adapters(online("6", "f"), **others) == {"a", "c", "d"}
    assert claimed_adapters(using("6", "f"), **others) == {"a", "b", "c", "d", "e"}


# ---- a real server -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter_args(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Three adapters, of which a step may hold two."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = [
        f"{name}={build_adapter(tiny_model, folder / name, seed)}"
        for seed, name in enumerate(NAMES)
    ]
    return ("--enable-lora", "--max-loras-per-batch", "2", "--lora-paths", *paths)


def bodies(adapter: str, count: int, max_tokens: int, **extra: Any) -> list[dict[str, Any]]:
    seed = ord(adapter)
    return [
        completion(f"{adapter} {text}", max_tokens, lora_path=adapter, **extra)
        for text in documents(count, 30, seed=seed)
    ]


@pytest.mark.server
@pytest.mark.parametrize("flag", [(), ("--enable-mixed-chunk",)], ids=["apart", "mixed"])
def test_an_online_request_does_not_wait_for_the_adapters_of_a_job(
    server_for, adapter_args: tuple[str, ...], flag: tuple[str, ...]
) -> None:
    args = (*COMMON_ARGS, *NAMED, *adapter_args, *flag)
    server: Server = server_for(args, config="echo", env=STRICT)
    asked = bodies("c", 3, 30)
    job = [*bodies("a", 2, 400, **FLEX), *bodies("b", 2, 400, **FLEX)]
    alone = [*decided_texts(server, asked), *decided_texts(server, job)]

    async def play() -> list[str]:
        lines = asyncio.create_task(send_all(server, job))
        await until(lambda: lines.done() or num_running(server) == len(job), "the job runs")
        answers = await send_all(server, asked)
        assert not lines.done(), "they waited for the job"
        return texts([*answers, *await lines])

    parks = metric(server, "echo_sgl_parks_total", task="offline")
    assert asyncio.run(play()) == alone
    assert metric(server, "echo_sgl_parks_total", task="offline") > parks
    wait_until(lambda: is_idle(server) and pooled(server) == 0, "all have ended")


@pytest.mark.server
def test_lines_of_more_adapters_than_a_step_holds_are_all_answered(
    server_for, adapter_args: tuple[str, ...]
) -> None:
    server: Server = server_for((*COMMON_ARGS, *NAMED, *adapter_args), config="echo", env=STRICT)
    job = [body for name in NAMES for body in bodies(name, 4, 20, **FLEX)]
    job += [completion(text, 20, **FLEX) for text in documents(4, 30, seed=5)]
    alone = decided_texts(server, job)
    assert len({str(text) for text in alone}) == len(job)
    answers = asyncio.run(send_all(server, job))
    assert texts(answers) == alone
