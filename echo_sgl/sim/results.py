"""What a simulation gave: latencies of online requests, offline tokens, what the cache did."""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echo_sgl.batch_shape import BatchRow
from echo_sgl.estimators.budget import Target
from echo_sgl.sim.workload import SimRequest

INTERVAL_S = 60.0
_EMPTY_ROW = BatchRow(0, 0, 0, 0, 0, 0, 0)
_ROW = struct.Struct(f"{len(BatchRow._fields)}qd")


@dataclass(slots=True)
class SimResults:
    """Counts and columns; one entry per finished online request in the arrays.

    `online_kept`: requests whose promises were both kept. `refused`: online requests that can
    never fit. `unfinished`: requests that came and were not done at the end, `online_unfinished`:
    online ones that were not done, or had not come. `offline_begun_tokens`: of offline requests
    that ran at the end, prompt and answer as far as they were. `offline_by_interval`: offline
    tokens (prompt and answer) of requests that ended in each `INTERVAL_S`. `is_out_of_kv`: the run
    ended early because requests that were let in outgrew the pool. `digest` is over every step:
    two runs that agree in it did the same.
    Units: seconds, tokens.
    """

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    start_s: float = 0.0
    end_s: float = 0.0
    num_steps: int = 0
    num_prefill_steps: int = 0
    busy_s: float = 0.0
    online_done: int = 0
    online_kept: int = 0
    offline_done: int = 0
    refused: int = 0
    offline_refused: int = 0
    unfinished: int = 0
    online_unfinished: int = 0
    is_out_of_kv: bool = False
    online_prompt_tokens: int = 0
    online_cached_tokens: int = 0
    offline_prompt_tokens: int = 0
    offline_cached_tokens: int = 0
    offline_tokens: int = 0
    offline_begun_tokens: int = 0
    offline_output_tokens: int = 0
    offline_end_s: float = 0.0
    num_parks: int = 0
    num_resumes: int = 0
    num_retractions: int = 0
    num_prefill_parks: int = 0
    num_given_places: int = 0
    num_given_turns: int = 0
    evicted_tokens: int = 0
    evicted_needed_tokens: int = 0
    peak_online_tokens: int = 0
    num_memory_waits: int = 0
    longest_queue: int = 0
    largest_row: BatchRow = _EMPTY_ROW
    offline_by_interval: dict[int, int] = field(default_factory=dict)
    digest: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def offline_tokens_per_s(self) -> float:
        return self.offline_tokens / self.duration_s if self.duration_s else 0.0

    def statistic_s(self, metric: str, statistic: str) -> float:
        """Of "ttft" or "tpot": "mean" or a percentile as "p99"; NaN without requests."""
        values = np.asarray(self.ttft_s if metric == "ttft" else self.tpot_s)
        if not len(values):
            return math.nan
        if statistic == "mean":
            return float(values.mean())
        return float(np.percentile(values, float(statistic[1:])))

    def load(self, targets: Sequence[Target]) -> dict[str, float]:
        """Each target's value as a share of its limit; what nobody measured is kept."""
        values = {one.name: self.statistic_s(one.metric, one.statistic) for one in targets}
        return {
            one.name: 0.0 if math.isnan(values[one.name]) else values[one.name] / one.limit_s
            for one in targets
        }

    # ---- noting ----------------------------------------------------------------------------

    def note_step(self, row: BatchRow, start_s: float, time_s: float) -> None:
        self.num_steps += 1
        self.num_prefill_steps += row.num_prefills > 0
        self.busy_s += time_s
        self.end_s = start_s + time_s
        self.digest = zlib.crc32(_ROW.pack(*row, start_s), self.digest)
        largest = self.largest_row
        if row.num_prefills or row[4] > largest[4] or row[5] > largest[5] or row[6] > largest[6]:
            self.largest_row = BatchRow(*map(max, row, largest))

    def note_start(self, request: SimRequest) -> None:
        if request.is_offline:
            self.offline_prompt_tokens += request.seq_tokens
            self.offline_cached_tokens += request.prefix_tokens
        else:
            self.online_prompt_tokens += request.seq_tokens
            self.online_cached_tokens += request.prefix_tokens

    def note_end(self, request: SimRequest, num_tokens: int, now_s: float) -> None:
        """A request's answer of `num_tokens` is complete."""
        if request.is_offline:
            self.offline_done += 1
            self.offline_end_s = now_s
            done_tokens = request.prompt_tokens + num_tokens
            self.offline_tokens += done_tokens
            self.offline_output_tokens += num_tokens
            interval = int(now_s // INTERVAL_S)
            before = self.offline_by_interval.get(interval, 0)
            self.offline_by_interval[interval] = before + done_tokens
            return
        assert request.first_token_s is not None
        self.online_done += 1
        self.ttft_s.append(request.first_token_s - request.arrival_s)
        if num_tokens > 1:
            self.tpot_s.append((now_s - request.first_token_s) / (num_tokens - 1))

    def summary(self) -> dict[str, Any]:
        """The figures as JSON takes them."""
        latencies = {
            f"{metric}_{statistic}_s": _finite(self.statistic_s(metric, statistic))
            for metric in ("ttft", "tpot")
            for statistic in ("mean", "p50", "p99")
        }
        counts = {
            name: getattr(self, name)
            for name in (
                "num_steps",
                "online_done",
                "online_kept",
                "offline_done",
                "refused",
                "offline_refused",
                "unfinished",
                "online_unfinished",
                "offline_tokens",
                "offline_output_tokens",
                "num_parks",
                "num_resumes",
                "num_retractions",
                "num_given_places",
                "num_given_turns",
                "evicted_tokens",
                "evicted_needed_tokens",
                "peak_online_tokens",
                "longest_queue",
            )
        }
        return {
            "duration_s": self.duration_s,
            "busy_share": self.busy_s / self.duration_s if self.duration_s else 0.0,
            "offline_tokens_per_s": self.offline_tokens_per_s,
            "online_hit_ratio": _ratio(self.online_cached_tokens, self.online_prompt_tokens),
            "offline_hit_ratio": _ratio(self.offline_cached_tokens, self.offline_prompt_tokens),
            **latencies,
            **counts,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
