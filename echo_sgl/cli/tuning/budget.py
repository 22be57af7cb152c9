"""`echo-sgl budget`: find the time per step that keeps an SLO on this server, under this trace."""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_sgl.errors import ConfigError

if TYPE_CHECKING:
    from echo_sgl.cli.tuning.replay import Replayer
    from echo_sgl.config import EchoConfig
    from echo_sgl.estimators.budget import BudgetSearch, Measurement, Target

NOT_KEPT_EXIT = 1
# A step shorter than this share of the tightest limit leaves no room for offline work.
LOW_SHARE = 0.02
# Budgets beyond the longest limit are tried where that is kept, as a mean may be: up to so many
# times as long, if no step is then to take longer than anybody would let one.
WIDEST, MOST_BUDGET_S = 64.0, 10.0
# Settings that a replay changes itself.
MOVED = {("steps", "budget_s"), ("steps", "adapt_budget")}

Seconds = Annotated[float, typer.Option(help="Of the trace, from its start.", min=1, max=86_400)]
Speed = Annotated[float, typer.Option(help="Replay so many times as fast.", min=0.01, max=10_000)]
ApiKey = Annotated[
    str | None,
    typer.Option(help="Sent as bearer token.", envvar=["ECHO_SGL_API_KEY", "OPENAI_API_KEY"]),
]
AdminApiKey = Annotated[
    str | None,
    typer.Option(
        help="Of a server that has one.  [default: the API key]", envvar="ECHO_SGL_ADMIN_API_KEY"
    ),
]


def budget(  # noqa: PLR0913, PLR0917 - one parameter per option
    slo: Annotated[str, typer.Option(help="As ttft_p99=1s,tpot_p99=50ms (mean, p50, p90, p99).")],
    trace: Annotated[Path, typer.Option(help="Online requests: Azure, BurstGPT, Mooncake or own.")],
    output: Annotated[Path, typer.Option(help="Preset to write, or with --check to verify.")],
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    check: Annotated[bool, typer.Option("--check", help="Verify a stored preset.")] = False,
    jobs: Annotated[
        Path | None, typer.Option(help="Job file as offline work.  [default: synthetic lines]")
    ] = None,
    seconds: Seconds = 60.0,
    speed: Speed = 1.0,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Leave out requests that failed.")
    ] = False,
    api_key: ApiKey = None,
    admin_api_key: AdminApiKey = None,
) -> None:
    """Find the largest budget per step that keeps an SLO, by replays on an idle server.

    Example:

        echo-sgl budget --slo ttft_p99=1s,tpot_p99=50ms --trace azure.csv --output mine.toml

    The server must run with steps.limit = "budget"; it goes on with the budget tried last. The
    preset is a copy of what it runs with. Exit code 1: the SLO cannot be kept.
    """
    from echo_sgl.cli.tuning.replay import Replayer
    from echo_sgl.cli.url import server_root
    from echo_sgl.sim.trace_files import read_trace_file

    targets = read_slo(slo)
    stored = stored_preset(output) if check else None
    if not check:
        require_preset_path(output)
    read = read_trace_file(trace, skip_empty=skip_empty)
    for warning in read.warnings:
        typer.echo(f"warning: {warning}", err=True)
    requests = read.trace.between(0.0, seconds * speed)
    replayer = Replayer(
        server_root(url),
        api_key,
        requests,
        jobs=jobs,
        speed=speed,
        rng=random.Random(seed),
        admin_api_key=admin_api_key,
    )
    running = replayer.config
    require_budget(running)
    require_same(stored or running, running, output)
    search = run_search(replayer, targets, stored_s=stored.steps.budget_s if stored else None)
    load = f"{trace.name}, {seconds:g} s at speed {speed:g}"
    work = jobs.name if jobs else "synthetic lines"
    budget_s, facts = report(search, replayer, f"online: {load}; offline: {work}")
    if not check:
        if search.is_open_ended:
            typer.echo(f"no budget up to {budget_s:.4g} s broke the SLO", err=True)
        write_preset(output, running, budget_s, facts)


def report(search: BudgetSearch, replayer: Replayer, loads: str) -> tuple[float, list[str]]:
    """Print what was found: the budget, and what a preset says of it.

    Errors: `typer.Exit` without a budget.
    """
    table, notes = list(evidence(search)), list(replayer.load.notes())
    typer.echo("\n".join(table))
    for note in notes:
        typer.echo(f"warning: {note}", err=True)
    if search.budget_s is None:
        typer.echo(f"echo-sgl: {refusal(search)}", err=True)
        raise typer.Exit(NOT_KEPT_EXIT)
    return search.budget_s, [*provenance(replayer), loads, *notes, *table]


def read_slo(text: str) -> tuple[Target, ...]:
    """The targets of `--slo`. Errors: `ConfigError` names the part that cannot be read."""
    from echo_sgl.estimators.budget import parse_slo

    try:
        return parse_slo(text)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}") from error


