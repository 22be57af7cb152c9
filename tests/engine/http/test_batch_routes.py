"""What the batch service asks of SGLang's tokenizer manager, held against SGLang's own code."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from sglang.srt.managers import schedule_batch, scheduler
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.mem_cache import unified_radix_cache

from echo_sgl.batches.lines import replies
from echo_sgl.engine import pool_intake
from echo_sgl.engine.http import turns, weights
from echo_sgl.engine.http.batch_routes import abort


class Manager(TokenizerManager):
    """SGLang's, with nothing but requests of these ids and a scheduler that notes its aborts."""

    def __init__(self, *rids: str) -> None:
        self.enable_metrics = self.enable_lora = False
        self.encoder_dispatch_ready: dict[str, Any] = {}
        self.rid_to_state = {rid: new_state() for rid in rids}
        self.aborted: list[str] = []

    def _dispatch_to_scheduler(self, obj: AbortReq) -> None:
        self.aborted.append(obj.rid)


def new_state() -> Any:
    return ReqState([], False, asyncio.Event(), None, None)  # type: ignore[arg-type]


def test_prompts_of_a_cancelled_line_that_are_sent_after_the_first_abort_end_too() -> None:
    manager = Manager("line_0", "line_1", "line_2", "line_3", "another_0")
    states = {rid: state for rid, state in manager.rid_to_state.items() if rid != "another_0"}
    for sent in ("line_0", "line_1"):
        manager._mark_state_dispatched(sent)
        abort(manager, "line")
    assert manager.aborted == ["line_0", "line_1"]
    manager._mark_state_dispatched("line_2")
    manager._release_req_states_on_failure(states)  # the line's task was cancelled
    assert manager.aborted == ["line_0", "line_1", "line_2"]
    assert "line_3" not in manager.rid_to_state  # nothing sends it any more


def test_a_line_that_is_cancelled_before_it_is_sent_ends_once_it_was() -> None:
    manager = Manager("line", "line_of_another")
    abort(manager, "line")
    assert manager.aborted == []
    manager._mark_state_dispatched("line")
    manager._mark_state_dispatched("line_of_another")
    abort(manager, "line")
    assert manager.aborted == ["line"]


@pytest.mark.parametrize("words", replies._FOR_NOW)
def test_the_words_of_refusals_that_pass_are_those_of_the_engine(words: str) -> None:
    ours, sglangs = (pool_intake, turns, weights), (scheduler, schedule_batch, unified_radix_cache)
    source = "".join(inspect.getsource(module) for module in (*ours, *sglangs))
    assert words in source
    assert replies.Reply(503, {"error": {"message": f"It said: {words}."}}).says_for_now
