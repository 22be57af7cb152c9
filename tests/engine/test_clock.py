"""What time it is on every rank, and what becomes of what each of them measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from echo_sgl.batch_shape import BatchRow
from echo_sgl.engine import scheduler
from echo_sgl.engine.clock import ClockTick, Measured, StepClock
from echo_sgl.estimators.lessons import LEARN_EVERY_S

ROW = BatchRow(0, 0, 0, 0, 1, 10, 10)


class Timer:
    """Steps that ended and nobody asked for yet."""

    def __init__(self) -> None:
        self.fresh: Measured = []

    def take(self) -> Measured:
        taken, self.fresh = self.fresh, []
        return taken


def test_a_rank_alone_takes_what_it_measured() -> None:
    timer = Timer()
    clock = StepClock(timer.take, is_shared=False)
    timer.fresh.append((ROW, 0.5))
    assert clock.tick() == []
    assert clock.take_ticks(["request"]) == (["request"], [(ROW, 0.5)])
    assert timer.fresh == [] and clock.now_s > 0


def test_a_rank_alone_takes_several_steps_at_once() -> None:
    timer = Timer()
    clock = StepClock(timer.take, is_shared=False)
    clock.take_ticks([])
    taken_s, measured, num_steps = clock.now_s, [], 0
    while not measured:
        num_steps += 1
        timer.fresh.append((ROW, float(num_steps)))
        _, measured = clock.take_ticks([])
    assert measured == [(ROW, number + 1.0) for number in range(num_steps)]
    assert clock.now_s - taken_s >= LEARN_EVERY_S


def test_all_ranks_learn_from_the_first_and_none_keeps_its_own_measurements() -> None:
    timers = Timer(), Timer()
    first, other = (StepClock(timer.take, is_shared=True) for timer in timers)
    for number in range(100):
        for timer in timers:
            timer.fresh.append((ROW, float(number)))
        messages = [*first.tick(), "request"]
        timers[0].fresh.append((ROW, -1.0))  # it ended in between: for the next tick
        for clock in (first, other):
            measured = [(ROW, -1.0)] * (number > 0) + [(ROW, float(number))]
            assert clock.take_ticks(list(messages)) == (["request"], measured)
        assert first.now_s == other.now_s > 0
        assert [len(timer.fresh) for timer in timers] == [1, 0]


def test_time_never_goes_back() -> None:
    clock = StepClock(Timer().take, is_shared=True)
    clock.take_ticks([ClockTick(5.0, [])])
    clock.take_ticks([ClockTick(4.0, [])])
    assert clock.now_s == 5.0


@pytest.mark.parametrize(
    ("ranks", "leads"),
    [((0, 0, 0), True), ((1, 0, 0), False), ((0, 1, 0), False), ((0, 0, 1), False)],
)
def test_one_rank_of_a_replica_leads_it(ranks, leads, monkeypatch):
    """SGLang's own metrics come from the first of those that share a context's tokens, too."""
    names = ("attn_tp_rank", "attn_cp_rank", "pp_rank")
    parallel = SimpleNamespace(**dict(zip(names, ranks, strict=True)))
    monkeypatch.setattr(scheduler, "get_parallel", lambda: parallel)
    assert scheduler._leads_its_replica() is leads
