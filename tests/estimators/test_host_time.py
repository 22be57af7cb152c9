"""What a server takes beside its device: fitted from gaps and lone requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.estimators.host_time import Beside, fit_host_time


@given(st.floats(0, 0.01), st.floats(0, 0.001), st.floats(0, 0.1))
def test_what_gaps_were_made_of_is_found(step_s: float, request_s: float, intake_s: float) -> None:
    gaps = [(count, step_s + count * request_s) for count in (1, 2, 8, 16)]
    alone_s = intake_s + step_s + request_s
    host = fit_host_time(gaps, [(alone_s + 0.005, 0.005)] * 3)
    assert host.between_s(16) == pytest.approx(step_s + 16 * request_s, abs=1e-9)
    assert host.intake_s == pytest.approx(intake_s, abs=1e-9)


def test_a_device_that_is_given_work_ahead_waits_for_nobody() -> None:
    host = fit_host_time([(1, -0.002), (4, -0.002)], [(0.01, 0.004)])
    assert host.between_s(100) == 0
    assert host.intake_s == pytest.approx(0.006)


def test_gaps_that_shrink_with_requests_are_taken_at_their_mean() -> None:
    host = fit_host_time([(1, 0.004), (9, 0.002)], [(0.01, 0.004)])
    assert (host.step_s, host.request_s) == (pytest.approx(0.003), 0.0)


def test_gaps_whose_line_begins_below_0_are_told_by_requests_alone() -> None:
    """Two milliseconds for each less one in all: of lines through 0 the least squares are here."""
    host = fit_host_time([(1, 0.001), (4, 0.007), (8, 0.015)], [(0.01, 0.004)])
    assert (host.step_s, host.request_s) == (0.0, pytest.approx(0.149 / 81))


def test_steps_of_one_size_tell_what_a_step_takes_and_not_what_a_request_does() -> None:
    host = fit_host_time([(4, 0.002), (4, 0.004)], [(0.01, 0.004)])
    assert (host.step_s, host.request_s) == (pytest.approx(0.003), 0.0)


GAPS, LONE_S = [(1, 0.001), (4, 0.001)], [(0.016, 0.005)]


def beside(num_decoding: int, *, host_s: float) -> list[Beside]:
    """Requests that come at any moment of others' steps of 40 ms, which the host keeps so long."""
    waits_s = [host_s + 0.001 + 0.005 + step_s for step_s in (0.0, 0.01, 0.02, 0.03, 0.04)]
    return [Beside(num_decoding, wait_s, 0.005, 0.04) for wait_s in waits_s]


@pytest.mark.parametrize("gaps", [GAPS, [(1, 0.001), (4, 0.004)]], ids=["step", "request"])
def test_requests_beside_a_decode_wait_for_half_of_a_step_and_the_rest_is_the_host(gaps) -> None:
    """One request's step takes 1 ms of the host, which is no part of the intake."""
    host = fit_host_time(gaps, LONE_S, beside(1, host_s=0.009))
    assert host.intake_s == pytest.approx(0.01)
    assert host.busy_intake_s == pytest.approx(0.01), "never less than on an idle server"
    slower = fit_host_time(gaps, LONE_S, beside(1, host_s=0.029))
    assert slower.busy_intake_s == pytest.approx(0.029)
    assert slower.around_s(0) == pytest.approx(0.01)
    assert slower.around_s(8) == slower.around_s(1), "nothing is known of more than one"


def test_each_further_decode_keeps_a_request_longer() -> None:
    for fewest, host_s in ((1, 0.02), (3, 0.03)):
        both = [*beside(fewest, host_s=host_s), *beside(8, host_s=0.055)]
        host = fit_host_time(GAPS, LONE_S, both)
        assert host.stream_s == pytest.approx(0.005)
        assert [host.around_s(count) for count in (1, 3, 8)] == pytest.approx([0.02, 0.03, 0.055])
    quick = fit_host_time(GAPS, LONE_S, [*beside(1, host_s=0.02), *beside(8, host_s=0.015)])
    assert quick.stream_s == 0.0 and quick.busy_intake_s == pytest.approx(0.02)


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="0 steps and 1 lone"):
        fit_host_time([], [(1.0, 0.5)])
