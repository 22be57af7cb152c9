"""What of an online request may join a step beside one that is between two chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from echo_sgl.batch_shape import BatchShape
from echo_sgl.engine.admission import EchoPrefillAdder
from echo_sgl.engine.own_time import OwnTime


def adder(*, left: int | None, limit_tokens: int, page_size: int = 1) -> EchoPrefillAdder:
    """With so much left of SGLang's chunk; the step's limit allows `limit_tokens` more."""
    one = object.__new__(EchoPrefillAdder)
    planner = SimpleNamespace(
        online_chunk_tokens=lambda shape, max_tokens, **_: min(max_tokens, limit_tokens)
    )
    one.control = SimpleNamespace(planner=planner, own_time=OwnTime())
    one.shape = BatchShape()
    one.rem_chunk_tokens, one.page_size = left, page_size
    one._add_chunk = lambda *args: AddReqResult.CONTINUE
    return one


@pytest.mark.parametrize(("to_finish", "path"), [(None, "offline"), ("abort", "online")])
def test_an_offline_request_that_is_to_end_is_not_held_back(to_finish, path):
    """It waits before online ones: SGLang's loop would end with it at each pass."""
    one = object.__new__(EchoPrefillAdder)
    one.can_run_list = []
    one._add_offline = lambda *args: "offline"
    one._add_online_making_room = lambda *args: "online"
    one._makes_place = lambda req: True
    one.running_batch = SimpleNamespace(reqs=[])
    one.control = SimpleNamespace(parked=[], without_turn=[], refuse=lambda *args, **facts: None)
    terms = SimpleNamespace(is_offline=True)
    req = SimpleNamespace(rid="a", echo_terms=terms, to_finish=to_finish)
    assert one.add_one_req(req, False, None) == path
    assert one.preempt_to_schedule(req) is (path == "online")


def request(num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        rid="a", prefix_len=0, host_hit_length=0, full_untruncated_fill_ids=range(num_tokens)
    )


@pytest.mark.parametrize(
    ("left", "limit_tokens", "page_size", "result"),
    [
        (200, 512, 1, AddReqResult.CONTINUE),
        (199, 512, 1, AddReqResult.OTHER),
        (200, 199, 1, AddReqResult.OTHER),
        (207, 512, 16, AddReqResult.OTHER),
        (208, 512, 16, AddReqResult.CONTINUE),
        (None, 512, 1, AddReqResult.CONTINUE),
    ],
)
def test_who_would_be_cut_waits_for_the_request_between_chunks(
    left, limit_tokens, page_size, result
):
    one = adder(left=left, limit_tokens=limit_tokens, page_size=page_size)
    assert one._add_online(request(200), True, None) is result


@pytest.mark.parametrize(
    ("left", "need", "has_states", "result"),
    [
        (512, 200, False, "added"),  # cut to what fits
        (None, 80, False, "added"),
        (None, 200, False, AddReqResult.CONTINUE),
        (None, 200, True, AddReqResult.OTHER),
    ],
)
def test_where_no_prompt_may_be_cut_a_shorter_one_gets_its_chance(left, need, has_states, result):
    one = adder(left=left, limit_tokens=100)
    one.tree_cache = SimpleNamespace(supports_mamba=lambda: has_states)
    one.control.planner.offline_chunk_tokens = one.control.planner.online_chunk_tokens
    one.control.planner.view = SimpleNamespace(is_present=True)
    one.control.refuse_for_time = lambda *args, **facts: None
    one.rem_input_tokens = 1000
    one._add_chunk = lambda *args: "added"
    assert one._add_within_limit(request(need), False, None) == result


def test_without_one_between_chunks_a_request_may_be_cut():
    one = adder(left=100, limit_tokens=512)
    assert one._add_online(request(200), False, None) is AddReqResult.CONTINUE
