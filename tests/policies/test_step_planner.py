"""What offline work joins a step, held against its limit; a linear clock makes it exact."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape
from echo_sgl.config import SloConfig, parse_config
from echo_sgl.policies.decodes.contexts import NOBODY, Contexts
from echo_sgl.policies.decodes.replacement import OnlineDecode
from echo_sgl.policies.planners import create_step_planner
from echo_sgl.policies.prefills.first_tokens import Joining
from tests.policies.plans import NOW_S, Attention, Clockwork, Unknown, begin, decode, planner


def chunk(plan, max_tokens=1000, page_size=1):
    return plan.offline_chunk_tokens(
        BatchShape(), cached_tokens=0, max_tokens=max_tokens, page_size=page_size
    )


def test_an_offline_chunk_leaves_online_decodes_the_time_of_their_own_step():
    plan = begin(planner(), decodes=2, due_in_s=0.3005)
    assert chunk(plan) == 280


def test_a_chunk_below_the_smallest_waits():
    plan = begin(planner(min_chunk_tokens=64), decodes=2, due_in_s=0.08)
    assert chunk(plan) == 0
    assert chunk(plan, max_tokens=30) == 30


def test_a_chunk_is_whole_pages():
    assert chunk(begin(planner(), decodes=1, due_in_s=0.110), page_size=16) == 96


def test_beside_decodes_in_the_same_step_the_whole_limit_counts():
    plan, shape = begin(planner(), decodes=2, due_in_s=0.3005), BatchShape()
    for _ in range(5):
        shape.add_decode(100)
    tokens = plan.offline_chunk_tokens(shape, cached_tokens=0, max_tokens=1000, page_size=1)
    assert tokens == 250


def test_without_online_requests_a_step_is_as_long_as_one_may_have_to_wait():
    assert chunk(begin(planner(max_stall_s=0.5))) == 500


def test_without_online_requests_something_always_runs():
    plan = begin(planner(max_stall_s=0.0, min_chunk_tokens=64))
    assert chunk(plan) == 64
    shape = BatchShape()
    shape.add_prefill(64)
    more = {"cached_tokens": 0, "max_tokens": 1000, "page_size": 1}
    assert plan.offline_chunk_tokens(shape, **more) == 0, "beside another there is one already"
    assert not plan.all_decode(Contexts.of([100, 100]))
    assert plan.choose_decodes(lambda: [decode(1), decode(2)]) == {"1"}


@pytest.mark.parametrize("online", [{"waiting": 1}, {"decodes": 1}])
def test_who_waits_is_there_as_much_as_who_decodes(online):
    plan = begin(planner(max_stall_s=0.0, min_chunk_tokens=64), **online)
    assert chunk(plan) == 0
    assert plan.online_waits is ("waiting" in online)


@pytest.mark.parametrize(("waiting_tokens", "prefill_s"), [(200, 0.2), (512, 0.512), (5120, 5.12)])
def test_all_that_waits_takes_as_many_chunks_as_there_are(waiting_tokens, prefill_s):
    view = begin(planner(), waiting=3, waiting_tokens=waiting_tokens).view
    assert view.prefill_s == pytest.approx(prefill_s)
    assert view.chunk_s == pytest.approx(min(prefill_s, 0.512))


def test_what_was_no_traffic_is_forgotten_by_all_that_learn_from_it():
    slo = SloConfig(ttft_s=1.0, tpot_s=100.0)
    plan = planner(slo=slo, limit="budget", budget_s=0.3, adapt_budget=True)
    before_s = plan.arrival_wait.left_s(NOW_S, 0.0, Clockwork())
    for _ in range(20):
        plan.note_online_start(NOW_S, 100)
        plan.limit.note_request(False)
    assert begin(plan, decodes=1).limit_s == pytest.approx(0.24)
    plan.forget_traffic()
    assert begin(plan, decodes=1).limit_s == 0.3
    assert plan.arrival_wait.left_s(NOW_S, 0.0, Clockwork()) == before_s


def test_an_online_request_that_starts_takes_the_room_of_one():
    plan = planner()
    plan.gathering.note_end()
    plan.note_online_start(NOW_S, 100)
    assert plan.gathering.num_places == 0


def test_without_online_decodes_the_stall_comes_on_top_of_the_least_step():
    plan = begin(planner(max_stall_s=0.03))
    assert plan.all_decode(Contexts.of([100] * 4))
    assert not plan.all_decode(Contexts.of([100] * 5))


def online_chunk(plan, max_tokens=1000, page_size=1):
    return plan.online_chunk_tokens(
        BatchShape(), cached_tokens=0, max_tokens=max_tokens, page_size=page_size
    )


@pytest.mark.parametrize("due_in_s", [-1.0, 0.01, 0.3005, 9.0])
def test_an_online_chunk_is_what_sglang_makes_it(due_in_s):
    plan = begin(planner(), decodes=2, due_in_s=due_in_s, first_due_in_s=5.0, waiting=1)
    assert online_chunk(plan) == 1000


def cutting_planner(estimator=None):
    return planner(estimator, online_chunks="slack")


def test_a_limit_that_cuts_makes_an_online_chunk_as_long_as_online_decodes_allow():
    plan = begin(cutting_planner(), decodes=2, due_in_s=0.3005, first_due_in_s=5.0, waiting=1)
    assert online_chunk(plan) == 280


def test_an_online_chunk_that_is_cut_always_makes_progress():
    plan = begin(cutting_planner(), decodes=2, due_in_s=-1.0, first_due_in_s=5.0, waiting=1)
    assert online_chunk(plan, page_size=16) == 64
    assert online_chunk(plan, page_size=16, max_tokens=50) == 50, "all there is"
    plan = begin(cutting_planner(Unknown()), decodes=2, due_in_s=-1.0, waiting=1)
    assert online_chunk(plan) == 1000, "while nothing is known it is not cut"


def test_a_first_token_that_is_more_urgent_is_not_cut_into_chunks():
    plan = begin(cutting_planner(), decodes=2, due_in_s=0.3005, first_due_in_s=0.2, waiting=1)
    assert online_chunk(plan) == 1000


def test_offline_decodes_join_up_to_the_limit():
    plan = begin(planner(), decodes=2, due_in_s=0.055)
    assert plan.all_decode(Contexts.of([100] * 3))
    assert not plan.all_decode(Contexts.of([100] * 4))
    chosen = plan.choose_decodes(lambda: [decode(n, context=100 + n) for n in range(4)])
    assert chosen == {"0", "1", "2"}


def test_a_claim_goes_by_lateness_then_by_waiting_then_by_what_runs():
    plan = begin(planner())
    late = decode(5, is_running=False)._replace(laxity_s=-1.0)
    overdue = decode(4, is_running=False)._replace(waiting_since_s=NOW_S - 11)
    others = [decode(3, is_running=False), decode(2), decode(1)]
    claims = plan.in_order_of_claim([*others, overdue, late], {"1", "2", "3", "4", "5"})
    assert [one.rid for one in claims] == ["5", "4", "1", "2", "3"]
    assert plan.in_order_of_claim(others, {"2"}) == [others[1]]


def test_beside_a_late_online_decode_nobody_offline_decodes():
    plan = begin(planner(), decodes=2, due_in_s=-0.1)
    assert plan.choose_decodes(lambda: [decode(1), decode(2)]) == set()


def test_while_an_online_request_waits_for_its_prefill_one_offline_decode_goes_on():
    """SGLang may put that prefill off until somebody ends: nobody would."""
    plan = begin(planner(), waiting=1, first_due_in_s=-1.0)
    assert plan.limit_s < 0
    assert plan.choose_decodes(lambda: [decode(2), decode(1)]) == {"1"}


def test_the_most_decodes_of_a_step_count_online_ones():
    plan = begin(planner(max_decodes=5), decodes=2)
    assert plan.all_decode(Contexts.of([100] * 3))
    assert not plan.all_decode(Contexts.of([100] * 4))


@pytest.mark.parametrize(("decodes", "waiting"), [(6, 0), (4, 2), (7, 5)])
def test_who_waits_takes_a_place_too(decodes, waiting):
    plan = planner(max_decodes=8, place_share=0.75, place_trend_s=0.0)
    begin(plan, decodes=decodes, due_in_s=1.0, waiting=waiting)
    assert plan.limit_s == pytest.approx(0.01 * decodes), "what they take alone"
    assert not plan.all_decode(Contexts.of([100]))
    begin(plan, decodes=4, due_in_s=1.0)
    assert plan.limit_s == pytest.approx(1.0)


def test_offline_work_yields_to_a_burst_and_not_to_as_many_that_are_always_there():
    plan = planner(max_decodes=8, place_share=0.75, place_trend_s=10.0)
    begin(plan, decodes=4, due_in_s=1.0)
    assert plan.limit_s == pytest.approx(0.04), "four at once: eight if they go on coming"
    assert (plan.view.places_taken, plan.view.places_ahead) == (0.5, 1.0)
    begin(plan, decodes=4, due_in_s=1.0, now_s=NOW_S + 600.0)
    assert plan.limit_s == pytest.approx(1.0)


@pytest.mark.parametrize(("num_online", "num_offline"), [(3, 5), (9, 0), (0, 12)])
def test_beside_online_requests_a_step_does_not_outgrow_the_largest_graph(num_online, num_offline):
    config = parse_config({"slo": {"ttft_s": 99.0, "tpot_s": 99.0}, "steps": {"max_stall_s": 9.0}})
    plan = create_step_planner(
        config, Clockwork(), max_requests=64, chunk_tokens=512, captured_batch_sizes=[1, 2, 4, 8]
    )
    begin(plan, decodes=num_online)
    assert plan.all_decode(Contexts.of([100] * num_offline))
    assert plan.all_decode(Contexts.of([100] * (num_offline + 1))) == (num_online == 0)
    chosen = plan.choose_decodes(lambda: [decode(number) for number in range(12)])
    assert len(chosen) == num_offline


def test_while_nothing_is_known_offline_work_beside_online_requests_is_small():
    plan = begin(planner(Unknown(), min_chunk_tokens=64), decodes=3, due_in_s=9.0)
    assert chunk(plan) == 64
    shape = BatchShape()
    shape.add_prefill(64)
    assert plan.offline_chunk_tokens(shape, cached_tokens=0, max_tokens=1000, page_size=1) == 0
    assert plan.all_decode(Contexts.of([100] * 3))
    assert not plan.all_decode(Contexts.of([100] * 4))
    chosen = plan.choose_decodes(lambda: [decode(n, is_running=n > 1) for n in range(5)])
    assert chosen == {"2", "3", "4"}


def test_while_nothing_is_known_and_nobody_is_online_everything_runs():
    plan = begin(planner(Unknown()))
    assert chunk(plan) == 1000
    assert plan.all_decode(Contexts.of([100] * 20))


@given(
    decodes=st.integers(0, 5),
    due_in_s=st.floats(-1, 2),
    contexts=st.lists(st.integers(1, 1000), max_size=20),
)
def test_online_requests_are_late_only_if_they_are_late_without_offline_work(
    decodes, due_in_s, contexts
):
    plan = begin(planner(), decodes=decodes, due_in_s=due_in_s if decodes else math.inf)
    choices = [decode(n, context=length) for n, length in enumerate(contexts)]
    chosen = plan.choose_decodes(lambda: choices)
    if chosen and decodes:
        assert 0.010 * (decodes + len(chosen)) <= due_in_s + 1e-9


def test_a_step_that_only_prefills_makes_up_for_the_decodes_that_wait():
    plan = begin(planner(), decodes=3, due_in_s=0.1)
    assert plan.room_s(BatchShape()) == pytest.approx(0.1 - 0.03)
    mixed = BatchShape()
    mixed.add_decode(100)
    assert plan.room_s(mixed) == pytest.approx(0.1)
    assert plan.slack_s == pytest.approx(0.1)


def test_what_one_more_would_take_is_told_and_nothing_is_added():
    plan = begin(planner(min_chunk_tokens=64), decodes=3, due_in_s=0.1)
    shape = BatchShape()
    assert plan.smallest_chunk_s(shape) == pytest.approx(0.064)
    assert plan.smallest_chunk_s(shape, max_tokens=10) == pytest.approx(0.010)
    assert [plan.with_decode_s(100), plan.with_decode_s(100)] == pytest.approx([0.04, 0.04])
    assert len(shape) == 0


@given(due_in_s=st.floats(0.0, 2.0), tokens=st.integers(1, 200))
def test_who_is_refused_for_time_has_a_smallest_chunk_beyond_its_room(due_in_s, tokens):
    plan = begin(planner(), decodes=2, due_in_s=due_in_s)
    refused = chunk(plan, max_tokens=tokens) == 0
    too_long = plan.smallest_chunk_s(BatchShape(), max_tokens=tokens) > plan.room_s(BatchShape())
    assert refused == too_long


@example("in-order", 0, 0.0, [502], [(446, 0.0), (1, 0.0)], 1)
@given(
    selection=st.sampled_from(["in-order", "shortest", "mix", "bottleneck", "uncached"]),
    decodes=st.integers(0, 3),
    due_in_s=st.floats(-1, 2),
    running=st.lists(st.integers(1, 1000), max_size=8),
    parked=st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 20)), min_size=1, max_size=8),
    max_decodes=st.integers(1, 12),
)
def test_what_is_settled_is_what_would_be_chosen(
    selection, decodes, due_in_s, running, parked, max_decodes
):
    plan = begin(
        planner(Attention(), selection=selection, max_decodes=max_decodes, max_stall_s=0.1),
        decodes=decodes,
        due_in_s=due_in_s if decodes else math.inf,
    )
    choices = [decode(number, context=length) for number, length in enumerate(running)]
    for length, parked_s in parked:
        one = decode(len(choices), context=length, is_running=False)
        choices.append(one._replace(waiting_since_s=NOW_S - parked_s))
    is_settled = plan.is_settled(
        Contexts.of(running),
        shortest_parked=min(length for length, _ in parked),
        parked_since_s=NOW_S - max(parked_s for _, parked_s in parked),
    )
    chosen = plan.choose_decodes(lambda: choices)
    if is_settled:
        assert chosen == {one.rid for one in choices if one.is_running}
    elif decodes and (not running or max(parked_s for _, parked_s in parked) <= 10):
        # Without online decodes one decodes at last, even where none fits.
        is_drawn = selection in ("mix", "bottleneck")
        assert chosen != {one.rid for one in choices if one.is_running} or is_drawn


def test_a_full_step_beside_one_that_sits_out_is_settled_until_that_one_is_overdue():
    plan = begin(planner(), decodes=2, due_in_s=0.055)
    running, parked = Contexts.of([100] * 3), {"shortest_parked": 100}
    assert plan.is_settled(running, **parked, parked_since_s=NOW_S - 5)
    assert not plan.is_settled(running, **parked, parked_since_s=NOW_S - 15)
    assert not plan.is_settled(Contexts.of([100]), **parked, parked_since_s=NOW_S - 5)


def test_where_all_sit_out_it_is_settled_however_long_until_one_fits_beside_online_decodes():
    parked = {"shortest_parked": 100, "parked_since_s": NOW_S - 15}
    assert begin(planner(), decodes=2, due_in_s=0.025).is_settled(NOBODY, **parked)
    assert not begin(planner(), decodes=2, due_in_s=0.055).is_settled(NOBODY, **parked)
    assert not begin(planner(), decodes=0).is_settled(NOBODY, **parked), "then one has to decode"


def packed(*due_in_s: float) -> list[OnlineDecode]:
    return [OnlineDecode(f"r{n}", NOW_S + in_s, 100) for n, in_s in enumerate(due_in_s)]


def test_online_decodes_are_packed_where_a_step_of_all_is_too_long_for_the_first():
    plan = begin(planner(pack=True), decodes=4, due_in_s=0.025)
    assert plan.must_pack
    assert plan.pack_online(packed(0.025, 0.03, 1.0, 2.0)) == {"r2", "r3"}
    assert not begin(planner(pack=True), decodes=4, due_in_s=0.045).must_pack
    assert not begin(planner(pack=False), decodes=4, due_in_s=0.025).must_pack
    assert not begin(planner(pack=True, limit="off"), decodes=4, due_in_s=0.025).must_pack
    assert not begin(planner(Unknown(), pack=True), decodes=4, due_in_s=0.025).must_pack


def test_who_waits_for_a_first_token_counts_where_online_decodes_are_packed():
    plan = begin(planner(pack=True), decodes=4, due_in_s=9.0, first_due_in_s=0.025, waiting=1)
    assert plan.must_pack
    assert plan.pack_online(packed(9.0, 9.0, 9.0, 9.0)) == {"r2", "r3"}


def test_an_adaptive_batch_size_holds_for_online_decodes_too():
    plan = begin(planner(pack=True, batch_size="adaptive"), decodes=20, due_in_s=1.0)
    assert plan.must_pack  # 16, after one step in which they fitted
    assert len(plan.pack_online(packed(*(1.0 + number for number in range(20))))) == 4
    assert not begin(plan, decodes=20, due_in_s=1.0).must_pack


def test_packed_online_prefills_are_as_many_as_end_before_the_first_is_due():
    plan, shape = begin(planner(pack=True), decodes=1, due_in_s=0.25, waiting=2), BatchShape()
    shape.add_prefill(200, 0)
    joining = Joining(100, 0, NOW_S + 9.0)
    assert plan.online_starts_later(shape, joining, first_due_s=NOW_S + 9.0)
    assert not plan.online_starts_later(shape, Joining(40, 0, NOW_S + 9.0), first_due_s=NOW_S + 9.0)
    plan = begin(planner(pack=True), decodes=1, due_in_s=0.35, waiting=2)
    assert not plan.online_starts_later(shape, joining, first_due_s=NOW_S + 9.0)
    assert plan.online_starts_later(shape, joining, first_due_s=NOW_S + 0.25)
