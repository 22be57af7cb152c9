"""The screen of `echo-sgl top`: tables of one look at the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo_sgl.types import Task

if TYPE_CHECKING:
    from echo_sgl.cli.watching.looks import Look
    from echo_sgl.cli.watching.samples import Samples

NOTHING = "-"
KINDS = ("prefill", "decode", "mixed")
EVIDENCE = {0.0: "too little", 1.0: "old", 2.0: "fresh"}
STATUSES = ("validating", "in_progress", "paused", "storage_full", "finalizing", "cancelling")
PROMISED = "promised"
EXACT_NUMBER, EXACT_RATE = 100_000, 1000


def screen(url: str, look: Look) -> RenderableType:
    """All tables of one look, under a line that says where and over which time."""
    over = "since the server's start"
    if look.interval_s is not None:
        over = f"last {look.interval_s:.1f} s, counts per second"
    parts: list[RenderableType] = [Text(f"echo-sgl top  {url}  {over}", style="bold")]
    if look.trouble:
        parts.append(Text(f"old figures: {look.trouble}", style="bold red"))
    tables = (_classes(look), _cache(look), _steps(look), _work(look))
    return Group(*parts, *tables)


def _classes(look: Look) -> Table:
    """What the users of each class got, and what online ones are promised."""
    heads = ("requests", "not finished", "prompt tok", "output tok", "hits")
    table = _table("class", *heads, "TTFT p50", "p99", "TPOT p50", "p99")
    recent = look.recent
    for task in Task:
        ended = recent.total("requests_total", task=task)
        finished = recent.total("requests_total", task=task, outcome="finished")
        prompt = recent.total("prompt_tokens_total", task=task)
        table.add_row(
            task,
            _count(look, ended),
            _count(look, ended - finished),
            _count(look, prompt),
            _count(look, recent.total("generated_tokens_total", task=task)),
            _percent(_ratio(recent.total("cached_prompt_tokens_total", task=task), prompt)),
            *(_time(recent.quantile("ttft_seconds", share, task=task)) for share in (0.5, 0.99)),
            *(_time(recent.quantile("tpot_seconds", share, task=task)) for share in (0.5, 0.99)),
        )
    ttft_s, tpot_s = (look.now.least(f"promised_{name}_seconds") for name in ("ttft", "tpot"))
    if math.isfinite(ttft_s) or math.isfinite(tpot_s):
        table.add_row(PROMISED, *[""] * 6, _time(ttft_s), "", _time(tpot_s))
    return table


def _cache(look: Look) -> Table:
    """Who holds the KV pool, and what the reserve and evictions do."""
    heads = ("active KV", "may hold", "cached", "protected", "reserve")
    table = _table("cache", *heads, "evicted", "punished", "held back", "reserve hits")
    now, recent = look.now, look.recent
    for task in Task:
        table.add_row(
            task,
            _number(now.total("active_kv_tokens", task=task)),
            _number(now.total("kv_limit_tokens", task=task)),
            _number(now.total("cached_tokens", task=task)),
            _number(now.total("protected_tokens", task=task)),
            _number(now.total("reserve_tokens", task=task)),
            _count(look, recent.total("evicted_tokens_total", task=task)),
            _count(look, recent.total("punished_tokens_total", task=task)),
            _count(look, recent.total("held_back_total", task=task)),
            _count(look, recent.total("reserve_hits_total", task=task)),
        )
    return table


def _steps(look: Look) -> Table:
    """How true the predictions of a step's time are, by what the step ran."""
    heads = ("steps", "predicted / true p10", "p50", "p90", "within bound", "evidence", "drifts")
    table = _table("steps", *heads)
    now, recent = look.now, look.recent
    name = "step_time_predicted_ratio"
    for kind in KINDS:
        evidence = EVIDENCE.get(now.least("step_time_evidence", kind=kind), NOTHING)
        table.add_row(
            kind,
            _count(look, recent.total(f"{name}_count", kind=kind)),
            *(_signed(recent.quantile(name, share, kind=kind) - 1) for share in (0.1, 0.5, 0.9)),
            _percent(now.least("step_time_coverage_ratio", kind=kind)),
            evidence,
            _count(look, recent.total("step_time_drifts_total", kind=kind)),
        )
    return table


