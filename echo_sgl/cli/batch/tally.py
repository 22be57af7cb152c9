"""What a batch run has done so far: counts, tokens, and how they are shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from echo_sgl.batches.lines.replies import Usage

LOG_INTERVAL_S = 30.0


@dataclass(slots=True)
class Tally:
    """Counts of one run. `already_done` lines were finished by an earlier run, `skipped` ones
    are invalid; tokens are of this run's answers only, `by_server` counts its lines by URL."""

    lines: int
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    already_done: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    reports_cached: bool = False
    by_server: dict[str, int] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return self.lines - self.ok - self.failed - self.skipped - self.already_done

    @property
    def hit_ratio(self) -> float | None:
        """Cached share of the prompt tokens; None while the server reported no cached tokens."""
        if not self.reports_cached or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    def add(self, usage: Usage, *, is_ok: bool, server: str) -> None:
        """Count one line whose record is on disk."""
        self.ok += is_ok
        self.failed += not is_ok
        self.by_server[server] = self.by_server.get(server, 0) + 1
        self.prompt_tokens += usage.prompt_tokens
        self.generated_tokens += usage.generated_tokens
        self.cached_tokens += usage.cached_tokens or 0
        self.reports_cached |= usage.cached_tokens is not None

    def as_json(self) -> dict[str, object]:
        document: dict[str, object] = asdict(self)
        del document["reports_cached"]
        if self.hit_ratio is None:
            document["cached_tokens"] = None
        return document | {"left": self.left, "hit_ratio": self.hit_ratio}

    def status(self) -> str:
        """Rates and hit ratio in one short line."""
        seconds = max(self.seconds, 1e-9)
        tokens = self.prompt_tokens + self.generated_tokens
        hits = "-" if self.hit_ratio is None else f"{self.hit_ratio:.1%}"
        rate = (self.ok + self.failed) / seconds
        return f"{rate:,.1f} lines/s  {tokens / seconds:,.0f} tokens/s  hits {hits}"


class Display:
    """Shows a tally on stderr: a bar on a terminal, a line now and then in a log."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._start_s = time.monotonic()
        self._next_log_s = self._start_s + LOG_INTERVAL_S
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time and show the bar until the block ends."""
        tally = self.tally
        self._start_s = time.monotonic()
        self._bar.add_task(
            "batch", total=tally.lines, completed=tally.lines - tally.left, status=""
        )
        try:
            with self._bar:
                yield
        finally:
            tally.seconds = time.monotonic() - self._start_s

    def update(self) -> None:
        now_s = time.monotonic()
        tally = self.tally
        tally.seconds = now_s - self._start_s
        done = tally.lines - tally.left
        if not self._bar.disable:
            self._bar.update(self._bar.task_ids[0], completed=done, status=tally.status())
        elif now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_INTERVAL_S
            self.say(f"{done} of {tally.lines} lines  {tally.status()}")

    def say(self, message: str) -> None:
        """Print one message above the bar."""
        self._console.print(f"echo-sgl: {message}", markup=False)
