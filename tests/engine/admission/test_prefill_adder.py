"""What of an online request may join a step beside one that is between two chunks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from echo_sgl.batch_shape import BatchShape
from echo_sgl.engine.admission.prefill_adder import EchoPrefillAdder, decode_retraction_order
from echo_sgl.engine.requests.refusals import Reason
from echo_sgl.engine.steps.own_time import OwnTime
from echo_sgl.policies.prefills.first_tokens import Joining


def adder(*, left: int | None, limit_tokens: int, page_size: int = 1) -> EchoPrefillAdder:
    """With so much left of SGLang's chunk; the step's limit allows `limit_tokens` more."""
    one = object.__new__(EchoPrefillAdder)
    planner = SimpleNamespace(
        online_chunk_tokens=lambda shape, max_tokens, **_: min(max_tokens, limit_tokens)
    )
    one.control = SimpleNamespace(planner=planner, own_time=OwnTime())
    one.shape, one.can_run_list = BatchShape(), []
    one.rem_chunk_tokens, one.page_size = left, page_size
    one._add_chunk = lambda *args: AddReqResult.CONTINUE
    return one


@pytest.mark.parametrize(("to_finish", "path"), [(None, "offline"), ("abort", "online")])
def test_an_offline_request_that_is_to_end_is_not_held_back(to_finish, path):
    """It waits before online ones: SGLang's loop would end with it at each pass."""
    one = object.__new__(EchoPrefillAdder)
    one.can_run_list, one.rem_chunk_tokens = [], None
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


@pytest.mark.parametrize(("first_due_s", "result"), [(9.0, "OTHER"), (math.inf, "CONTINUE")])
def test_who_would_make_another_late_ends_the_pass_and_is_told_why(first_due_s, result):
    one, asked, told = adder(left=150, limit_tokens=512), [], []
    one.control.planner.view = SimpleNamespace(now_s=8.0)
    one.control.planner.online_starts_later = lambda shape, joining, **_: not asked.append(joining)
    one.control.refuse = lambda *args, **facts: told.append((*args, facts))
    one.first_due_s = first_due_s
    req = request(200)
    req.output_ids = []
    req.echo_terms = SimpleNamespace(is_offline=False, due_s=lambda num_tokens: 9.5)
    assert one._add_online(req, False, None) is AddReqResult[result]
    if result == "OTHER":
        assert asked == [Joining(new_tokens=150, cached_tokens=0, due_s=9.5)]
        assert told == [(Reason.STEP, "a", {"first_due_in_s": 1.0})]
    else:
        assert not asked and not told


def with_answer(
    num_tokens: int, num_outputs: int, max_new_tokens: int, **fields
) -> SimpleNamespace:
    return SimpleNamespace(
        rid="a",
        seqlen=num_tokens + num_outputs,
        output_ids=[1] * num_outputs,
        sampling_params=SimpleNamespace(max_new_tokens=max_new_tokens, ignore_eos=True),
        echo_terms=SimpleNamespace(is_offline=True),
        **fields,
    )


@pytest.mark.parametrize(("num_outputs", "needed"), [(0, 5001), (3500, 501), (4500, 1)])
def test_who_comes_back_needs_room_for_what_it_is_yet_to_generate(num_outputs, needed):
    one = object.__new__(EchoPrefillAdder)
    one.page_size = 1
    req = with_answer(1000, num_outputs, 4000, prefix_len=1000 + num_outputs if num_outputs else 0)
    assert one._needed_tokens(req) == needed


def test_a_prefill_that_ends_in_this_pass_counts_against_the_reserve():
    one = object.__new__(EchoPrefillAdder)
    one.new_token_ratio, one.planned_tokens, one.preempt_list = 0.5, 200, []
    one.memory_budget = SimpleNamespace(total_offset=0)
    one.running_batch = SimpleNamespace(reqs=[])
    one.can_run_list = [with_answer(700, 0, 100)]
    one.control = SimpleNamespace(parked=[])
    asked = []

    def holds_back(req, planned_tokens, num_offline):
        asked.append((planned_tokens, num_offline))
        return False

    limits = SimpleNamespace(has_room=lambda *args: False, holds_back=holds_back)
    assert not one._refuses_for_reserve(with_answer(3000, 0, 500), limits)
    assert asked == [(200 + 500, 2)]  # what it is yet to generate, too: it is not alone


@pytest.mark.parametrize(("num_outputs", "num_noted"), [(0, 1), (5, 0)])
def test_who_comes_back_is_no_hit_of_its_users(num_outputs, num_noted):
    one, noted = object.__new__(EchoPrefillAdder), []
    req = with_answer(100, num_outputs, 50)
    one.can_run_list = [req]
    one._add_online = lambda *args: AddReqResult.CONTINUE
    one.kv_limits = SimpleNamespace(note_online_start=noted.append)
    assert one._add_online_making_room(req, False, None) is AddReqResult.CONTINUE
    assert noted == [req] * num_noted


@pytest.mark.parametrize("left", [0, -3])
def test_nobody_starts_in_a_pass_whose_chunk_is_spent(left: int) -> None:
    """SGLang ends it only while there is memory, and counts whole pages: a chunk of -3 tokens ended
    the scheduler. Nor does anybody give up memory for who cannot start in it."""
    adder = object.__new__(EchoPrefillAdder)
    adder.can_run_list, adder.rem_chunk_tokens = [SimpleNamespace(beam_group=None)], left
    adder._retract_one = lambda: pytest.fail("in vain")
    assert adder.add_one_req(SimpleNamespace(), False, None) is AddReqResult.OTHER


@pytest.mark.parametrize(
    ("left", "limit_tokens", "share", "left_after"),
    [(100, 30, 30, 70), (100, 512, 100, 50), (20, 30, 20, 0), (None, 512, None, None)],
)
def test_what_a_request_leaves_of_its_share_goes_back_to_the_chunk(
    left, limit_tokens, share, left_after, monkeypatch
):
    """A prompt of 50 tokens, cut where its share is less."""
    one, shares = adder(left=left, limit_tokens=limit_tokens), []
    req = request(50)
    req.echo_terms, req.extend_len = SimpleNamespace(is_offline=True), 50

    def add(self, added, *args):
        shares.append(self.rem_chunk_tokens)
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= min(50, self.rem_chunk_tokens)
        self.can_run_list.append(added)
        return AddReqResult.CONTINUE

    monkeypatch.setattr(PrefillAdder, "add_one_req", add)
    one.new_chunked_req, one.budget_state = None, lambda: AddReqResult.CONTINUE
    assert EchoPrefillAdder._add_chunk(one, req, limit_tokens, False, None) is AddReqResult.CONTINUE
    assert shares == [share]
    assert one.rem_chunk_tokens == left_after
    assert one.shape.num_prefills == 1


def test_offline_requests_are_retracted_first_the_last_that_started_before_others():
    tasks = (False, True, False, True)
    reqs = [SimpleNamespace(echo_terms=SimpleNamespace(is_offline=task)) for task in tasks]
    assert decode_retraction_order([2, 3, 0, 1], reqs) == [2, 0, 1, 3]
