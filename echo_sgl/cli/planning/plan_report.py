"""What `echo-sgl plan` found, for a reader and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo_sgl.estimators.budget import Target
    from echo_sgl.sim.load_sweep import LoadPoint
    from echo_sgl.sim.planner import Plan

Prices = Mapping[str, float] | None


def table(
    found: Plan, targets: Sequence[Target], heads: Sequence[str], prices: Prices
) -> Iterator[str]:
    """The plan for a reader. `heads`: what was measured on each device, and under which rules."""
    yield from heads
    yield f"SLO {', '.join(map(str, targets))}"
    yield (
        f"peak: {found.num_peak_requests} requests in five minutes, "
        f"{found.peak_start_s:.0f} s after the start"
    )
    limits = [one.name for one in targets]
    yield _row(("device", "instances", "KV tokens", *limits, "SLO"))
    for trial in found.trials:
        values = [_seconds(trial.values_s[name]) for name in limits]
        size = (str(trial.resource.num_instances), f"{trial.resource.kv_tokens:,}")
        verdict = "kept" if trial.is_kept else "broken"
        yield _row((trial.resource.device, *size, *values, verdict))
    yield from _whole(found, targets, prices)


def _whole(found: Plan, targets: Sequence[Target], prices: Prices) -> Iterator[str]:
    whole, chosen = found.whole, found.chosen
    if whole is None or chosen is None:
        return
    yield f"whole trace with offline work: {whole.duration_s / 3600:.2f} h simulated"
    yield f"  SLO beside it     {'kept' if found.is_kept_beside else 'broken'}: " + ", ".join(
        f"{one.name} {_seconds(whole.statistic_s(one.metric, one.statistic))}" for one in targets
    )
    if whole.online_unfinished:
        yield f"  not done          {whole.online_unfinished:,} online requests of one instance"
    if found.num_too_long or whole.offline_refused:
        yield (
            f"  refused           {found.num_too_long} requests, {whole.offline_refused} lines of "
            f"one instance: their prompts do not fit in {chosen.kv_tokens:,} tokens"
        )
    tokens_per_hour = found.offline_tokens_per_s * 3600
    yield f"  offline tokens    {tokens_per_hour:,.0f} an hour (prompt and answer)"
    done = min(found.num_lines, whole.offline_done * chosen.num_instances)
    end = f", after {whole.offline_end_s / 3600:.2f} h" if found.is_all_done and done else ""
    yield f"  offline lines     {done:,} of {found.num_lines:,} done{end}"
    hits = whole.offline_cached_tokens / max(1, whole.offline_prompt_tokens)
    yield f"  offline hit ratio {hits:.1%}"
    if prices:
        price_per_hour = prices[chosen.device]
        price = found.price_per_million(price_per_hour)
        shown = "no offline tokens" if price is None else f"{price:.4g} per million offline tokens"
        total = price_per_hour * chosen.num_instances
        yield f"  price             {total:g} an hour; {shown}"


def sweep_table(points: Sequence[LoadPoint]) -> Iterator[str]:
    """Attainment and offline tokens against the load."""
    yield "busiest half hour at other loads:"
    yield _row(("load", "promises kept", "offline tokens/h"))
    for one in points:
        tokens = f"{one.offline_tokens_per_s * 3600:,.0f}"
        yield _row((f"{one.load:g}", f"{one.attainment:.1%}", tokens))


def document(
    found: Plan,
    targets: Sequence[Target],
    prices: Prices,
    warnings: Sequence[str],
    points: Sequence[LoadPoint],
) -> dict[str, Any]:
    """The plan as JSON takes it."""
    whole, chosen = found.whole, found.chosen
    price = found.price_per_million(prices[chosen.device]) if prices and chosen else None
    return {
        "slo": {one.name: one.limit_s for one in targets},
        "peak": {"start_s": found.peak_start_s, "num_requests": found.num_peak_requests},
        "trials": [
            {
                **dataclasses.asdict(trial.resource),
                "instance": trial.instance,
                "is_kept": trial.is_kept,
                "load": trial.load,
                "binds": trial.binds,
                "results": trial.results.summary(),
            }
            for trial in found.trials
        ],
        "chosen": dataclasses.asdict(chosen) if chosen else None,
        "whole": whole.summary() if whole is not None else None,
        "whole_load": found.whole_load,
        "num_too_long": found.num_too_long,
        "is_kept_beside": found.is_kept_beside,
        "is_all_done": found.is_all_done,
        "offline_tokens_per_s": found.offline_tokens_per_s,
        "price_per_million_offline_tokens": price,
        "loads": [dataclasses.asdict(one) for one in points],
        "warnings": list(warnings),
    }


def _seconds(value_s: float) -> str:
    """Of requests of one token nobody knows a TPOT."""
    return "-" if math.isnan(value_s) else f"{value_s:.4g} s"


def _row(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:>12}" for cell in cells)
