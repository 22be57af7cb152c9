"""The largest time per step that keeps an SLO: a search over replays, tolerant of their noise.

    budget_s   low ------------------------------------------------ high
    verdict    kept kept kept kept | broken broken broken broken
                       bisected, on a logarithmic scale; if even high is kept, beyond it

A replay near the edge is repeated and judged by the median.

Source: HyGen 4.2, which searches the latency budget by binary search over profiling runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

METRICS = ("ttft", "tpot")
STATISTICS = ("mean", "p50", "p90", "p99")
GROWTH = 4.0
_UNITS_S = {"ms": 1e-3, "us": 1e-6, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Target:
    """One promise over all online requests: a statistic of TTFT or TPOT, at most `limit_s`."""

    metric: str
    statistic: str
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.metric}_{self.statistic}"

    def __str__(self) -> str:
        return f"{self.name} <= {self.limit_s:g} s"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one replay gave: seconds by target name, and what offline work got done."""

    values_s: Mapping[str, float]
    num_requests: int
    offline_tokens_per_s: float

    def load(self, targets: Sequence[Target]) -> float:
        """The worst value as a share of its limit; above 1 the SLO is broken."""
        return max(self.values_s[target.name] / target.limit_s for target in targets)


@dataclass(frozen=True, slots=True)
class Trial:
    """All replays at one budget, and their verdict by the median; budget 0: no offline work."""

    budget_s: float
    measurements: tuple[Measurement, ...]
    load: float

    @property
    def is_kept(self) -> bool:
        return self.load <= 1.0


@dataclass(frozen=True, slots=True)
class BudgetSearch:
    """What was found, and every trial as the evidence for it; None when no budget will do."""

    budget_s: float | None
    targets: tuple[Target, ...]
    trials: tuple[Trial, ...]

    @property
    def is_kept_alone(self) -> bool | None:
        """Whether the server keeps the SLO without any offline work; None if that was not tried."""
        return next((trial.is_kept for trial in self.trials if trial.budget_s == 0), None)

    @property
    def is_open_ended(self) -> bool:
        """Whether nothing that was tried broke the SLO, so that more may keep it, too."""
        return self.budget_s is not None and all(trial.is_kept for trial in self.trials)


Measure = Callable[[float], Measurement]


def parse_slo(text: str) -> tuple[Target, ...]:
    """Read "ttft_p99=1s,tpot_mean=50ms".

    Errors: `ValueError` names the part, and what is allowed.
    """
    targets = tuple(_parse_target(part.strip()) for part in text.split(","))
    names = [target.name for target in targets]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the SLO names {name} twice; name each once")
    return targets


def find_budget(
    measure: Measure,
    targets: Sequence[Target],
    *,
    low_s: float,
    high_s: float,
    most_s: float = 0.0,
    precision: float = 1.1,
    repeats: int = 3,
    edge: float = 0.1,
) -> BudgetSearch:
    """Find the largest budget from `low_s` on whose replays keep all targets.

    While all of [`low_s`, `high_s`] keeps them, as a mean may, longer ones are tried, up to
    `most_s`. `measure(0)` replays without offline work; an SLO that is broken then is out of reach.
    Ends when kept and broken budgets are within a factor of `precision`. A replay within
    `edge` of a limit is repeated up to `repeats` times; so are the one that is found, before
    it is believed, and a broken one that would end the search. The verdicts stay monotone: no
    budget above a broken one is tried.

    Errors: `ValueError` when the range or the precision leaves nothing to search.
    """
    if not 0 < low_s <= high_s or precision <= 1 or repeats < 1 or not targets:
        raise ValueError(
            f"budgets of {low_s} to {high_s} s, precision {precision}, {repeats} repeats, "
            f"{len(targets)} targets; give 0 < low <= high, precision > 1, at least one of both"
        )
    search = _Search(measure, tuple(targets), repeats=repeats, edge=edge)
    # One unlucky replay would end it all.
    if not all(search.is_kept(one_s) or search.is_confirmed(one_s) for one_s in (0.0, low_s)):
        return search.result(None)
    kept_s = [low_s]
    while search.is_kept(high_s) and search.is_confirmed(high_s):
        if high_s >= most_s:
            return search.result(high_s)
        kept_s.append(high_s)
        high_s = min(most_s, GROWTH * high_s)
    broken_s = high_s
    while True:
        while broken_s / kept_s[-1] > precision:
            middle_s = math.sqrt(kept_s[-1] * broken_s)
            if search.is_kept(middle_s):
                kept_s.append(middle_s)
            else:
                broken_s = middle_s
        if search.is_confirmed(kept_s[-1]):
            return search.result(kept_s[-1])
        broken_s = kept_s.pop()
        if not kept_s:
            return search.result(None)


def check_budget(
    measure: Measure, targets: Sequence[Target], budget_s: float, *, repeats: int = 3
) -> BudgetSearch:
    """Replay a stored budget `repeats` times; `budget_s` of the result is None when it fails.

    Then one without offline work tells whether that is to blame.
    """
    search = _Search(measure, tuple(targets), repeats=repeats, edge=math.inf)
    if search.is_kept(budget_s):
        return search.result(budget_s)
    search.replay(0.0)
    return search.result(None)


class _Search:
    """Trials by budget; each holds as many replays as its verdict needed."""

    def __init__(
        self, measure: Measure, targets: tuple[Target, ...], *, repeats: int, edge: float
    ) -> None:
        self._measure, self._targets = measure, targets
        self._repeats, self._edge = repeats, edge
        self._measured: dict[float, list[Measurement]] = {}

    def is_kept(self, budget_s: float) -> bool:
        """One replay, and more when it comes out close to a limit."""
        if budget_s not in self._measured:
            self.replay(budget_s)
        if abs(self._load(budget_s) - 1.0) <= self._edge:
            return self.is_confirmed(budget_s)
        return self._load(budget_s) <= 1.0

    def is_confirmed(self, budget_s: float) -> bool:
        """All replays of this budget, by their median."""
        while len(self._measured[budget_s]) < self._repeats:
            self.replay(budget_s)
        return self._load(budget_s) <= 1.0

    def result(self, budget_s: float | None) -> BudgetSearch:
        trials = tuple(
            Trial(tried_s, tuple(measurements), self._load(tried_s))
            for tried_s, measurements in self._measured.items()
        )
        return BudgetSearch(budget_s, self._targets, trials)

    def replay(self, budget_s: float) -> None:
        self._measured.setdefault(budget_s, []).append(self._measure(budget_s))

    def _load(self, budget_s: float) -> float:
        return statistics.median(one.load(self._targets) for one in self._measured[budget_s])


def _parse_target(part: str) -> Target:
    name, _, limit = part.partition("=")
    metric, _, statistic = name.partition("_")
    if metric not in METRICS or statistic not in STATISTICS:
        raise ValueError(
            f"the SLO has a part {part!r}; write ttft or tpot, one of _mean, _p50, _p90, _p99, "
            "and a limit: ttft_p99=1s,tpot_p99=50ms"
        )
    limit_s = _parse_seconds(limit)
    if limit_s is None or not 0 < limit_s < math.inf:
        raise ValueError(f"the limit of {name} is {limit!r}; write a time above 0, as 1s or 50ms")
    return Target(metric, statistic, limit_s)


def _parse_seconds(text: str) -> float | None:
    for unit, factor in _UNITS_S.items():
        if text.endswith(unit):
            try:
                return float(text.removesuffix(unit)) * factor
            except ValueError:
                return None
    return None
