"""What requests of one prefill step would compute twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_policy import AddReqResult

from echo_sgl.engine.admission.prefill_adder import MAX_PREFIX_WAITS
from echo_sgl.engine.admission.shared_prefixes import shared_tokens
from echo_sgl.engine.requests.refusals import Reason
from echo_sgl.policies.prefills.first_tokens import MIN_SHARED_TOKENS, Joining
from tests.engine.admission.test_prefill_adder import adder

few = st.integers(0, 3 * MIN_SHARED_TOKENS)


def request(ids: list[int], *, cached: int = 0, computes: int | None = None, salt: str = ""):
    """One with this prompt; `computes`: of what is not cached, in the step at hand."""
    return SimpleNamespace(
        rid="a",
        origin_input_ids=ids,
        full_untruncated_fill_ids=ids,
        prefix_len=cached,
        host_hit_length=0,
        extend_end=len(ids) if computes is None else cached + computes,
        extra_key=None,
        cache_salt=salt,
        output_ids=[],
        echo_terms=SimpleNamespace(is_offline=False, due_s=lambda num_tokens: 9.0),
        _compute_max_prefix_len=lambda num_tokens: num_tokens - 1,
    )


@given(
    common=few, own=few, others=few, cached=few, computes=few, page_size=st.sampled_from((1, 16))
)
def test_it_is_what_both_begin_with_and_is_computed_now(
    common, own, others, cached, computes, page_size
):
    start = list(range(common))
    one = request([*start, *[-1] * own, -2], cached=0)
    other = request([*start, *[-3] * others, -4], cached=cached, computes=computes)
    most = min(common, cached + computes, len(one.origin_input_ids) - 1)
    most = most // page_size * page_size
    for known in {0, common // 2 // page_size * page_size}:
        expected = most - known if most - known >= MIN_SHARED_TOKENS else 0
        assert shared_tokens(one, known, [other], page_size) == expected


def test_of_several_the_one_counts_that_shares_most():
    others = [request([1] * length + [2] * 100) for length in (40, 90, 60)]
    assert shared_tokens(request([1] * 200), 0, others, 1) == 90
    assert shared_tokens(request([1] * 200), 0, [], 1) == 0


def test_one_in_flight_that_was_set_aside_since_computes_nothing_more():
    other = request([1] * 100)
    other.extend_end = None
    assert shared_tokens(request([1] * 100), 0, [other], 1) == 0


def test_other_salts_share_nothing():
    one, other = request([1] * 100), request([1] * 100, salt="of another")
    assert shared_tokens(one, 0, [other], 1) == 0


@pytest.mark.parametrize("where", ["inflight", "can_run_list"])
@pytest.mark.parametrize(
    ("has_tree", "shares", "waits"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_who_begins_like_another_ends_the_pass_and_is_told_why(where, has_tree, shares, waits):
    one, asked, told = adder(left=512, limit_tokens=512), [], []
    one.tree_cache = SimpleNamespace(supports_prefix_sharing=lambda: has_tree)
    one.control.refuse = lambda *args, **facts: told.append((*args, facts))

    def wait(shape, joining, shared):
        asked.append((joining, shared))
        return True

    one.control.planner.online_waits_for_prefix = wait
    one.control.planner.shares_online = shares
    setattr(one, where, [request([1] * 100)])
    result = one._add_online(request([1] * 90 + [2] * 60, cached=20), False, None)
    assert result is (AddReqResult.OTHER if waits else AddReqResult.CONTINUE)
    assert asked == ([(Joining(130, 20, 9.0), 70)] if waits else [])
    assert told == ([(Reason.PREFIX, "a", {})] if waits else [])


def test_who_waited_and_found_nothing_waits_no_more():
    one, told = adder(left=512, limit_tokens=512), []
    one.tree_cache = SimpleNamespace(supports_prefix_sharing=lambda: True)
    one.control.refuse = lambda *args, **facts: told.append(args)
    one.control.planner.online_waits_for_prefix = lambda shape, joining, shared: True
    one.control.planner.shares_online = True
    one.can_run_list = [request([1] * 200)]
    req = request([1] * 190)
    results = [one._add_online(req, False, None) for _ in range(MAX_PREFIX_WAITS + 1)]
    assert results == [AddReqResult.OTHER] * MAX_PREFIX_WAITS + [AddReqResult.CONTINUE]
    req.prefix_len = 100  # a chunk of it was computed meanwhile
    assert one._add_online(req, False, None) is AddReqResult.OTHER


@pytest.mark.parametrize(
    ("common", "has_tree", "waits"),
    [
        (MIN_SHARED_TOKENS + 20, True, True),
        (MIN_SHARED_TOKENS + 19, True, False),  # less than is worth a step beyond what is cached
        (MIN_SHARED_TOKENS + 20, False, False),
    ],
)
def test_an_offline_request_waits_for_what_a_neighbour_computes_of_its_prompt(
    common, has_tree, waits
):
    one = adder(left=512, limit_tokens=512)
    one.tree_cache = SimpleNamespace(supports_prefix_sharing=lambda: has_tree)
    req = request([1] * common + [2] * 100, cached=20)
    one.inflight = [request([1] * common + [3] * 100), request([4] * 300)]
    assert not one._prefix_is_being_computed(req)  # only the last one's is that of its neighbour
    one.can_run_list = one.inflight[:1]
    assert one._prefix_is_being_computed(req) is waits


def test_a_prompt_whose_rest_is_shorter_than_what_is_worth_a_step_waits_for_nobody():
    one = adder(left=512, limit_tokens=512)
    one.tree_cache = SimpleNamespace(supports_prefix_sharing=lambda: True)
    one.can_run_list = [request([1] * 500)]
    for num_tokens, waits in ((MIN_SHARED_TOKENS + 20, False), (MIN_SHARED_TOKENS + 21, True)):
        assert one._prefix_is_being_computed(request([1] * num_tokens, cached=20)) is waits
