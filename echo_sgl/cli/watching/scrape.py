"""Echo's figures out of a server's `/metrics` text: sums over ranks, rates, percentiles."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from echo_sgl.types import Task

PREFIX = "echo_sgl_"
_COUNTERS = {
    "echo_sgl_prompt_tokens_total": "prompt_tokens",
    "echo_sgl_cached_prompt_tokens_total": "cached_prompt_tokens",
    "echo_sgl_generated_tokens_total": "generated_tokens",
    "echo_sgl_retractions_total": "retractions",
    "echo_sgl_punished_tokens_total": "punished_tokens",
    "echo_sgl_recomputed_tokens_sum": "recomputed_tokens",
    "echo_sgl_held_back_total": "held_back",
    "echo_sgl_reserve_hits_total": "reserve_hits",
}
_GAUGES = {
    "echo_sgl_pool_requests": "pool_requests",
    "echo_sgl_cached_tokens": "cached_tokens",
    "echo_sgl_active_kv_tokens": "active_kv_tokens",
    "echo_sgl_kv_limit_tokens": "kv_limit_tokens",
    "echo_sgl_reserve_tokens": "reserve_tokens",
    "echo_sgl_protected_tokens": "protected_tokens",
}
_LABELLED = {
    "echo_sgl_requests_total": ("requests", "outcome"),
    "echo_sgl_evicted_tokens_total": ("evicted_tokens", "worth"),
}
_HISTOGRAMS = {
    "echo_sgl_ttft_seconds_bucket": "ttft_s",
    "echo_sgl_tpot_seconds_bucket": "tpot_s",
}
Buckets = dict[float, float]


@dataclass(slots=True)
class TaskFigures:
    """Everything that the server counted for one task class, summed over its ranks.

    Units: `ttft_s` and `tpot_s` map a bucket's upper bound in seconds to the cumulative
    number of observations at or below it.
    """

    prompt_tokens: float = 0.0
    cached_prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    retractions: float = 0.0
    punished_tokens: float = 0.0
    recomputed_tokens: float = 0.0
    held_back: float = 0.0
    reserve_hits: float = 0.0
    pool_requests: float = 0.0
    cached_tokens: float = 0.0
    active_kv_tokens: float = 0.0
    kv_limit_tokens: float = 0.0
    reserve_tokens: float = 0.0
    protected_tokens: float = 0.0
    pool_oldest_age_s: float = 0.0
    requests: dict[str, float] = field(default_factory=dict)
    evicted_tokens: dict[str, float] = field(default_factory=dict)
    ttft_s: Buckets = field(default_factory=dict)
    tpot_s: Buckets = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens; NaN before the first prompt."""
        if not self.prompt_tokens:
            return math.nan
        return self.cached_prompt_tokens / self.prompt_tokens

    def since(self, earlier: TaskFigures) -> TaskFigures:
        """What was counted after `earlier`; gauges keep their present value.

        A counter that went down means that the server was restarted: all then count from 0, also
        those that are higher again.
        """
        counts = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTERS.values()}
        by_key: dict[str, dict[Any, float]] = {}
        for name in ("requests", "evicted_tokens", *_HISTOGRAMS.values()):
            now, before = getattr(self, name), getattr(earlier, name)
            by_key[name] = {key: value - before.get(key, 0.0) for key, value in now.items()}
        if min(chain(counts.values(), *(one.values() for one in by_key.values()))) < 0:
            return self
        changes: dict[str, Any] = {**counts, **by_key}
        return dataclasses.replace(self, **changes)


def parse_figures(text: str) -> dict[Task, TaskFigures]:
    """Figures by task class; empty when the text holds none of Echo's metrics."""
    tasks: defaultdict[Task, TaskFigures] = defaultdict(TaskFigures)
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for task in Task:
            own = [sample for sample in family.samples if sample.labels.get("task") == task]
            for sample in own:
                _add(tasks[task], sample.name, sample.labels, float(sample.value))
    return {task: tasks[task] for task in Task} if tasks else {}


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """Estimate as Prometheus does: linear within the bucket that holds the share.

    NaN without observations; the largest finite bound when the share lies beyond it.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total:
        return math.nan
    wanted, low, below = share * total, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted and buckets[bound] > below:
            if math.isinf(bound):
                return low
            within = low + (bound - low) * (wanted - below) / (buckets[bound] - below)
            return min(within, bound)  # rounding may lead out of the bucket
        low, below = bound, buckets[bound]
    return low


def _add(figures: TaskFigures, name: str, labels: Mapping[str, str], value: float) -> None:
    if field_name := _COUNTERS.get(name) or _GAUGES.get(name):
        setattr(figures, field_name, getattr(figures, field_name) + value)
    elif field_name := _HISTOGRAMS.get(name):
        buckets: Buckets = getattr(figures, field_name)
        bound = float(labels["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
    elif name in _LABELLED:
        field_name, label = _LABELLED[name]
        counts: dict[str, float] = getattr(figures, field_name)
        kind = labels.get(label, "unknown")
        counts[kind] = counts.get(kind, 0.0) + value
    elif name == "echo_sgl_pool_oldest_age_seconds":
        figures.pool_oldest_age_s = max(figures.pool_oldest_age_s, value)
