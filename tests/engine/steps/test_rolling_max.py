"""The largest recent value, against all values kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.engine.steps.rolling_max import RollingMax

WINDOW_S = 10.0


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 100)), max_size=60))
def test_it_is_the_largest_of_a_window_at_least_and_two_at_most(observations):
    rolling, now_s, seen = RollingMax(WINDOW_S), 0.0, []
    for step_s, value in observations:
        now_s += step_s
        rolling.observe(value, now_s)
        seen.append((now_s, value))
        least = max((v for at_s, v in seen if now_s - at_s < WINDOW_S), default=0.0)
        most = max((v for at_s, v in seen if now_s - at_s <= 2 * WINDOW_S), default=0.0)
        assert least <= rolling.value(now_s) <= most


def test_what_is_long_past_is_forgotten():
    rolling = RollingMax(WINDOW_S)
    rolling.observe(5.0, 0.0)
    assert rolling.value(9.0) == 5.0
    assert rolling.value(30.0) == 0.0
