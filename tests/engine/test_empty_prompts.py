"""A prompt of no tokens is refused: SGLang's scheduler would end with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler

from echo_sgl.engine.pool_intake import NO_PROMPT
from echo_sgl.engine.scheduler import EchoScheduler


@pytest.fixture
def one(monkeypatch) -> Any:
    """A scheduler that only notes whom it refuses, and whom SGLang queues."""
    scheduler = object.__new__(EchoScheduler)
    scheduler.echo_clock = SimpleNamespace(now_s=0.0)
    scheduler.refused, scheduler.queued, scheduler.waiting_queue = [], [], []
    scheduler._reject = lambda req, status, message: scheduler.refused.append((status, message))

    def queue(self: Any, req: Any, is_retracted: bool = False) -> None:
        self.queued.append(req)

    monkeypatch.setattr(Scheduler, "_add_request_to_queue", queue)
    return scheduler


def request(*tokens: int, is_offline: bool, to_finish: Any = None) -> Any:
    terms = SimpleNamespace(is_offline=is_offline, waiting_since_s=None)
    fields = {"origin_input_ids": tokens, "is_retracted": False, "to_finish": to_finish}
    return SimpleNamespace(rid="any", echo_terms=terms, **fields)


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_prompt_of_no_tokens_is_refused(one, is_offline):
    one._add_request_to_queue(request(is_offline=is_offline))
    assert one.refused == [(400, NO_PROMPT)]
    assert one.queued == []


def test_others_are_queued(one):
    ended = request(0, is_offline=True, to_finish="an error of SGLang's")
    for req in (request(5, is_offline=False), ended):
        one._add_request_to_queue(req)
    assert (one.refused, len(one.queued)) == ([], 2)
