"""When the scheduler learns from the steps that ended."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchRow
from echo_sgl.config import parse_config
from echo_sgl.engine.deadlines import DeadlineWatch
from echo_sgl.engine.estimation import create_live_batch_time
from echo_sgl.engine.step_control import StepControl
from echo_sgl.engine.step_timing import StepTimer
from echo_sgl.estimators.live import LEARN_EVERY_S
from echo_sgl.policies.deadline_order import DeadlineOrder
from echo_sgl.policies.offline_order import FcfsOrder

SERVER = {"device": "some", "model": "some", "transformer": None, "captured_batch_sizes": []}
DECODE = BatchRow(0, 0, 0, 0, 4, 400, 100)


def control_and_lessons() -> tuple[StepControl, list[tuple[float, float]]]:
    """Lessons are a step's time and when it was learned from."""
    config = parse_config({})
    live = create_live_batch_time(config, SERVER)
    watch = DeadlineWatch(DeadlineOrder(FcfsOrder()))
    control = StepControl(config, live, StepTimer(), max_decodes=8, watch=watch)
    lessons: list[tuple[float, float]] = []
    control.estimator = SimpleNamespace(
        observe=lambda step, time_s, now_s: lessons.append((time_s, now_s)),
        advance=lambda now_s: None,
    )
    return control, lessons


def test_short_steps_are_learned_from_together():
    control, lessons = control_and_lessons()
    for number in range(8):
        control.observe([(DECODE, number + 1.0)], number * 0.2 * LEARN_EVERY_S)
    together_s = LEARN_EVERY_S
    assert lessons == [(1, 0.0), *((number, together_s) for number in range(2, 7))]
    control.observe([], 1.0)
    assert lessons[-1] == (8, 1.0), "an idle scheduler learns from the last ones, too"


@given(st.lists(st.tuples(st.floats(0, 2 * LEARN_EVERY_S), st.integers(0, 3)), max_size=60))
def test_every_step_is_learned_from_once_in_order_and_in_time(visits):
    control, lessons = control_and_lessons()
    now_s, came_s = 0.0, []
    for wait_s, num_ended in visits:
        now_s += wait_s
        control.observe([(DECODE, len(came_s) + 1.0 + index) for index in range(num_ended)], now_s)
        came_s += [now_s] * num_ended
        assert all(now_s - one_s < LEARN_EVERY_S for one_s in came_s[len(lessons) :])
    control.observe([], now_s + 1.0)
    assert [time_s for time_s, _ in lessons] == [index + 1.0 for index in range(len(came_s))]
