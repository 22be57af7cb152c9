"""Which steps are planned, and which go on as the one before: on the scheduler's own objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from echo_sgl.config import parse_config
from echo_sgl.engine.pool.deadlines import DeadlineWatch
from echo_sgl.engine.steps.step_control import StepControl
from echo_sgl.engine.steps.step_timing import StepTimer
from echo_sgl.policies.decodes.held_plan import HELD_S
from echo_sgl.policies.limits.step_limit import Promise
from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.offline_order import FcfsOrder
from echo_sgl.types import Task
from tests.engine.decodes.test_running import decoding, step
from tests.policies.plans import Clockwork

WITHIN_LIMITS = SimpleNamespace(is_within=True)
STEP_S = 0.01


class Clock(Clockwork):
    """Every step takes what `Clockwork` says, measured and predicted alike."""

    model = SimpleNamespace(captured_batch_sizes=())

    def advance(self, now_s: float) -> None:
        """Nothing becomes stale."""

    def predict_both_s(self, row: Any) -> tuple[float, float]:
        return self.predict_s(row), self.predict_s(row)


class Steps:
    """A scheduler's calls of `StepControl`, step by step, and how often it planned."""

    def __init__(self, estimator: Any = None, **steps: Any) -> None:
        config = parse_config({"steps": steps, "slo": {"ttft_s": 5.0, "tpot_s": 0.5}})
        watch, estimator = DeadlineWatch(DeadlineOrder(FcfsOrder())), estimator or Clock()
        self.control = StepControl(
            config, estimator, StepTimer(), max_requests=8, chunk_tokens=512, watch=watch
        )
        self.reqs = [
            decoding(Task.ONLINE, promise=Promise(5.0, 0.5)),
            decoding(Task.OFFLINE, promise=Promise()),
            decoding(Task.OFFLINE, promise=Promise()),
        ]
        self.now_s, self.num_plans = 1.0, 0
        plan = self.control.planner.begin

        def begin(*args: Any, **kwargs: Any) -> None:
            self.num_plans += 1
            plan(*args, **kwargs)

        self.control.planner.begin = begin

    def batch(self, *, prefills: bool = False) -> Any:
        mode = SimpleNamespace(is_decode=lambda: not prefills, is_extend=lambda: prefills)
        lens = [1] * len(self.reqs)
        return SimpleNamespace(
            reqs=self.reqs,
            forward_mode=mode,
            extend_lens=lens,
            prefix_lens=lens,
            decoding_reqs=None,
        )

    def begin(self, *, num_pooled: int = 0, waiting: tuple[Any, ...] = ()) -> int:
        """How many plans the next step takes."""
        before = self.num_plans
        self.control.begin(self.now_s, self.batch(), waiting, None, num_pooled=num_pooled)
        return self.num_plans - before

    def run(self, **kwargs: Any) -> int:
        num_plans = self.begin(**kwargs)
        self.control.select_decodes(self.batch())
        self.launch()
        return num_plans

    def launch(self, *, prefills: bool = False) -> None:
        batch = self.batch(prefills=prefills)
        self.control.launch(batch, (), num_pooled=0, num_evicted_tokens=0)
        if not prefills:
            step(self.reqs)
        self.now_s += STEP_S


@pytest.fixture
def steps() -> Steps:
    steps = Steps()
    assert steps.run() == 1
    return steps


def test_one_plan_holds_for_steps_that_decode_the_same(steps: Steps) -> None:
    num_held, slack_s = 0, steps.control.planner.slack_s
    while steps.run() == 0:
        num_held += 1
        assert steps.control.planner.slack_s > slack_s
        slack_s = steps.control.planner.slack_s
    assert num_held == pytest.approx(HELD_S / STEP_S, abs=1)


def test_who_waits_or_could_start_is_planned_for(steps: Steps) -> None:
    waiting = decoding(Task.ONLINE, promise=Promise(5.0, 0.5))
    waiting.output_ids, waiting.extend_end = [], 0
    assert steps.begin(num_pooled=3) == 1
    assert steps.run() == 0 and steps.begin(waiting=(waiting,)) == 1


def test_a_prefill_brings_others_so_the_next_step_is_planned(steps: Steps) -> None:
    assert steps.begin() == 0
    steps.launch(prefills=True)
    assert steps.run() == 1


