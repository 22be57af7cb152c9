"""The batch service on /metrics: open batches, lines done, lines under way.

prometheus_client must not be imported before SGLang has named its multiprocess folder, so the
series are made when the dispatcher starts.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from echo_sgl.batches.store.batch_rows import OPEN, BatchRow

PAUSED = "paused"
FULL = "storage_full"
_PAUSABLE = ("validating", "in_progress")
SHOWN_STATUSES = (*OPEN, PAUSED, FULL)
OUTCOMES = ("answered", "failed")


class JobMetrics:
    """Reported by the process that runs the dispatcher.

    Servers that share a database all show its open batches; lines are those of this server.
    """

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Any:
            return Gauge(name, text, labels, multiprocess_mode="livesum")

        self._open = gauge(
            "echo_sgl_open_batches", "Batches that have not ended, by status.", ["status"]
        )
        self._waiting = gauge(
            "echo_sgl_batch_waiting_lines", "Lines of checked open batches without a result."
        )
        self._in_flight = gauge(
            "echo_sgl_batch_lines_in_flight",
            "Lines that are in this server's engine or whose result is on its way to disk.",
        )
        self._lines = Counter(
            "echo_sgl_batch_lines", "Lines whose result this server has written.", ["outcome"]
        )
        for outcome in OUTCOMES:
            self._lines.labels(outcome)
        self.show_batches(())
        self.show_in_flight(0)

    @staticmethod
    def create(*, enabled: bool) -> JobMetrics:
        return JobMetrics() if enabled else _NoJobMetrics()

    def show_batches(self, rows: Iterable[BatchRow], full_tenants: Collection[str] = ()) -> None:
        """Refresh what follows from the open batches; about once a second.

        `full_tenants` may store no more answers.
        """
        rows = list(rows)
        counts = Tally(_shown_status(row, full_tenants) for row in rows)
        for status in SHOWN_STATUSES:
            self._open.labels(status).set(counts[status])
        self._waiting.set(sum(row.total - row.completed - row.failed for row in rows))

    def show_in_flight(self, num_lines: int) -> None:
        self._in_flight.set(num_lines)

    def count_lines(self, are_ok: Iterable[bool]) -> None:
        """Lines were written; each is an answer (True) or a failure."""
        counts = Tally(OUTCOMES[0] if is_ok else OUTCOMES[1] for is_ok in are_ok)
        for outcome, num_lines in counts.items():
            self._lines.labels(outcome).inc(num_lines)


def _shown_status(row: BatchRow, full_tenants: Collection[str]) -> str:
    """A batch that ends keeps its pause until it has ended, but waits for nobody."""
    if row.paused_at_s is not None and row.status in _PAUSABLE:
        return PAUSED
    return FULL if row.status == "in_progress" and row.tenant in full_tenants else str(row.status)


class _NoJobMetrics(JobMetrics):
    """For servers without --enable-metrics."""

    def __init__(self) -> None:
        pass

    def show_batches(self, rows: Iterable[BatchRow], full_tenants: Collection[str] = ()) -> None:
        pass

    def show_in_flight(self, num_lines: int) -> None:
        pass

    def count_lines(self, are_ok: Iterable[bool]) -> None:
        pass
