"""What places know of the requests that have one or wait for one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from echo_sgl.engine.requests.places import enter, finds_its_kv, new_tokens, placed, queued
from echo_sgl.engine.requests.terms import RequestTerms
from echo_sgl.policies.limits.step_limit import Promise
from echo_sgl.policies.prefills.places import Placed, Places, Queued
from echo_sgl.types import Task


def request(
    rid: str,
    *,
    arrival_s: float = 0.0,
    num_outputs: int = 0,
    task: Task = Task.ONLINE,
    **facts: Any,
) -> Any:
    """Of 100 tokens; the TTFT is 1 s, the TPOT 100 ms."""
    given = {"to_finish": None, "beam_group": None, "session": None, "extend_end": None, **facts}
    terms = RequestTerms(task, Promise(1.0, 0.1), arrival_s, math.inf)
    return SimpleNamespace(
        rid=rid,
        echo_terms=terms,
        output_ids=[1] * num_outputs,
        seqlen=100 + num_outputs,
        finished=lambda: False,
        **given,
    )


def test_who_decodes_online_and_may_sit_out_could_give_its_place_away() -> None:
    decodes = request("decodes", arrival_s=5.0, num_outputs=3)
    others = [
        request("offline", num_outputs=3, task=Task.OFFLINE),
        request("no token yet"),
        request("ends", num_outputs=3, to_finish="aborted"),
    ]
    assert list(placed([*others, decodes])) == [Placed("decodes", pytest.approx(6.3))]


def test_who_waits_is_due_by_its_promise_and_an_offline_request_never() -> None:
    assert queued(request("new", arrival_s=5.0)) == Queued(6.0, has_started=False)
    back = request("back", arrival_s=5.0, num_outputs=2)
    assert queued(back) == Queued(pytest.approx(6.2), has_started=True)
    assert queued(request("offline", task=Task.OFFLINE)).due_s == math.inf


def test_a_request_enters_before_those_with_tokens_that_are_due_later() -> None:
    first, later = request("first", arrival_s=1.0), request("later", arrival_s=2.0, num_outputs=1)
    queue = [first, later]
    enter(Places(3.0), queue, new := request("new", arrival_s=1.5))
    assert [one.rid for one in queue] == ["first", "new", "later"] and queue[1] is new


def test_what_is_left_to_prefill_is_what_no_chunk_has_computed() -> None:
    new, between = request("new"), request("between chunks", extend_end=64)
    assert new_tokens(new, new.echo_terms) == 100
    assert new_tokens(between, between.echo_terms) == 36
    back = request("gave its place away", num_outputs=9)
    back.echo_terms.waiting_since_s = 3.0
    assert new_tokens(back, back.echo_terms) == 1


@pytest.mark.parametrize(
    ("asked", "finds"),
    [
        ({}, True),
        ({"return_logprob": True}, False),
        ({"return_hidden_states": True}, False),
        ({"positional_embed_overrides": [1]}, False),
    ],
)
def test_who_asked_for_more_than_tokens_does_not_find_all_in_the_tree(asked, finds) -> None:
    usual = {
        "return_logprob": False,
        "return_hidden_states": False,
        "positional_embed_overrides": None,
    }
    assert finds_its_kv(SimpleNamespace(**{**usual, **asked})) is finds
