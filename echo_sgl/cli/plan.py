"""`echo-sgl plan`: how much hardware a trace needs, and what offline work it leaves room for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_sgl.errors import ConfigError

if TYPE_CHECKING:
    from echo_sgl.config import EchoConfig
    from echo_sgl.estimators.budget import Target
    from echo_sgl.estimators.profile import Profile
    from echo_sgl.sim.planner import Plan, Resource
    from echo_sgl.sim.workload import Trace

NOT_KEPT_EXIT = 1
MAX_RESOURCES = 100


def plan(  # noqa: PLR0913, PLR0917 - one parameter per option
    trace: Annotated[Path, typer.Option(help="Online requests: Azure, BurstGPT, Mooncake or own.")],
    profile: Annotated[Path, typer.Option(help="Written by echo-sgl calibrate.")],
    slo: Annotated[str, typer.Option(help="As ttft_p99=1s,tpot_p99=50ms (mean, p50, p90, p99).")],
    jobs: Annotated[
        Path | None, typer.Option(help="Offline lines, an OpenAI batch file.  [default: none]")
    ] = None,
    kv_tokens: Annotated[str, typer.Option(help="KV pool sizes to try.")] = "100000",
    instances: Annotated[str, typer.Option(help="Numbers of servers to try.")] = "1",
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of one instance, in any money.", min=0)
    ] = None,
    config: Annotated[str, typer.Option(help="Echo's config on the servers.")] = "echo",
    job_output_tokens: Annotated[
        int, typer.Option(help="Answer length of a line.  [default: all that it allows]", min=0)
    ] = 0,
    page_tokens: Annotated[int, typer.Option(help="SGLang's --page-size.", min=1)] = 1,
    max_running_requests: Annotated[int, typer.Option(help="SGLang's.", min=1)] = 256,
    chunked_prefill_tokens: Annotated[int, typer.Option(help="SGLang's.", min=1)] = 8192,
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Leave out requests that failed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the smallest hardware that keeps an SLO, and what offline work it leaves room for.

    Example:

        echo-sgl plan --trace online.csv --jobs jobs.jsonl --profile h100.json
        --slo ttft_p99=1s,tpot_p99=50ms --kv-tokens 100000,200000 --instances 1,2,4

    Exit code 1: no hardware that was tried keeps the SLO.
    """
    from echo_sgl.cli.budget import read_slo
    from echo_sgl.config import load_config, resolve_config_path
    from echo_sgl.estimators.profile import load_profile
    from echo_sgl.sim.server_config import NO_HOST_TIME, ServerConfig
    from echo_sgl.sim.trace_files import read_trace_file

    targets = read_slo(slo)
    resources = _resources(kv_tokens, instances)
    measured = load_profile(profile, device="", model="", force=True)
    read = read_trace_file(trace, skip_empty=skip_empty)
    server = ServerConfig(
        device=measured.estimator,
        kv_tokens=resources[0].kv_tokens,
        echo=promising(load_config(resolve_config_path(config)), targets),
        page_tokens=page_tokens,
        max_running_requests=max_running_requests,
        chunked_prefill_tokens=chunked_prefill_tokens,
        host=measured.host or NO_HOST_TIME,
    )
    offline = _offline_work(jobs, job_output_tokens)
    found = _plan_with_progress(server, read.trace, offline, targets, resources)
    warnings = [*read.warnings, *_range_warnings(found, measured)]
    _show(found, targets, measured, price_per_hour, warnings, as_json=as_json)


def _offline_work(jobs: Path | None, output_tokens: int) -> Trace:
    from echo_sgl.sim.job_lines import read_job_lines
    from echo_sgl.sim.workload import empty_trace
    from echo_sgl.types import Task

    if jobs is None:
        return empty_trace(Task.OFFLINE)
    return read_job_lines(jobs, output_tokens=output_tokens)


def _show(
    found: Plan,
    targets: tuple[Target, ...],
    measured: Profile,
    price_per_hour: float | None,
    warnings: list[str],
    *,
    as_json: bool,
) -> None:
    """Print the plan. Errors: `typer.Exit` with code 1 when nothing keeps the SLO."""
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        document = plan_document(found, targets, price_per_hour, warnings)
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(table(found, targets, measured, price_per_hour)))
    if found.chosen is None:
        typer.echo(f"echo-sgl: nothing tried keeps the SLO. What binds: {found.binds}", err=True)
        raise typer.Exit(NOT_KEPT_EXIT)


def promising(echo: EchoConfig, targets: tuple[Target, ...]) -> EchoConfig:
    """The config with the SLO's strictest limits as promises, where it names none itself."""
    from echo_sgl.config import SloConfig

    limits = {
        metric: min((one.limit_s for one in targets if one.metric == metric), default=0.0)
        for metric in ("ttft", "tpot")
    }
    if echo.slo != SloConfig() or not all(limits.values()):
        return echo
    slo = dataclasses.replace(echo.slo, ttft_s=limits["ttft"], tpot_s=limits["tpot"])
    limit = "slack" if echo.steps.limit == "relative" else echo.steps.limit
    steps = dataclasses.replace(echo.steps, limit=limit)
    return dataclasses.replace(echo, slo=slo, steps=steps)


