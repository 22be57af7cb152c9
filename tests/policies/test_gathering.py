"""A job's first requests wait for the others, but not for long, and nobody else does."""

from __future__ import annotations

from echo_sgl.policies.gathering import Gathering


def held(gathering: Gathering, now_s: float, num_waiting: int, is_running: bool = False) -> bool:
    gathering.advance(now_s, num_waiting, is_running=is_running)
    return gathering.holds


def test_a_job_starts_when_its_lines_are_in():
    gathering = Gathering(3.0)  # a pause of 0.1 s ends it
    assert not held(gathering, 0.0, 0)
    assert all(held(gathering, 1.0 + 0.05 * number, number + 1) for number in range(20))
    assert held(gathering, 2.0, 20)
    assert not held(gathering, 2.06, 20)
    assert not held(gathering, 2.07, 21)


def test_lines_that_never_end_are_waited_for_so_long_at_most():
    gathering = Gathering(3.0)
    times_s = [0.05 * number for number in range(100)]
    held_s = [now_s for number, now_s in enumerate(times_s) if held(gathering, now_s, number + 1)]
    assert held_s == times_s[: len(held_s)]
    assert 2.9 < held_s[-1] < 3.0


def test_a_server_with_offline_work_holds_nothing():
    gathering = Gathering(3.0)
    assert not held(gathering, 0.0, 1, is_running=True)
    assert not held(gathering, 0.01, 2, is_running=True)
    # Answered, and the next sent at once: the same client goes on.
    assert not held(gathering, 0.02, 0)
    assert not held(gathering, 0.03, 1)
    # Retracted in a long step: what comes back to wait was there before.
    assert not held(gathering, 9.0, 0, is_running=True)
    assert not held(gathering, 9.5, 1)


def test_a_job_that_is_cancelled_before_it_started_holds_nothing():
    gathering = Gathering(3.0)
    assert held(gathering, 0.0, 5)
    assert not held(gathering, 0.01, 0)
    assert not held(gathering, 0.02, 1)
    assert not held(gathering, 0.03, 0)
    assert held(gathering, 0.14, 1)


def test_a_limit_of_nothing_turns_it_off():
    gathering = Gathering(0.0)
    assert not held(gathering, 0.0, 1)
    assert not held(gathering, 5.0, 2)
