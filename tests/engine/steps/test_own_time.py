"""What counts as Echo's own time."""

from __future__ import annotations

import time

from echo_sgl.engine.steps.own_time import OwnTime


def spin(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_work_between_two_steps_is_added_up_and_waiting_is_not() -> None:
    own_time = OwnTime()
    own_time.begin_iteration()
    for _ in range(2):
        with own_time:
            spin(0.01)
    with own_time:
        time.sleep(0.2)  # as when another process has the core
    spent_s = own_time.end_step()
    assert 0.02 <= spent_s < 0.2
    assert list(own_time.steps_s) == [spent_s]
    own_time.begin_iteration()
    assert own_time.end_step() == 0.0


def test_what_follows_a_launch_counts_for_the_next_step_and_is_lost_without_one() -> None:
    own_time = OwnTime()
    own_time.begin_iteration()
    own_time.end_step()
    with own_time, own_time:  # one call of ours leads to another
        spin(0.01)
    own_time.begin_iteration()
    assert 0.01 <= own_time.end_step() < 0.02
    own_time.begin_iteration()
    with own_time:
        spin(0.01)
    own_time.begin_iteration()
    assert own_time.end_step() == 0.0