def table(
    found: Plan, targets: tuple[Target, ...], measured: Profile, price_per_hour: float | None
) -> Iterator[str]:
    """The plan for a reader."""
    yield f"device {measured.device}, model {measured.model}; SLO {', '.join(map(str, targets))}"
    yield (
        f"peak: {found.num_peak_requests} requests in five minutes, "
        f"{found.peak_start_s:.0f} s after the start"
    )
    names = [one.name for one in targets]
    yield _row(("instances", "KV tokens", *names, "SLO"))
    for trial in found.trials:
        values = [f"{trial.values_s[name]:.4g} s" for name in names]
        size = (str(trial.resource.num_instances), f"{trial.resource.kv_tokens:,}")
        yield _row((*size, *values, "kept" if trial.is_kept else "broken"))
    if found.whole is None or found.chosen is None:
        return
    whole, many = found.whole, found.chosen.num_instances
    kept = max(found.whole_load.values()) <= 1.0
    yield f"whole trace with offline work: {whole.duration_s / 3600:.2f} h simulated"
    yield f"  SLO beside it     {'kept' if kept else 'broken'}: " + ", ".join(
        f"{one.name} {whole.statistic_s(one.metric, one.statistic):.4g} s" for one in targets
    )
    tokens_per_hour = found.offline_tokens_per_s * 3600
    yield f"  offline tokens    {tokens_per_hour:,.0f} an hour (prompt and answer)"
    done = min(found.num_lines, whole.offline_done * many)
    end = f", after {whole.offline_end_s / 3600:.2f} h" if found.is_all_done and done else ""
    yield f"  offline lines     {done:,} of {found.num_lines:,} done{end}"
    hits = whole.offline_cached_tokens / max(1, whole.offline_prompt_tokens)
    yield f"  offline hit ratio {hits:.1%}"
    if price_per_hour is not None:
        price = found.price_per_million(price_per_hour)
        shown = "no offline tokens" if price is None else f"{price:.4g} per million offline tokens"
        yield f"  price             {price_per_hour * many:g} an hour; {shown}"


def plan_document(
    found: Plan, targets: tuple[Target, ...], price_per_hour: float | None, warnings: list[str]
) -> dict[str, Any]:
    """The plan as JSON takes it."""
    whole = found.whole
    return {
        "slo": {one.name: one.limit_s for one in targets},
        "peak": {"start_s": found.peak_start_s, "num_requests": found.num_peak_requests},
        "trials": [
            {
                **dataclasses.asdict(trial.resource),
                "is_kept": trial.is_kept,
                "load": trial.load,
                "binds": trial.binds,
                "results": trial.results.summary(),
            }
            for trial in found.trials
        ],
        "chosen": dataclasses.asdict(found.chosen) if found.chosen else None,
        "whole": whole.summary() if whole is not None else None,
        "whole_load": found.whole_load,
        "is_all_done": found.is_all_done,
        "offline_tokens_per_s": found.offline_tokens_per_s,
        "price_per_million_offline_tokens": None
        if price_per_hour is None
        else found.price_per_million(price_per_hour),
        "warnings": warnings,
    }


def _plan_with_progress(server: Any, online: Any, offline: Any, targets: Any, sizes: Any) -> Plan:
    from rich.console import Console
    from rich.progress import Progress

    from echo_sgl.sim.planner import make_plan

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("reading", total=1.0)

        def show(what: str, share: float) -> None:
            progress.update(bar, description=what, completed=share)

        return make_plan(server, online, offline, targets, sizes, on_progress=show)


def _range_warnings(found: Plan, measured: Profile) -> list[str]:
    from echo_sgl.sim.planner import out_of_range

    results = found.whole or found.trials[-1].results
    return list(out_of_range(results, measured.largest_step))


def _resources(kv_tokens: str, instances: str) -> list[Resource]:
    from echo_sgl.sim.planner import Resource

    sizes = _numbers("--kv-tokens", kv_tokens)
    counts = _numbers("--instances", instances)
    if len(sizes) * len(counts) > MAX_RESOURCES:
        raise ConfigError(
            f"--kv-tokens and --instances make {len(sizes) * len(counts)} combinations; "
            f"at most {MAX_RESOURCES} are tried"
        )
    return [Resource(size, count) for size in sizes for count in counts]


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**12 for part in parts):
        raise ConfigError(f"{option} is {text!r}; write whole numbers above 0, as 20000,40000")
    return sorted({int(part) for part in parts})


def _row(cells: tuple[str, ...]) -> str:
    return "  ".join(f"{cell:>12}" for cell in cells)
