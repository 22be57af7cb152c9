"""What a server takes beside its device: between two steps, and around a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo_sgl.batch_shape import FloatArray


@dataclass(frozen=True, slots=True)
class HostTime:
    """Time in which the device waits for the host, as it was measured on one server.

    `step_s`: the scheduler, from the end of a step on the device to the start of the next one;
    `request_s`: more of that for each request in the step. `intake_s`: of each request, before
    the scheduler has it and after it gave the answer away: HTTP, tokenizer and detokenizer;
    `busy_intake_s`: the same while steps run, which is more where they share the CPU's cores.

    Units: seconds, all at least 0.
    """

    step_s: float
    request_s: float
    intake_s: float
    busy_intake_s: float = 0.0

    def between_s(self, num_requests: int) -> float:
        """From the end of a step with so many requests to the start of the next."""
        return self.step_s + self.request_s * num_requests


def fit_host_time(
    gaps: Sequence[tuple[int, float]],
    lone_s: Sequence[tuple[float, float]],
    beside_s: Sequence[tuple[float, float, float]] = (),
) -> HostTime:
    """`gaps`: requests in a step and the time from its end to the next step's start, of steps
    that another one waited for. `lone_s`: of requests that were alone, how long their clients
    waited and how long the device worked. `beside_s`: the same of requests that came while
    another one decoded, and how long one of its steps was, from start to start: they come at any
    moment of one, and wait for half of it.

    Least squares, since what a server does in an hour follows from the mean. No coefficient is
    below 0: a device that is given work ahead of time (overlap) never waits.
    Errors: `ValueError` without any gap or lone request.
    """
    if not gaps or not lone_s:
        raise ValueError(f"{len(gaps)} steps and {len(lone_s)} lone requests; each needs one")
    step_s, request_s = _line_above_0(*np.array(gaps, dtype=np.float64).T)
    waits_s = [client_s - device_s for client_s, device_s in lone_s]
    # The step of a lone request has its own time at the host, which is in `step_s` already.
    intake_s = max(0.0, float(np.median(waits_s)) - step_s - request_s)
    busy_s = [client_s - device_s - other_s / 2 for client_s, device_s, other_s in beside_s]
    busy_intake_s = float(np.median(busy_s)) - step_s - request_s if busy_s else 0.0
    return HostTime(step_s, request_s, intake_s, max(intake_s, busy_intake_s))


def _line_above_0(counts: FloatArray, times_s: FloatArray) -> tuple[float, float]:
    """Constant and slope of the least squares line of which neither is below 0."""
    mean_s = max(0.0, float(times_s.mean()))
    if not mean_s or counts.min() == counts.max():
        return mean_s, 0.0
    slope, constant = np.polyfit(counts, times_s, 1)
    if slope <= 0:
        return mean_s, 0.0
    if constant < 0:
        return 0.0, max(0.0, float(counts @ times_s / (counts @ counts)))
    return float(constant), float(slope)
