"""Batches as people read them: a table, a summary, and progress with rate and time left."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

RATE_WINDOW_S = 60.0


class Progress:
    """Turns looks at a batch into rate and time left."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()

    def line(self, batch: dict[str, Any], now_s: float) -> str:
        """One line on where the batch is; `now_s` in Unix seconds."""
        done, total = num_done(batch), counts_of(batch)["total"]
        self._looks.append((now_s, done))
        while now_s - self._looks[0][0] > RATE_WINDOW_S and len(self._looks) > 2:
            self._looks.popleft()
        parts = [f"{batch['status']}  {done:,} of {total:,} lines"]
        if batch.get("paused_at"):
            parts.append("paused")
        if failed := counts_of(batch)["failed"]:
            parts.append(f"{failed:,} failed")
        rate = self.lines_per_s
        if rate and total > done:
            parts.append(f"{rate:,.1f} lines/s, {shown_span((total - done) / rate)} left")
        if batch["status"] == "in_progress" and batch.get("expires_at"):
            parts.append(f"window ends in {shown_span(batch['expires_at'] - now_s)}")
        parts.append(f"hits {hit_ratio(batch)}")
        return "  ".join(parts)

    @property
    def lines_per_s(self) -> float | None:
        """Over the last minute of looks; None before a second one."""
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


def batch_table(batches: list[dict[str, Any]]) -> Table:
    """One row per batch, newest first; without lines, which a narrow terminal would break."""
    names = ("id", "status", "created", "done", "failed", "total", "hits")
    table = Table(*names, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for batch in batches:
        counts = counts_of(batch)
        table.add_row(
            batch["id"],
            batch["status"] + (" (paused)" if batch.get("paused_at") else ""),
            shown_time(batch["created_at"]),
            *(f"{counts[name]:,}" for name in ("completed", "failed", "total")),
            hit_ratio(batch),
        )
    return table


def summary(batch: dict[str, Any]) -> str:
    """All that matters of one batch, a few lines of text."""
    usage = batch.get("usage") or {}
    rows = [
        ("id", batch["id"]),
        ("status", batch["status"] + (" (paused)" if batch.get("paused_at") else "")),
        ("endpoint", batch["endpoint"]),
        ("created", shown_time(batch["created_at"])),
        ("window", f"{batch['completion_window']}, until {shown_time(batch.get('expires_at'))}"),
        ("lines", _shown_counts(batch)),
        ("tokens", f"{usage.get('input_tokens', 0):,} in, {usage.get('output_tokens', 0):,} out"),
        ("hits", hit_ratio(batch)),
        ("output", batch.get("output_file_id") or "-"),
        ("errors", batch.get("error_file_id") or "-"),
    ]
    lines = [f"{name:>9}  {value}" for name, value in rows]
    for problem in ((batch.get("errors") or {}).get("data") or [])[:20]:
        where = f"line {problem['line']}: " if problem.get("line") else ""
        lines.append(f"{'problem':>9}  {where}{problem['message']} [{problem['code']}]")
    return "\n".join(lines)


def counts_of(batch: dict[str, Any]) -> dict[str, int]:
    return batch.get("request_counts") or {"total": 0, "completed": 0, "failed": 0}


def num_done(batch: dict[str, Any]) -> int:
    counts = counts_of(batch)
    return counts["completed"] + counts["failed"]


def is_well(batch: dict[str, Any]) -> bool:
    """Whether it completed and no line of it failed."""
    return batch["status"] == "completed" and not counts_of(batch)["failed"]


def cached_share(batch: dict[str, Any]) -> float | None:
    """Share of the prompt tokens that the KV cache had; None while unknown."""
    usage = batch.get("usage") or {}
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens")
    tokens = usage.get("input_tokens")
    return cached / tokens if tokens and cached is not None else None


def hit_ratio(batch: dict[str, Any]) -> str:
    """`cached_share` as people read it."""
    share = cached_share(batch)
    return "-" if share is None else f"{share:.1%}"


def shown_span(seconds: float) -> str:
    """A time span in its two largest units."""
    minutes, whole_s = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole_s} s" if minutes else f"{whole_s} s"


def shown_time(unix_s: float | None) -> str:
    if unix_s is None:
        return "-"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _shown_counts(batch: dict[str, Any]) -> str:
    counts = counts_of(batch)
    return f"{counts['completed']:,} answered, {counts['failed']:,} failed of {counts['total']:,}"
