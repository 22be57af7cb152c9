"""Whose memory and place may be taken, and whose may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from echo_sgl.engine.admission.room import RoomAdder
from echo_sgl.engine.decodes.retraction import first_out, uncached_tokens
from echo_sgl.engine.requests.places import finds_its_kv, placed
from echo_sgl.engine.requests.roster import may_sit_out


def request(rid: str, *, uncached: int = 10, offline: bool = True, **fields: Any) -> Any:
    usual = {
        "finished": lambda: False,
        "to_finish": None,
        "beam_group": None,
        "session": None,
        "return_logprob": False,
        "return_hidden_states": False,
        "positional_embed_overrides": None,
        "output_ids": [1],
        "seqlen": uncached,
        "kv": SimpleNamespace(cache_protected_len=0),
        "echo_sequence": 0,
        "echo_terms": SimpleNamespace(is_offline=offline, due_s=lambda num: 0.0),
    }
    return SimpleNamespace(rid=rid, **usual | fields)


def test_who_loses_the_least_goes_first_but_no_online_one():
    running = [request("long", uncached=90), request("short"), request("online", offline=False)]
    assert first_out([], running) == "short"
    assert first_out([request("parked", uncached=500)], running) == "parked"
    assert first_out([], running[2:]) is None


def test_what_the_tree_keeps_is_not_lost():
    cached = request("cached", uncached=90, kv=SimpleNamespace(cache_protected_len=85))
    assert uncached_tokens(cached) == 5
    assert first_out([], [request("short"), cached]) == "cached"


def test_logprobs_that_are_on_their_way_are_waited_for():
    """SGLang would give the next request of the step those of who was retracted meanwhile."""
    scored, plain = request("scored", return_logprob=True), request("plain", uncached=90)
    assert first_out([], [scored, plain]) == "scored"
    assert first_out([], [scored, plain], launched=[scored, plain]) == "plain"
    assert first_out([scored], [], launched=[scored]) is None


@pytest.mark.parametrize(
    ("fields", "is_able"),
    [
        ({}, True),
        ({"session": SimpleNamespace(streaming=False)}, True),
        ({"session": SimpleNamespace(streaming=True)}, False),
        ({"finished": lambda: True}, False),
        ({"to_finish": "abort"}, False),
        ({"beam_group": object()}, False),
    ],
)
def test_who_would_free_nothing_or_ends_keeps_what_it_holds(fields: dict[str, Any], is_able: bool):
    """A streaming session keeps the row and the KV of a turn that is retracted."""
    assert may_sit_out(request("a", **fields)) is is_able
    online = request("b", offline=False, **fields)
    assert bool(list(placed([online]))) is is_able
    assert (first_out([], [request("a", **fields)]) == "a") is is_able


@pytest.mark.parametrize(("asked", "is_able"), [(False, True), ("last", True), (True, False)])
def test_hidden_states_of_all_tokens_come_from_one_prefill(asked: bool | str, is_able: bool):
    """SGLang would put those of a second one among those of the answer."""
    req = request("a", return_hidden_states=asked)
    assert may_sit_out(req)
    assert (first_out([req], []) == "a") is is_able
    assert finds_its_kv(req) is is_able


@pytest.mark.parametrize(
    ("keeps", "fits"),
    [({}, True), ({"beam_group": object()}, False), ({"return_hidden_states": True}, False)],
)
def test_nobody_is_retracted_for_what_others_would_not_give_up_either(
    keeps: dict[str, Any], fits: bool
):
    running, parked = request("plain", uncached=100), request("large", uncached=300, **keeps)
    one = object.__new__(RoomAdder)
    one.running_batch, one.preempt_list = SimpleNamespace(reqs=[running]), []
    one.control = SimpleNamespace(parked=[parked])
    one.tree_cache = SimpleNamespace(echo_core=None)
    one.memory_budget, one.new_token_ratio, one.page_size = SimpleNamespace(), 0.0, 1
    one.memory_budget.remaining_total = 0
    limits = SimpleNamespace(max_new_tokens=50, ignore_eos=False)
    running.last_node = parked.last_node = 0
    running.sampling_params = parked.sampling_params = limits
    online = request("online", uncached=200, offline=False, prefix_len=0, sampling_params=limits)
    assert one._can_make_room(online) is fits
