"""`echo-sgl plan`: how much hardware a trace needs, and what offline work it leaves room for."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_sgl.errors import ConfigError

if TYPE_CHECKING:
    from echo_sgl.config import EchoConfig
    from echo_sgl.estimators.budget import Target
    from echo_sgl.estimators.profile import Profile
    from echo_sgl.sim.load_sweep import LoadPoint
    from echo_sgl.sim.planner import Plan, Resource
    from echo_sgl.sim.server_config import ServerConfig
    from echo_sgl.sim.trace_columns import TraceFile
    from echo_sgl.sim.workload import Trace

NOT_KEPT_EXIT = 1
MAX_RESOURCES = 100
MAX_LOADS = 20


OnlineTrace = Annotated[
    Path, typer.Option(help="Online requests: Azure, BurstGPT, Mooncake or own.")
]
Profiles = Annotated[
    list[Path], typer.Option(help="Written by echo-sgl calibrate; one for each device to try.")
]
Slo = Annotated[str, typer.Option(help="As ttft_p99=1s,tpot_p99=50ms (mean, p50, p90, p99).")]
Jobs = Annotated[
    Path | None, typer.Option(help="Offline lines, an OpenAI batch file.  [default: none]")
]
KvTokens = Annotated[str, typer.Option(help="KV pool sizes to try.")]
Instances = Annotated[str, typer.Option(help="Numbers of servers to try.")]
PricePerHour = Annotated[
    str, typer.Option(help="Of one instance, in any money; one for each profile, as 2,3.5.")
]
Picture = Annotated[
    Path | None,
    typer.Option(help="Draw attainment and offline tokens against load (svg, png)."),
]
Loads = Annotated[str, typer.Option(help="Of the picture: multiples of the trace's rate.")]
Config = Annotated[str, typer.Option(help="Echo's config on the servers.")]
JobOutputTokens = Annotated[
    int, typer.Option(help="Answer length of a line.  [default: all that it allows]", min=0)
]
PageTokens = Annotated[int, typer.Option(help="SGLang's --page-size.", min=1)]
MaxRunningRequests = Annotated[int, typer.Option(help="SGLang's.", min=1)]
ChunkedPrefillTokens = Annotated[int, typer.Option(help="SGLang's.", min=1)]
DisableOverlapSchedule = Annotated[
    bool, typer.Option("--disable-overlap-schedule", help="SGLang's; on a CPU it is off.")
]
EnableMixedChunk = Annotated[bool, typer.Option("--enable-mixed-chunk", help="SGLang's.")]
SkipEmpty = Annotated[bool, typer.Option("--skip-empty", help="Leave out requests that failed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(  # noqa: PLR0913, PLR0917 - one parameter per option
    trace: OnlineTrace,
    profile: Profiles,
    slo: Slo,
    jobs: Jobs = None,
    kv_tokens: KvTokens = "100000",
    instances: Instances = "1",
    price_per_hour: PricePerHour = "",
    picture: Picture = None,
    loads: Loads = "0.5,0.75,1,1.25,1.5,2",
    config: Config = "echo",
    job_output_tokens: JobOutputTokens = 0,
    page_tokens: PageTokens = 1,
    max_running_requests: MaxRunningRequests = 256,
    chunked_prefill_tokens: ChunkedPrefillTokens = 8192,
    disable_overlap_schedule: DisableOverlapSchedule = False,
    enable_mixed_chunk: EnableMixedChunk = False,
    skip_empty: SkipEmpty = False,
    as_json: AsJson = False,
) -> None:
    """Find the smallest hardware that keeps an SLO, and what offline work it leaves room for.

    Example:

        echo-sgl plan --trace online.csv --jobs jobs.jsonl --profile h100.json
        --slo ttft_p99=1s,tpot_p99=50ms --kv-tokens 100000,200000 --instances 1,2,4

    Exit code 1: no hardware that was tried keeps the SLO, or not with the offline work beside it.
    """
    from echo_sgl.cli.planning.plan_picture import draw_picture
    from echo_sgl.cli.tuning.budget import read_slo
    from echo_sgl.config import load_config, resolve_config_path

    targets = read_slo(slo)
    given = load_config(resolve_config_path(config))
    echo = promising(given, targets)
    multiples = _picture_loads(picture, loads, echo)
    measured = _profiles(profile)
    prices = _prices(price_per_hour, tuple(measured))
    resources = _resources(kv_tokens, instances, tuple(measured))
    _check_reserve(echo, resources, page_tokens)
    read, offline = _read(trace, jobs, job_output_tokens, skip_empty=skip_empty)
    settings = {
        "page_tokens": page_tokens,
        "max_running_requests": max_running_requests,
        "chunked_prefill_tokens": chunked_prefill_tokens,
        "overlap": not disable_overlap_schedule,
        "enable_mixed_chunk": enable_mixed_chunk,
    }
    devices = _devices(measured, resources[0].kv_tokens, echo, settings)
    found, points = _simulate(devices, read.trace, offline, targets, resources, prices, multiples)
    warnings = [*read.warnings, *_range_warnings(found, measured)]
    rules = describe_rules(config, given, echo)
    _show(found, targets, measured, prices, warnings, points, rules, as_json=as_json)
    if picture is not None:
        draw_picture(picture, points)
    _exit(found)


def _read(
    trace: Path, jobs: Path | None, job_output_tokens: int, *, skip_empty: bool
) -> tuple[TraceFile, Trace]:
    """Both kinds of work; ten seconds a million requests."""
    from rich.console import Console

    from echo_sgl.sim.trace_files import read_trace_file

    with Console(stderr=True).status(f"reading {trace.name}"):
        read = read_trace_file(trace, skip_empty=skip_empty)
        return read, _offline_work(jobs, job_output_tokens)


def _picture_loads(picture: Path | None, loads: str, echo: EchoConfig) -> tuple[float, ...]:
    """At which loads the picture shows the hardware; none without one.

    Errors: `ConfigError` when it could not be drawn.
    """
    from echo_sgl.cli.planning.plan_picture import check_picture

    multiples = _loads(loads)
    if picture is None:
        return ()
    check_picture(picture)
    if not (echo.slo.ttft_s and echo.slo.tpot_s):
        raise ConfigError(
            "--picture shows how many requests keep both promises; name a ttft and a tpot in --slo"
        )
    return multiples


def _profiles(paths: list[Path]) -> dict[str, Profile]:
    """By the name of its file. Errors: `ConfigError` for two files of one name."""
    from echo_sgl.estimators.profile import load_profile

    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        raise ConfigError(f"--profile names {', '.join(map(str, paths))}; give each its own name")
    return {path.stem: load_profile(path, device="", model="", force=True) for path in paths}


def _devices(
    measured: dict[str, Profile], kv_tokens: int, echo: EchoConfig, settings: dict[str, Any]
) -> dict[str, ServerConfig]:
    from echo_sgl.sim.server_config import NO_HOST_TIME, ServerConfig

    return {
        name: ServerConfig(
            device=one.estimator,
            kv_tokens=kv_tokens,
            echo=echo,
            host=one.host or NO_HOST_TIME,
            **settings,
        )
        for name, one in measured.items()
    }


def _offline_work(jobs: Path | None, output_tokens: int) -> Trace:
    from echo_sgl.sim.job_lines import read_job_lines
    from echo_sgl.sim.workload import empty_trace
    from echo_sgl.types import Task

    if jobs is None:
        return empty_trace(Task.OFFLINE)
    return read_job_lines(jobs, output_tokens=output_tokens)


def _check_reserve(echo: EchoConfig, resources: list[Resource], page_tokens: int) -> None:
    """Errors: `ConfigError` when one of the pools is too small for what is kept free in it."""
    from echo_sgl.policies.cache.reserve import check_bounds

    for size in {one.kv_tokens for one in resources}:
        try:
            check_bounds(echo.reserve, size // page_tokens * page_tokens)
        except ValueError as error:
            raise ConfigError(f"--kv-tokens {size}: {error}") from error


def _show(
    found: Plan,
    targets: tuple[Target, ...],
    measured: dict[str, Profile],
    prices: dict[str, float] | None,
    warnings: list[str],
    points: list[LoadPoint],
    rules: str,
    *,
    as_json: bool,
) -> None:
    from echo_sgl.cli.planning.plan_report import document, sweep_table, table

    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        answer = {"rules": rules, **document(found, targets, prices, warnings, points)}
        typer.echo(json.dumps(answer, indent=2, allow_nan=False))
        return
    heads = [f"{name}: {one.device}, model {one.model}" for name, one in measured.items()]
    typer.echo("\n".join(table(found, targets, [*heads, rules], prices)))
    if points:
        typer.echo("\n".join(sweep_table(points)))


def _exit(found: Plan) -> None:
    """Errors: `typer.Exit` with code 1 when the SLO is not kept."""
    if found.chosen is None:
        typer.echo(f"echo-sgl: nothing tried keeps the SLO. What binds: {found.binds}", err=True)
    elif not found.is_kept_beside:
        typer.echo("echo-sgl: the SLO is broken over the whole trace, see above", err=True)
    else:
        return
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


def describe_rules(name: str, given: EchoConfig, planned: EchoConfig) -> str:
    """Under which promises the servers were simulated, which their own config is to have."""
    if planned != given:
        slo = planned.slo
        return (
            f"config {name} with [slo] ttft_s = {slo.ttft_s:g}, tpot_s = {slo.tpot_s:g}, [steps] "
            f'limit = "{planned.steps.limit}": write these into the servers\' config'
        )
    if given.slo.ttft_s and given.slo.tpot_s:
        return f"config {name} with its own promises"
    return f"config {name} without promises: [slo] has none, and --slo not both TTFT and TPOT"


def _simulate(
    devices: dict[str, ServerConfig],
    online: Trace,
    offline: Trace,
    targets: tuple[Target, ...],
    resources: list[Resource],
    prices: dict[str, float] | None,
    loads: tuple[float, ...],
) -> tuple[Plan, list[LoadPoint]]:
    """The plan, and what its hardware does at other loads, with a progress bar."""
    from rich.console import Console
    from rich.progress import Progress

    from echo_sgl.sim.load_sweep import sweep
    from echo_sgl.sim.planner import make_plan, sized

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("reading", total=1.0)

        def show(what: str, share: float) -> None:
            progress.update(bar, description=what, completed=share)

        found = make_plan(
            devices, online, offline, targets, resources, prices=prices, on_progress=show
        )
        last = found.trials[-1]
        points = sweep(
            sized(devices, last.resource),
            online,
            offline,
            loads,
            num_instances=last.resource.num_instances,
            instance=last.instance,
            on_progress=lambda share: show("other loads", share),
        )
        return found, list(points)


def _range_warnings(found: Plan, measured: dict[str, Profile]) -> list[str]:
    from echo_sgl.sim.planner import out_of_range

    last = found.trials[-1]
    results = found.whole or last.results
    return list(out_of_range(results, measured[last.resource.device].largest_step))


def _resources(kv_tokens: str, instances: str, devices: tuple[str, ...]) -> list[Resource]:
    from echo_sgl.sim.planner import Resource

    sizes = _numbers("--kv-tokens", kv_tokens)
    counts = _numbers("--instances", instances)
    if (num := len(sizes) * len(counts) * len(devices)) > MAX_RESOURCES:
        raise ConfigError(
            f"--profile, --kv-tokens and --instances make {num} combinations; "
            f"at most {MAX_RESOURCES} are tried"
        )
    return [Resource(size, count, name) for name in devices for size in sizes for count in counts]


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**12 for part in parts):
        raise ConfigError(f"{option} is {text!r}; write whole numbers above 0, as 20000,40000")
    return sorted({int(part) for part in parts})


def _prices(text: str, devices: tuple[str, ...]) -> dict[str, float] | None:
    """Of each device; one price holds for all."""
    if not text:
        return None
    prices = _floats("--price-per-hour", text)
    if len(prices) == 1:
        prices *= len(devices)
    if len(prices) != len(devices):
        raise ConfigError(
            f"--price-per-hour has {len(prices)} prices for {len(devices)} profiles; "
            "give one for each, or one for all"
        )
    return dict(zip(devices, prices, strict=True))


def _loads(text: str) -> tuple[float, ...]:
    loads = sorted(set(_floats("--loads", text)))
    if len(loads) > MAX_LOADS or not loads[0] > 0:
        raise ConfigError(f"--loads is {text!r}; up to {MAX_LOADS} numbers above 0 are simulated")
    return tuple(loads)


def _floats(option: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise ConfigError(f"{option} is {text!r}; write numbers of at least 0, as 0.5,1,2")
    return values
