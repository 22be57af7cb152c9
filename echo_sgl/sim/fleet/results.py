"""What a fleet did: kept promises, offline work, and what its rules cost."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import numpy as np

from echo_sgl.batch_shape import BatchRow
from echo_sgl.sim.results import INTERVAL_S
from echo_sgl.sim.workload import SimRequest

_STEP = Struct(f"{1 + len(BatchRow._fields)}qd")


@dataclass(slots=True)
class FleetResults:
    """Counts, and one latency per online request that ended.

    `online_kept`: those whose TTFT and TPOT were both within the promise. `recomputed_tokens`
    had been computed before. `offline_by_interval`: tokens of offline requests that ended in each
    `INTERVAL_S`. `digest` is over every step: two runs that agree in it did the
    same. Units: seconds, tokens.
    """

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    end_s: float = 0.0
    online_came: int = 0
    online_done: int = 0
    online_kept: int = 0
    offline_came: int = 0
    offline_done: int = 0
    offline_tokens: int = 0
    offline_output_tokens: int = 0
    offline_by_interval: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    num_steps: int = 0
    num_pushes: int = 0
    num_pulls: int = 0
    num_evictions: int = 0
    num_interrupts: int = 0
    num_parks: int = 0
    recomputed_tokens: int = 0
    relaxed_busy_s: float = 0.0
    strict_busy_s: float = 0.0
    digest: int = 0

    @property
    def violation_share(self) -> float:
        """Of the online requests that came: the promise was broken, or they are not done."""
        return 1.0 - self.online_kept / self.online_came if self.online_came else 0.0

    def percentile_s(self, metric: str, percentile: float) -> float | None:
        values = np.asarray(self.ttft_s if metric == "ttft" else self.tpot_s)
        return float(np.percentile(values, percentile)) if len(values) else None

    def note_step(self, place: int, row: BatchRow, start_s: float, time_s: float) -> None:
        self.num_steps += 1
        self.end_s = max(self.end_s, start_s + time_s)
        self.digest = zlib.crc32(_STEP.pack(place, *row, start_s), self.digest)

    def note_end(self, request: SimRequest, num_tokens: int, now_s: float) -> tuple[float, float]:
        """An answer is complete; its TTFT and TPOT, the latter 0 for a single token."""
        assert request.first_token_s is not None
        ttft_s = request.first_token_s - request.arrival_s
        tpot_s = (now_s - request.first_token_s) / max(1, num_tokens - 1)
        if request.is_offline:
            self.offline_done += 1
            self.offline_tokens += request.prompt_tokens + num_tokens
            self.offline_output_tokens += num_tokens
            interval = int(now_s // INTERVAL_S)
            before = self.offline_by_interval.get(interval, 0)
            self.offline_by_interval[interval] = before + request.prompt_tokens + num_tokens
        else:
            self.online_done += 1
            self.ttft_s.append(ttft_s)
            if num_tokens > 1:
                self.tpot_s.append(tpot_s)
        return ttft_s, tpot_s

    def counts(self) -> dict[str, Any]:
        """The counts as JSON takes them."""
        left_out = ("ttft_s", "tpot_s", "offline_by_interval", "digest")
        return {name: getattr(self, name) for name in self.__slots__ if name not in left_out}
