"""Offline requests are handed back once each, and a few at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from echo_sgl.engine.http import hand_back
from echo_sgl.engine.http.hand_back import SLICE, HandBack
from echo_sgl.engine.http.weights import UNLOADING, hand_back_adapter
from tests.engine.traffic import FLEX


class Manager:
    """SGLang's tokenizer manager with these requests; what it sends is noted."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.is_pause = False
        self.sent: list[str] = []

    def add(
        self, rid: str, *, dispatched: bool = True, lora_path: Any = None, **custom_params: str
    ) -> Any:
        params = {"custom_params": custom_params}
        obj = SimpleNamespace(sampling_params=params, lora_path=lora_path)
        state = self.rid_to_state[rid] = SimpleNamespace(obj=obj, dispatched=dispatched)
        return state

    def _dispatch_to_scheduler(self, abort: Any) -> None:
        assert abort.finished_reason["status_code"] == 503
        assert abort.abort_message in ("Later.", UNLOADING)
        self.sent.append(abort.rid)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    monkeypatch.setattr(hand_back, "PAUSE_S", 0.0)
    return Manager()


def end_all(ending: HandBack) -> None:
    asyncio.run(ending.end_all())


def test_each_is_told_once_and_online_ones_never(manager: Manager) -> None:
    manager.add("chat")
    manager.add("line", **FLEX)
    late = manager.add("late", dispatched=False, **FLEX)
    ending = HandBack(manager, "Later.")
    end_all(ending)
    end_all(ending)
    assert manager.sent == ["line"]
    late.dispatched = True  # the scheduler would not have known it before
    end_all(ending)
    assert manager.sent == ["line", "late"]


def test_an_id_that_is_sent_again_is_told_again(manager: Manager) -> None:
    ending = HandBack(manager, "Later.")
    for _ in range(2):
        manager.add("line", **FLEX)
        end_all(ending)
    assert manager.sent == ["line", "line"]


def test_who_is_still_there_after_long_is_told_again(manager: Manager, monkeypatch) -> None:
    monkeypatch.setattr(hand_back, "TELL_AGAIN_S", 0.0)
    manager.add("line", **FLEX)
    ending = HandBack(manager, "Later.")
    end_all(ending)
    end_all(ending)
    assert manager.sent == ["line", "line"]


def test_others_have_their_turn_between_slices(manager: Manager) -> None:
    for number in range(3 * SLICE):
        manager.add(f"line-{number}", **FLEX)
    seen = []

    async def look() -> None:
        while len(manager.sent) < 3 * SLICE:
            seen.append(len(manager.sent))
            await asyncio.sleep(0)

    async def play() -> None:
        await asyncio.gather(HandBack(manager, "Later.").end_all(), look())

    asyncio.run(play())
    assert {SLICE, 2 * SLICE} <= set(seen)


@pytest.mark.parametrize(("while_paused", "sent"), [(True, ["line"]), (False, [])])
def test_a_paused_engine_ends_them_only_at_a_shutdown(
    manager: Manager, while_paused: bool, sent: list[str]
) -> None:
    manager.add("line", **FLEX)
    manager.is_pause = True

    async def play() -> None:
        ending = HandBack(manager, "Later.").go_on(while_paused=while_paused)
        task = asyncio.create_task(ending)
        await asyncio.sleep(0.01)
        assert task.done() is not while_paused
        task.cancel()

    asyncio.run(play())
    assert manager.sent == sent


def test_an_adapter_is_unloaded_without_waiting_for_the_jobs_that_use_it(manager: Manager) -> None:
    """SGLang unloads one for whoever asks for another, when the last of its requests has ended."""
    manager.add("chat", lora_path="old")
    manager.add("line", lora_path="old", **FLEX)
    manager.add("lines", lora_path=["new", "old"], **FLEX)
    manager.add("another", lora_path="new", **FLEX)
    manager.add("plain", **FLEX)

    async def unload(_manager: Manager, obj: Any) -> str:
        while len(manager.sent) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return f"{obj.lora_name} is unloaded"

    order = SimpleNamespace(lora_name="old")
    assert asyncio.run(hand_back_adapter(unload, manager, order)) == "old is unloaded"
    assert manager.sent == ["line", "lines"]
