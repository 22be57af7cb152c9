"""When the scheduler learns from the steps that ended."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchRow
from echo_sgl.estimators.lessons import LEARN_EVERY_S, Lessons

DECODE = BatchRow(0, 0, 0, 0, 4, 400, 100)


def lessons_and_learned() -> tuple[Lessons, list[tuple[float, float]]]:
    """What was learned: a step's time and when."""
    learned: list[tuple[float, float]] = []
    learner = SimpleNamespace(
        learn=lambda steps, now_s: learned.extend((time_s, now_s) for _, time_s in steps),
        advance=lambda now_s: None,
    )
    return Lessons(learner), learned


def visit(lessons: Lessons, steps: list[tuple[BatchRow, float]], now_s: float) -> None:
    if lessons.take(steps, now_s):
        lessons.learn(now_s)


def test_short_steps_are_learned_from_together():
    lessons, learned = lessons_and_learned()
    for number in range(8):
        visit(lessons, [(DECODE, number + 1.0)], number * 0.2 * LEARN_EVERY_S)
    together_s = LEARN_EVERY_S
    assert learned == [(1, 0.0), *((number, together_s) for number in range(2, 7))]
    visit(lessons, [], 1.0)
    assert learned[-1] == (8, 1.0), "an idle scheduler learns from the last ones, too"


@given(st.lists(st.tuples(st.floats(0, 2 * LEARN_EVERY_S), st.integers(0, 3)), max_size=60))
def test_every_step_is_learned_from_once_in_order_and_in_time(visits):
    lessons, learned = lessons_and_learned()
    now_s, came_s = 0.0, []
    for wait_s, num_ended in visits:
        now_s += wait_s
        visit(lessons, [(DECODE, len(came_s) + 1.0 + index) for index in range(num_ended)], now_s)
        came_s += [now_s] * num_ended
        assert all(now_s - one_s < LEARN_EVERY_S for one_s in came_s[len(learned) :])
    visit(lessons, [], now_s + 1.0)
    assert [time_s for time_s, _ in learned] == [index + 1.0 for index in range(len(came_s))]


def test_a_step_whose_time_is_not_known_teaches_nothing():
    lessons, learned = lessons_and_learned()
    visit(lessons, [(DECODE, 0.0), (DECODE, 1.0)], 5.0)
    assert learned == [(1.0, 5.0)]
