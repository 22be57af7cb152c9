"""Online load by a rule instead of a trace: bursts, alternating phases, lengths by distribution."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator

from eval.workloads import WorkloadError

Segment = tuple[float, float]  # requests/s, seconds


def poisson_arrivals(segments: Iterable[Segment], rng: random.Random) -> Iterator[float]:
    """Arrival times (s) of a Poisson process whose rate changes from segment to segment."""
    start_s = 0.0
    for rate_rps, length_s in segments:
        at_s = start_s + rng.expovariate(rate_rps)
        while at_s < start_s + length_s:
            yield at_s
            at_s += rng.expovariate(rate_rps)
        start_s += length_s


def gamma_arrivals(rate_rps: float, variation: float, rng: random.Random) -> Iterator[float]:
    """Arrival times (s), without end, whose gaps are gamma distributed.

    `variation`: their standard deviation over their mean; 1 is Poisson, more comes in clumps.
    """
    shape = 1.0 / variation**2
    gaps_s = (rng.gammavariate(shape, 1.0 / (rate_rps * shape)) for _ in itertools.count())
    return itertools.accumulate(gaps_s)


def arrivals_until(arrivals: Iterable[float], *, duration_s: float) -> list[float]:
    """The arrival times of the first `duration_s` seconds.

    Errors: `WorkloadError` when none falls into them.
    """
    times_s = list(itertools.takewhile(lambda at_s: at_s < duration_s, arrivals))
    if not times_s:
        raise WorkloadError(
            f"no online request comes within {duration_s:g} s; raise --online-load or --duration-s"
        )
    return times_s


def burst_segments(
    mean_rps: float, *, factor: float, burst_s: float, every_s: float
) -> Iterator[Segment]:
    """A steady rate that is `factor` times as high for `burst_s` in the middle of each `every_s`.

    Errors: `WorkloadError` when a burst is as long as its period.
    """
    if not 0 < burst_s < every_s:
        raise WorkloadError(
            f"bursts of {burst_s:g} s do not fit every {every_s:g} s; lower --burst-s"
        )
    quiet_s = every_s - burst_s
    quiet_rps = mean_rps * every_s / (quiet_s + factor * burst_s)
    around = (quiet_rps, quiet_s / 2)
    return itertools.cycle([around, (quiet_rps * factor, burst_s), around])


def phase_segments(mean_rps: float, *, ratio: float, phase_s: float) -> Iterator[Segment]:
    """Phases of equal length, high and low in turns, the high one `ratio` times the low one."""
    low_rps = 2 * mean_rps / (1 + ratio)
    return itertools.cycle([(low_rps * ratio, phase_s), (low_rps, phase_s)])


def lognormal_lengths(
    mean_tokens: float, *, sigma: float, count: int, max_tokens: int, seed: int
) -> list[int]:
    """Lengths of that mean, then cut to 1 .. `max_tokens`; `sigma` is that of their logarithm."""
    rng = random.Random(seed)
    mu = math.log(mean_tokens) - sigma**2 / 2
    drawn = (round(rng.lognormvariate(mu, sigma)) for _ in range(count))
    return [min(max_tokens, max(1, tokens)) for tokens in drawn]
