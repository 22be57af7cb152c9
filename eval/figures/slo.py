"""What online users are promised in an experiment, and how many of them got it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echo_sgl.types import Task
from eval.figures.summary import class_stats
from eval.load.records import Record, Status
from eval.workloads import WorkloadError


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest TTFT and TPOT that keep the promise, in seconds."""

    ttft_s: float
    tpot_s: float

    def is_met(self, record: Record) -> bool:
        """Answered in full, with both in time; an answer of one token has no TPOT to keep."""
        if record.status is not Status.OK or record.ttft_s is None:
            return False
        return record.ttft_s <= self.ttft_s and (record.tpot_s or 0.0) <= self.tpot_s


def parse_factors(text: str) -> tuple[float, float]:
    """Factors for TTFT and TPOT from "1.5" or "1.2,1.1".

    Errors: `ValueError` when there are not one or two numbers of 1 or more.
    """
    try:
        factors = [float(part) for part in text.split(",")]
    except ValueError:
        factors = []
    if len(factors) not in (1, 2) or not all(1.0 <= factor < 1000.0 for factor in factors):
        raise ValueError(
            f"--slo-factor is {text!r}; give one number of 1 or more, or two for TTFT and TPOT "
            "like 1.2,1.1"
        )
    return factors[0], factors[-1]


def derive_slo(alone: Sequence[Record], factors: tuple[float, float]) -> Slo:
    """p99 TTFT and TPOT of online requests on a server without offline work, times the factors.

    Errors: `WorkloadError` when too little was answered to know them, or something failed.
    """
    stats = class_stats(alone, Task.ONLINE)
    ttft_ms, tpot_ms = stats["ttft_ms"]["p99"], stats["tpot_ms"]["p99"]
    unanswered = stats["requests"] - stats["ok"]
    if unanswered or ttft_ms is None or tpot_ms is None:
        error = min((one.error for one in alone if one.error), default="")
        raise WorkloadError(
            f"the stock server alone left {unanswered} of {stats['requests']} online requests "
            f"unanswered{f' ({error})' if error else ''}, so nothing can be promised; lower "
            "--online-load or raise --drain-s, and see that prompts fit the model's context "
            "(--max-prompt-tokens) and answers have at least 2 tokens"
        )
    return Slo(ttft_ms / 1000 * factors[0], tpot_ms / 1000 * factors[1])


def attainment(records: Iterable[Record], slo: Slo) -> float | None:
    """Share of the online requests that got what was promised; None without any."""
    online = [record for record in records if record.task is Task.ONLINE]
    return sum(slo.is_met(record) for record in online) / len(online) if online else None
