"""How long an online request that arrives may be kept waiting."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape, StepKind
from echo_sgl.config import SloConfig
from echo_sgl.policies.limits.arrival_wait import (
    LEAST_SHARE,
    NUM_PROMPTS,
    RATE_WINDOW_S,
    UNSEEN_SHARE,
    USES,
    ArrivalWait,
)
from tests.policies.plans import CHUNK_TOKENS, Clockwork, begin, planner

TTFT_S = 1.0


def arrival_wait(*, ttft_s=TTFT_S, share=1.0, most_s=10.0) -> ArrivalWait:
    return ArrivalWait(ttft_s=ttft_s, share=share, most_s=most_s, chunk_tokens=CHUNK_TOKENS)


def after(wait: ArrivalWait, *starts: tuple[float, int]) -> ArrivalWait:
    for now_s, new_tokens in starts:
        wait.note_start(now_s, new_tokens)
    return wait


def longest_s(wait: ArrivalWait, now_s: float, alone_s: float = 0.0) -> float:
    """On a device that takes 1 ms for each token of a prefill."""
    return wait.longest_s(now_s, alone_s, Clockwork())


def test_in_calm_hours_it_is_the_share_of_what_a_prefill_and_a_decode_leave():
    wait = after(arrival_wait(share=0.7), (0.0, 200))
    assert longest_s(wait, 1000.0) == pytest.approx(0.7 * 0.8)
    assert longest_s(wait, 1000.0, alone_s=0.1) == pytest.approx(0.7 * 0.7)


def test_while_many_come_each_has_to_wait_for_others_too():
    many = after(arrival_wait(), *((second / 4, 200) for second in range(100)))
    # Four a second, so 0.8 s of each second; whatever the window, which is longer than a second.
    assert longest_s(many, 25.0) == pytest.approx(1 / 1.8 - 0.2, rel=0.15)
    assert longest_s(many, 25.0 + 20 * RATE_WINDOW_S) == pytest.approx(0.8)


def test_it_is_for_long_prompts_and_for_few_longer_ones():
    lengths = [300] * 12 + [700] * 2 + [100] * 50
    wait = after(arrival_wait(), *((0.0, tokens) for tokens in lengths))
    assert longest_s(wait, 1000.0) == pytest.approx(0.7)
    after(wait, *((1000.0, 100) for _ in range(NUM_PROMPTS)))
    assert longest_s(wait, 2000.0) == pytest.approx(0.9), "those of before are forgotten"


def test_a_prompt_of_several_chunks_takes_as_many_steps():
    wait = after(arrival_wait(ttft_s=10.0), (0.0, 3 * CHUNK_TOKENS))
    assert longest_s(wait, 1000.0) == pytest.approx(10.0 - 3 * CHUNK_TOKENS / 1000)


@pytest.mark.parametrize("ttft_s", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("predictor", [None, Clockwork()])
def test_until_an_online_prompt_was_seen_half_of_the_ttft_is_for_its_prefill(predictor, ttft_s):
    wait = arrival_wait(ttft_s=ttft_s, share=0.5)
    assert wait.longest_s(0.0, 0.0, predictor) == 0.5 * UNSEEN_SHARE * ttft_s


def test_requests_that_were_no_traffic_are_forgotten():
    wait = after(arrival_wait(), (0.0, 200), (0.0, 300))
    wait.forget()
    assert longest_s(wait, 0.0) == UNSEEN_SHARE * TTFT_S
    assert longest_s(after(wait, (0.0, 100)), 1000.0) == pytest.approx(0.9)


@pytest.mark.parametrize("ttft_s", [0.2, 1.0, 4.0])
def test_prompts_that_take_all_of_it_leave_offline_work_a_little(ttft_s):
    wait = after(arrival_wait(ttft_s=ttft_s), (0.0, 5000))
    assert longest_s(wait, 0.0) == LEAST_SHARE * ttft_s


def test_without_a_promise_it_is_what_the_config_names():
    wait = after(arrival_wait(ttft_s=0.0, most_s=0.3), (0.0, 5000))
    assert longest_s(wait, 0.0) == 0.3


def test_what_the_estimator_learns_counts_in_the_end():
    wait = after(arrival_wait(), (0.0, 200))
    assert longest_s(wait, 1000.0) == pytest.approx(0.8)

    class Slower(Clockwork):
        def predict_s(self, step):
            return 2 * super().predict_s(step)

    found_s = [wait.longest_s(1000.0, 0.0, Slower()) for _ in range(USES)]
    assert (found_s[0], found_s[-1]) == pytest.approx((0.8, 0.6))


@given(
    starts=st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 10_000))),
    now_s=st.floats(-1e4, 1e4),
    alone_s=st.floats(0.0, 10.0),
)
def test_whatever_the_clock_does_it_stays_between_its_bounds(starts, now_s, alone_s):
    wait = after(arrival_wait(most_s=0.5), *starts)
    assert LEAST_SHARE * TTFT_S <= longest_s(wait, now_s, alone_s) <= 0.5


@given(gaps_s=st.lists(st.floats(0.0, 5.0), min_size=1), waits_s=st.lists(st.floats(0.0, 5.0)))
def test_while_nobody_comes_it_only_grows(gaps_s, waits_s):
    wait, now_s = arrival_wait(), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        wait.note_start(now_s, 100)
    before_s = -math.inf
    for wait_s in waits_s:
        now_s += wait_s
        found_s = longest_s(wait, now_s)
        assert found_s >= before_s - 1e-12
        before_s = found_s


def test_a_planner_gives_a_step_as_much_as_who_arrives_may_wait():
    plan = planner(slo=SloConfig(ttft_s=1.0, tpot_s=100.0), stall_share=0.5)
    assert begin(plan).limit_s == pytest.approx(0.25)
    plan.note_online_start(0.0, 200)
    assert begin(plan, now_s=1000.0).limit_s == pytest.approx(0.4)
    begin(plan, decodes=10, due_in_s=90.0, now_s=1000.0)
    assert plan.limit_s == pytest.approx(0.1 + 0.5 * 0.7), "beside decodes that take 0.1 s"


SPREADS = {StepKind.PREFILL: 4.0, StepKind.DECODE: 2.0, StepKind.MIXED: 1.0}


class Uneven(Clockwork):
    """Steps may take several times as long as expected, those that prefill longer than decodes."""

    def spread(self, kind):
        return SPREADS[kind]

    @property
    def upper(self):
        return Upper()


class Upper(Clockwork):
    def predict_s(self, step):
        return SPREADS[step.kind] * super().predict_s(step)


def test_a_step_that_is_expected_to_take_no_longer_may_take_as_long_as_such_steps_do():
    slo = SloConfig(ttft_s=1.0, tpot_s=100.0)
    plan = planner(Uneven(), slo=slo, stall_share=0.5)
    plan.note_online_start(0.0, 200)
    begin(plan, decodes=10, due_in_s=900.0, now_s=1000.0)
    wait_s = 0.5 * (1.0 - 0.2 - 0.1)
    assert plan.limit_s == pytest.approx(2.0 * (0.1 + wait_s)), "at most, decodes expected in 0.1 s"
    assert plan.prefill_room_s == pytest.approx(4.0 * wait_s)
    assert offline_chunk(plan) == pytest.approx(1000 * wait_s, abs=1.5), "1 ms a token, as expected"


def test_the_longest_stall_is_what_a_step_takes_at_most():
    slo = SloConfig(ttft_s=1.0, tpot_s=100.0)
    plan = planner(Uneven(), slo=slo, stall_share=0.5, max_stall_s=0.4)
    plan.note_online_start(0.0, 200)
    begin(plan, decodes=10, due_in_s=900.0, now_s=1000.0)
    assert plan.limit_s == pytest.approx(0.2 + 0.4)
    assert plan.prefill_room_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("ttft_s", "room_s"),
    [(1.0, 0.4), (0.5, 0.1)],
    ids=["in time if it takes as long", "late then"],
)
def test_where_the_longest_stall_bounds_every_chunk_expected_times_hold(ttft_s, room_s):
    """A token is expected to take 1 ms, and four times as much at most after a slow moment."""
    plan = planner(Uneven(), slo=SloConfig(ttft_s=ttft_s, tpot_s=100.0), max_stall_s=0.1)
    plan.note_online_start(0.0, 200)
    begin(plan, decodes=10, due_in_s=900.0, now_s=1000.0)
    assert plan.prefill_room_s == pytest.approx(room_s)
    assert offline_chunk(plan) == (100 if room_s > 0.1 else 0)
    assert plan.decodes_first(online_prefill_waits=False, last_was_prefill=False) == (room_s <= 0.1)


def test_the_smallest_chunk_waits_where_it_is_expected_to_take_longer():
    plan = planner(Uneven(), slo=SloConfig(ttft_s=9.0, tpot_s=100.0), max_stall_s=0.06)
    begin(plan, decodes=10, due_in_s=900.0)
    assert plan.prefill_room_s == pytest.approx(0.06)
    assert offline_chunk(plan) == 0


def test_steps_that_do_both_may_take_as_long_as_such_steps_do(monkeypatch):
    monkeypatch.setitem(SPREADS, StepKind.MIXED, 3.0)
    plan = planner(Uneven(), slo=SloConfig(ttft_s=1.0, tpot_s=100.0), stall_share=0.5)
    plan.note_online_start(0.0, 200)
    begin(plan, decodes=10, due_in_s=900.0, now_s=1000.0)
    assert plan.limit_s == pytest.approx(0.2 + 3.0 * 0.5 * 0.7)


def offline_chunk(plan) -> int:
    return plan.offline_chunk_tokens(
        BatchShape(), cached_tokens=0, max_tokens=CHUNK_TOKENS, page_size=1
    )
