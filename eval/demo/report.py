"""What the demo shows at its end: one table and one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from echo_sgl.types import Task
from eval.figures.summary import class_stats, tokens_per_s
from eval.load.records import Record, Status

# Fits into 80 columns.
COLUMNS = (
    "arm",
    "class",
    "reqs",
    "prompt\ntokens",
    "cached\ntokens",
    "hit\nratio",
    "TTFT s\np50",
    "\np99",
    "TPOT ms\np50",
    "\np99",
    "offline\ntok/s",
)


@dataclass(frozen=True, slots=True)
class ArmResult:
    """All requests of one arm."""

    name: str
    title: str
    records: list[Record]

    @property
    def job_s(self) -> float:
        """Seconds until the job's last answer, or until it was stopped."""
        return max((r.end_s or 0.0 for r in self._job), default=0.0)

    @property
    def job_tokens_per_s(self) -> float:
        """Prompt + generated tokens of answered lines a second."""
        return tokens_per_s(self.records, 0.0, self.job_s)

    @property
    def num_job_lines_answered(self) -> int:
        return sum(r.status is Status.OK for r in self._job)

    @property
    def _job(self) -> list[Record]:
        return [r for r in self.records if r.task is Task.OFFLINE]

    def stats(self, task: Task) -> dict[str, Any]:
        return class_stats(self.records, task)


def print_results(results: list[ArmResult], console: Console) -> None:
    """The table, what went wrong if anything did, and the difference in one sentence."""
    console.print()
    console.print(result_table(results))
    for fault in faults(results):
        console.print(f"note: {fault}", style="yellow", highlight=False)
    console.print(difference(results[0], results[-1]), highlight=False)


def result_table(results: list[ArmResult]) -> Table:
    """One row per arm and class."""
    table = Table(
        title="Live chat (online) and a job file (offline) on one server",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    for result in results:
        for task in Task:
            table.add_row(*_row(result, task), end_section=task is Task.OFFLINE)
    return table


def faults(results: list[ArmResult]) -> list[str]:
    """Sentences about failed, unfinished and late requests; none when all went well."""
    kinds = {
        "error": "failed",
        "cancelled": "were not answered within the time limit",
        "late": "were sent late by this client (it shares the cores with the server)",
    }
    found = []
    for result in results:
        for task in Task:
            stats = result.stats(task)
            found += [
                f"{result.title}: {stats[kind]} of {stats['requests']} {task} requests {words}"
                for kind, words in kinds.items()
                if stats[kind]
            ]
    return found


def difference(base: ArmResult, other: ArmResult) -> str:
    """What changed from the first arm to the last, whichever way."""
    before, after = base.stats(Task.OFFLINE), other.stats(Task.OFFLINE)
    waits = [result.stats(Task.ONLINE)["ttft_ms"]["p99"] for result in (base, other)]
    return (
        f"From {base.title} to {other.title}: the job's lines answered "
        f"{base.num_job_lines_answered} in {base.job_s:.0f} s -> "
        f"{other.num_job_lines_answered} in {other.job_s:.0f} s, its prompt tokens found in the "
        f"cache {_percent(before['hit_ratio'])} -> {_percent(after['hit_ratio'])}, the chat's "
        f"wait for a first token (p99) {_s(waits[0])} s -> {_s(waits[1])} s."
    )


def _row(result: ArmResult, task: Task) -> list[str]:
    stats = result.stats(task)
    ttft_ms, tpot_ms = stats["ttft_ms"], stats["tpot_ms"]
    return [
        result.name,
        task,
        f"{stats['requests']:,}",
        f"{stats['prompt_tokens']:,}",
        f"{stats['cached_tokens']:,}",
        _percent(stats["hit_ratio"]),
        *(_s(ttft_ms[point]) for point in ("p50", "p99")),
        *(_ms(tpot_ms[point]) for point in ("p50", "p99")),
        f"{result.job_tokens_per_s:,.0f}" if task is Task.OFFLINE else "",
    ]


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _s(value_ms: float | None) -> str:
    return "-" if value_ms is None else f"{value_ms / 1000:,.2f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
