"""What a server takes beside its device: between two steps, and around a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echo_sgl.batch_shape import FloatArray


@dataclass(frozen=True, slots=True)
class HostTime:
    """Time in which the device waits for the host, as it was measured on one server.

    `step_s`: the scheduler, from the end of a step on the device to the start of the next one;
    `request_s`: more of that for each request in the step. `intake_s`: of each request, before
    the scheduler has it and after it gave the answer away: HTTP, tokenizer and detokenizer;
    `busy_intake_s`: the same while one request decodes, which is more where steps share the CPU's
    cores; `stream_s`: more of that for each further one, whose tokens go the same way.

    Units: seconds, all at least 0.
    """

    step_s: float
    request_s: float
    intake_s: float
    busy_intake_s: float = 0.0
    stream_s: float = 0.0

    def around_s(self, num_decoding: int) -> float:
        """Of a request that comes while so many others decode."""
        if not num_decoding:
            return self.intake_s
        return max(self.intake_s, self.busy_intake_s) + self.stream_s * (num_decoding - 1)

    def between_s(self, num_requests: int) -> float:
        """From the end of a step with so many requests to the start of the next."""
        return self.step_s + self.request_s * num_requests


class Beside(NamedTuple):
    """A request that came while `num_decoding` others decoded.

    `client_s`: how long its client waited; `device_s`: how long the device worked for it;
    `period_s`: from the start of one of their steps to that of the next.
    """

    num_decoding: int
    client_s: float
    device_s: float
    period_s: float


def fit_host_time(
    gaps: Sequence[tuple[int, float]],
    lone_s: Sequence[tuple[float, float]],
    beside: Sequence[Beside] = (),
) -> HostTime:
    """`gaps`: requests in a step and the time from its end to the next step's start, of steps
    that another one waited for. `lone_s`: of requests that were alone, how long their clients
    waited and how long the device worked. `beside`: of those that came while others decoded: at
    any moment of a step, so they wait for half of one.

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
    busy_s: dict[int, list[float]] = {}
    for one in beside:
        late_s = one.client_s - one.device_s - one.period_s / 2 - step_s - request_s
        busy_s.setdefault(one.num_decoding, []).append(late_s)
    around_s = {count: max(intake_s, float(np.median(those))) for count, those in busy_s.items()}
    return HostTime(step_s, request_s, intake_s, *_busy_intake(around_s, intake_s))


def _busy_intake(around_s: dict[int, float], intake_s: float) -> tuple[float, float]:
    """Time beside one request that decodes, and more of it for each further one."""
    if not around_s:
        return intake_s, 0.0
    fewest, most = min(around_s), max(around_s)
    if fewest == most:
        return around_s[most], 0.0
    stream_s = max(0.0, (around_s[most] - around_s[fewest]) / (most - fewest))
    return max(intake_s, around_s[fewest] - stream_s * (fewest - 1)), stream_s


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
