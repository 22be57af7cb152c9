"""Whether a batch counts as full after a pass that started nobody."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler

from echo_sgl.engine.decodes.decode_control import StepCounts
from echo_sgl.engine.scheduler import EchoScheduler
from echo_sgl.types import Task


class Running:
    """A batch of SGLang's with somebody in it."""

    batch_is_full = True

    def is_empty(self) -> bool:
        return False


def after_a_pass(monkeypatch: pytest.MonkeyPatch, *, num_retracted: int) -> Any:
    """A scheduler that retracted so many for an online request, which did not start."""
    counts, running = StepCounts(), Running()

    def as_sglang(self: Any, single_pass: None, running: Running) -> tuple[None, Running]:
        counts.num_retractions[Task.OFFLINE] += num_retracted
        running.batch_is_full = False
        return None, running

    monkeypatch.setattr(Scheduler, "_get_new_batch_prefill_raw", as_sglang)
    one = object.__new__(EchoScheduler)
    one.running_batch, one._is_left_for_one = running, False
    one.waiting_queue, one.chunked_req = ["online"], None
    one.step_control = SimpleNamespace(own_time=nullcontext(), counts=counts)
    one.kv_limits = SimpleNamespace(look=lambda: None)
    one.policy = SimpleNamespace()
    for name in ("_park_offline_chunk", "_offline_chunk_tokens"):
        setattr(one, name, lambda: None)
    for name in ("_shed_offline", "_decodes_of_mixed_step", "_queue_offered", "_take_back_offered"):
        setattr(one, name, lambda given: None)
    one._note_online_pass = lambda batch, running: None
    one._get_new_batch_prefill_raw(None, running)
    assert running.batch_is_full  # while it waits, the place is kept for it
    return one


@pytest.mark.parametrize("num_retracted", [0, 1])
def test_what_was_left_for_one_that_went_away_is_there_for_the_pool(
    monkeypatch: pytest.MonkeyPatch, num_retracted: int
) -> None:
    one = after_a_pass(monkeypatch, num_retracted=num_retracted)
    assert not one._is_full(one.running_batch)
    one.waiting_queue = []
    assert one._is_full(one.running_batch) is (num_retracted == 0)
    assert one.running_batch.batch_is_full is (num_retracted == 0)
