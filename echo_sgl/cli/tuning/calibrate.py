"""`echo-sgl calibrate`: measure what a step costs on this server and keep the best model."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from echo_sgl.cli.tuning.calibration import Calibration, Driver
    from echo_sgl.estimators.host_time import HostTime
    from echo_sgl.estimators.profile import Profile

IDLE_WITHIN_S = 120.0
TRAFFIC_WARNING = (
    "The server took the measurement for traffic: its burst reserve keeps room for it for up to "
    "reserve.window_s, and a budget that adapts has moved. POST /echo/forget-traffic was refused, "
    "which wants the admin key if there is one."
)

OTHERS_WARNING = (
    "{} requests of others came meanwhile: their steps are in the fit, too, and the host's times "
    "were measured beside them. Calibrate again when nobody uses the server."
)


def calibrate(
    output: Annotated[Path, typer.Option(help="Profile to write (JSON).")],
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    seconds: Annotated[float, typer.Option(help="How long to measure.", min=5, max=86_400)] = 90.0,
    model: Annotated[
        str | None, typer.Option(help="Store this model instead of the one of least error.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the server is up and idle.")] = False,
    seed: Annotated[int, typer.Option(help="Of the grid and of the held-out steps.")] = 0,
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as bearer token.", envvar=["ECHO_SGL_API_KEY", "OPENAI_API_KEY"]),
    ] = None,
) -> None:
    """Drive an idle server over a grid of steps, fit all batch-time models, store one.

    Example:

        echo-sgl calibrate --url http://127.0.0.1:30000 --output profile.json

    Prints each model's error on steps that its fit did not see. A busy server is refused. Its
    burst reserve and a budget that adapts begin anew: these requests are no traffic. A profile
    that was there is replaced at the end; a file that is no profile never is.
    """
    from rich.console import Console

    from echo_sgl.cli.tuning.calibration import Driver, fit_all, wait_until_up
    from echo_sgl.cli.url import server_root
    from echo_sgl.cli.watching.steps import StepsError
    from echo_sgl.errors import ConfigError
    from echo_sgl.estimators.batch_time import BATCH_TIME_MODELS
    from echo_sgl.estimators.profile import replaced_profile

    if model is not None and model not in BATCH_TIME_MODELS:
        known = ", ".join(BATCH_TIME_MODELS)
        raise ConfigError(f"--model is {model!r}; known are {known}")
    old, console = replaced_profile(output), Console(stderr=True)
    if wait:
        wait_until_up(server_root(url))
    driver = Driver(server_root(url), api_key, random.Random(seed))
    driver.require_idle(within_s=IDLE_WITHIN_S if wait else 0.0)
    with console.status("measuring") as status:
        samples = driver.measure(
            seconds, on_wave=lambda share: status.update(f"measuring, {share:.0%}")
        )
    for warning in warnings(driver):
        console.print(warning, highlight=False)
    try:
        calibration = fit_all(samples, driver.server, seed=seed, host=driver.host_time())
    except ValueError as error:
        raise StepsError(
            f"the steps that were measured cannot be fitted: {error}. Measure for longer "
            "(--seconds), or a server that runs several requests at a time"
        ) from error
    Console().print(error_table(calibration))
    if calibration.host is not None:
        typer.echo(host_line(calibration.host))
    profile = calibration.profile(model)
    save(profile, output)
    console.print(f"{profile.estimator.NAME} written to {output}{_replaces(old)}", highlight=False)


def warnings(driver: Driver) -> Iterator[str]:
    """What the measurement met or left behind that its user should know."""
    if driver.num_others:
        yield OTHERS_WARNING.format(driver.num_others)
    if not driver.forget_traffic():
        yield TRAFFIC_WARNING


def save(profile: Profile, output: Path) -> None:
    """Write a profile. Errors: `ConfigError` when it cannot be written."""
    from echo_sgl.errors import ConfigError
    from echo_sgl.estimators.profile import save_profile

    try:
        save_profile(profile, output)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error


def host_line(host: HostTime) -> str:
    """What the server takes beside its device, in ms."""
    step_ms, request_ms, intake_ms, busy_ms, stream_ms = (
        value * 1000 for value in dataclasses.astuple(host)
    )
    return (
        f"host: {step_ms:.2f} ms between steps and {request_ms:.3f} ms more for each request in "
        f"them; {intake_ms:.2f} ms around a request, {busy_ms:.2f} ms while another one decodes "
        f"and {stream_ms:.2f} ms more for each further one"
    )


def _replaces(old: Profile | None) -> str:
    if old is None:
        return ""
    return f"; it replaces {old.estimator.NAME} of {old.date} for {old.model}, {old.device}"


def error_table(calibration: Calibration) -> Table:
    """One row per model and kind of step: MAPE, p95 and bias on held-out steps."""
    from rich.table import Table

    server = calibration.server
    table = Table(title=f"{calibration.num_samples} steps of {server['model']}, {server['device']}")
    for column in ("model", "step", "held-out", "MAPE", "p95", "bias"):
        table.add_column(column, justify="left" if column in ("model", "step") else "right")
    for name, errors in calibration.errors.items():
        label = f"{name} (best)" if name == calibration.best else name
        for kind, error in errors.items():
            figures = (f"{value:.1%}" for value in (error.mape, error.p95, error.bias))
            table.add_row(label, kind, str(error.num_steps), *figures)
    return table