def test_the_end_of_an_online_request_is_planned_for_that_of_an_offline_one_not(
    steps: Steps,
) -> None:
    *others, last = steps.reqs
    steps.control.note_end(last)
    steps.reqs = others
    assert steps.run() == 0
    online, offline = others
    steps.control.note_end(online)
    steps.reqs = [offline]
    assert steps.run() == 1


@pytest.mark.parametrize(("promise", "counts"), [(Promise(5.0), True), (Promise(), False)])
def test_only_who_was_promised_something_moves_a_budget(
    steps: Steps, promise: Promise, counts: bool
) -> None:
    ended = decoding(Task.ONLINE, promise=promise)
    noted: list[bool] = []
    steps.control.planner.limit.note_request = noted.append
    steps.control.note_end(ended)
    assert noted == []  # the step of its last token is over when the next one is planned
    steps.control.observe([], steps.now_s + 0.1)
    assert noted == [True] * counts


def test_who_could_start_after_all_is_held_against_a_new_plan(steps: Steps) -> None:
    """Full batches are looked at once more when KV over the limit is to be shed."""
    assert steps.begin() == 0
    args: dict[str, Any] = {"online_prefill_waits": False, "last_was_prefill": False}
    steps.control.defers_prefill(**args, chunked=None, num_pooled=5, limits=WITHIN_LIMITS)
    assert steps.num_plans == 2


@pytest.mark.parametrize(("is_within", "is_deferred"), [(True, True), (False, False)])
def test_a_pass_that_would_find_nobody_is_left_out_unless_somebody_is_to_be_shed(
    steps: Steps, is_within: bool, is_deferred: bool
) -> None:
    limits: Any = SimpleNamespace(is_within=is_within)
    args: dict[str, Any] = {"online_prefill_waits": False, "last_was_prefill": False}
    told = steps.control.defers_prefill(**args, chunked=None, num_pooled=0, limits=limits)
    assert told is is_deferred


def test_who_comes_back_is_a_token_behind_until_that_is_seen(steps: Steps) -> None:
    """Overlapped, it joins those that decode before the token of its prefill is seen."""
    first, back = steps.reqs[0], decoding(Task.ONLINE, 30, promise=Promise(5.0, 0.5))
    step([first] * 20)  # far ahead: who comes back is due first
    back.rid, back.echo_terms.started_s, back.echo_terms.first_token_s = "back", 0.0, 0.0
    steps.control.note_start(back)
    steps.reqs = [*steps.reqs, back]
    for grown in ([], [back], steps.reqs, steps.reqs):
        step(grown)
        steps.now_s += STEP_S
        steps.begin()
        assert steps.control.online_tokens == first.seqlen + back.seqlen
        due_s = back.echo_terms.due_s(len(back.output_ids))
        assert steps.control.planner.slack_s == pytest.approx(due_s - steps.now_s)


def test_nothing_holds_under_a_limit_that_counts_each_step() -> None:
    steps = Steps(limit="relative", max_inflation=100.0, max_stall_s=3600.0)
    assert [steps.run() for _ in range(3)] == [1, 1, 1]


def test_who_gave_a_turn_away_is_a_token_behind_when_the_others_grow(steps: Steps) -> None:
    """Overlapped, what a step sampled is seen a step later, when all decode together again."""
    control = steps.control
    first, last = steps.reqs[0], decoding(Task.ONLINE, promise=Promise(5.0, 0.5))
    last.rid = "last"
    steps.reqs = [*steps.reqs, last]
    steps.begin()
    staying = steps.batch()
    control.without_turn = SimpleNamespace(
        park=lambda batch, indices: setattr(
            batch, "reqs", [one for i, one in enumerate(batch.reqs) if i not in indices]
        )
    )
    control._leave_out(staying, frozenset({"last"}))
    assert last not in staying.reqs
    assert control.counts.num_given_turns == 1
    for grown in ([], staying.reqs, steps.reqs, steps.reqs):
        step(grown)
        steps.now_s += STEP_S
        steps.reqs = list(steps.reqs)  # somebody joined: another list
        steps.begin()
        assert control.online_tokens == first.seqlen + last.seqlen
        due_s = min(one.echo_terms.due_s(len(one.output_ids)) for one in (first, last))
        assert control.planner.view.decode_due_s == pytest.approx(due_s)