def stored_preset(output: Path) -> EchoConfig:
    """The preset to check. Errors: `ConfigError` when it holds no budget."""
    from echo_sgl.config import load_config

    stored = load_config(output)
    if stored.steps.limit != "budget":
        raise ConfigError(
            f"{output} has steps.limit {stored.steps.limit!r}, so there is no budget to check; "
            "find one without --check"
        )
    return stored


def require_preset_path(output: Path) -> None:
    """Errors: `ConfigError` when no preset can be written there, or what is there is none."""
    from echo_sgl.config import load_config

    if not output.parent.is_dir():
        raise ConfigError(f"--output {output} is in a folder that does not exist")
    if not output.exists():
        if not os.access(output.parent, os.W_OK):
            raise ConfigError(f"--output {output} is in a folder that cannot be written to")
        return
    try:
        load_config(output)
    except ConfigError as error:
        raise ConfigError(
            f"--output {output} is there and no preset, so it is not replaced ({error})"
        ) from error
    if not os.access(output, os.W_OK):
        raise ConfigError(f"--output {output} cannot be written to")


def require_budget(running: EchoConfig) -> None:
    """Errors: `ConfigError` when the server's steps have another limit."""
    if running.steps.limit != "budget":
        raise ConfigError(
            f"the server runs with steps.limit {running.steps.limit!r}, so its steps have no "
            'budget. Start it with a config that has steps.limit = "budget"'
        )


def require_same(stored: EchoConfig, running: EchoConfig, output: Path) -> None:
    """Errors: `ConfigError` names how the server differs from the preset but for its budget."""
    ours, theirs = dataclasses.asdict(stored), dataclasses.asdict(running)
    differences = [
        f"{section}.{name} is {theirs[section][name]!r} there and {value!r} in the preset"
        for section, values in ours.items()
        for name, value in values.items()
        if (section, name) not in MOVED and value != theirs[section][name]
    ]
    if differences:
        raise ConfigError(
            f"the server runs with other settings than {output}, so it would not be checked: "
            f"{', '.join(differences[:3])}. Start it with --config {output}"
        )


def run_search(
    replayer: Replayer, targets: tuple[Target, ...], *, stored_s: float | None
) -> BudgetSearch:
    """Search, or check the stored budget; shows on stderr what is being replayed."""
    from rich.console import Console

    from echo_sgl.estimators.budget import check_budget, find_budget

    with Console(stderr=True).status("replaying") as status:

        def measure(budget_s: float) -> Measurement:
            what = f"under {budget_s:.4g} s a step" if budget_s else "without offline work"
            status.update(f"replaying {replayer.seconds:.0f} s {what}")
            return replayer.measure(budget_s, targets)

        if stored_s is not None:
            return check_budget(measure, targets, stored_s)
        limits_s = [target.limit_s for target in targets]
        low_s, high_s = LOW_SHARE * min(limits_s), max(limits_s)
        most_s = max(high_s, min(WIDEST * high_s, MOST_BUDGET_S))
        return find_budget(measure, targets, low_s=low_s, high_s=high_s, most_s=most_s)


def evidence(search: BudgetSearch) -> Iterator[str]:
    """A table of all replays by budget, medians of each."""
    names = [target.name for target in search.targets]
    yield f"targets: {', '.join(map(str, search.targets))}"
    columns = ("budget_s", "replays", *names, "offline tok/s")
    yield "  ".join(f"{column:>13}" for column in (*columns, "SLO"))
    for trial in sorted(search.trials, key=lambda one: one.budget_s):
        many = trial.measurements
        values = [statistics.median(one.values_s[name] for one in many) for name in names]
        tokens = statistics.median(one.offline_tokens_per_s for one in many)
        cells = [f"{trial.budget_s:.4g}", str(len(many)), *(f"{one:.4g}" for one in values)]
        verdict = "kept" if trial.is_kept else "broken"
        yield "  ".join(f"{cell:>13}" for cell in (*cells, f"{tokens:.0f}", verdict))


def refusal(search: BudgetSearch) -> str:
    """Why there is no budget."""
    first = search.trials[0]
    if search.is_kept_alone is False:
        return (
            "the SLO cannot be met even without offline work, see the figures above. "
            "Promise less, or serve fewer requests"
        )
    if first.budget_s == 0:
        return "the SLO is kept without offline work but not beside any, see the figures above"
    return (
        f"the SLO is broken under the stored budget of {first.budget_s:.4g} s, see the "
        "figures above. Search again without --check"
    )


def provenance(replayer: Replayer) -> list[str]:
    """What the replays ran on."""
    server = replayer.server
    return [f"server: {server['model']} on {server['device']}, SGLang {server['sglang_version']}"]


def write_preset(path: Path, base: EchoConfig, budget_s: float, comments: Sequence[str]) -> None:
    """Write a copy of a config with this budget in it. Errors: `ConfigError` when it cannot."""
    from echo_sgl.cli.tuning.preset_file import preset_text

    title = f"budget_s {budget_s:.4g}, found by `echo-sgl budget` {date.today()}"
    steps = dataclasses.replace(base.steps, budget_s=budget_s)
    text = preset_text(dataclasses.replace(base, steps=steps), [title, *comments])
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
    typer.echo(f"budget of {budget_s:.4g} s written to {path}", err=True)