def _work(look: Look) -> Table:
    """One line each for limit, parking, the pool and jobs."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for name, facts in (
        ("limit", _limit_facts(look)),
        ("parks", _park_facts(look)),
        ("pool", _pool_facts(look.now)),
        ("jobs", _job_facts(look)),
    ):
        table.add_row(name, "   ".join(f"{label} {value}" for label, value in facts))
    return table


def _limit_facts(look: Look) -> Sequence[tuple[str, str]]:
    now, recent = look.now, look.recent
    return (
        ("of a step", _time(now.largest("step_limit_seconds"))),
        ("longest online wait", _time(now.largest("online_wait_seconds"))),
        ("in steps", _number(now.largest("online_wait_steps"))),
        ("planning p50", _time(recent.quantile("planning_seconds", 0.5))),
        ("p99", _time(recent.quantile("planning_seconds", 0.99))),
    )


def _park_facts(look: Look) -> Sequence[tuple[str, str]]:
    now, recent = look.now, look.recent
    return (
        ("now", _number(now.total("parked_requests"))),
        ("parks", _count(look, recent.total("parks_total", task=Task.OFFLINE))),
        ("resumes", _count(look, recent.total("resumes_total"))),
        ("prefills set aside", _count(look, recent.total("parked_prefills_total"))),
        ("retractions", _count(look, recent.total("retractions_total"))),
    )


def _pool_facts(now: Samples) -> Sequence[tuple[str, str]]:
    return (
        ("requests", _number(now.total("pool_requests"))),
        ("oldest", _time(now.largest("pool_oldest_age_seconds"))),
    )


def _job_facts(look: Look) -> Sequence[tuple[str, str]]:
    now = look.now
    waiting = now.total("batch_waiting_lines")
    if math.isnan(waiting):
        return (("the server takes none;", "see echo-sgl serve --echo-state-dir"),)
    counts = ((status, now.total("open_batches", status=status)) for status in STATUSES)
    shown = [f"{number:.0f} {status.replace('_', ' ')}" for status, number in counts if number > 0]
    done = look.recent.total("batch_lines_total")
    left_s = _ratio(waiting * (look.interval_s or math.nan), done)
    return (
        ("batches", ", ".join(shown) or "none open"),
        ("lines waiting", _number(waiting)),
        ("in flight", _number(now.total("batch_lines_in_flight"))),
        ("done", _count(look, done)),
        ("failed", _count(look, look.recent.total("batch_lines_total", outcome="failed"))),
        ("left at this rate", _time(left_s)),
    )


def _table(*heads: str) -> Table:
    """Ten columns fit into a terminal of 80 characters: heads take two lines."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(
            head.replace(" ", "\n", 1),
            justify="right" if number else "left",
            vertical="bottom",
            overflow="fold",
        )
    return table


def _count(look: Look, value: float) -> str:
    """A count since the start, or a rate per second over the last interval."""
    if look.interval_s is None:
        return _number(value)
    per_s = value / look.interval_s
    return _number(per_s) if per_s >= EXACT_RATE or math.isnan(per_s) else f"{per_s:,.1f}"


def _number(value: float) -> str:
    """Up to five digits as they are, of more the first three."""
    if math.isnan(value):
        return NOTHING
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= max(size, EXACT_NUMBER):
            return f"{float(f'{value / size:.3g}'):g}{unit}"
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.1%}"


def _signed(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:+.0%}"


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan


def _time(value_s: float) -> str:
    """Three digits in the unit that fits."""
    if math.isnan(value_s):
        return NOTHING
    if math.isinf(value_s):
        return "none"
    for unit, size_s in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value_s >= size_s:
            return f"{value_s / size_s:.3g} {unit}"
    return f"{value_s * 1e6:.3g} us" if value_s else "0 s"
