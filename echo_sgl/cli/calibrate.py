"""`echo-sgl calibrate`: measure what a step costs on this server and keep the best model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from echo_sgl.cli.calibration import Calibration


def calibrate(
    output: Annotated[Path, typer.Option(help="Profile to write (JSON).")],
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    seconds: Annotated[float, typer.Option(help="How long to measure.", min=5)] = 90.0,
    model: Annotated[
        str | None, typer.Option(help="Store this model instead of the one of least error.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the grid and of the held-out steps.")] = 0,
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as bearer token.", envvar=["ECHO_SGL_API_KEY", "OPENAI_API_KEY"]),
    ] = None,
) -> None:
    """Drive an idle server over a grid of steps, fit all batch-time models, store one.

    Example:

        echo-sgl calibrate --url http://127.0.0.1:30000 --output profile.json

    Prints each model's error on steps that its fit did not see. A busy server is refused.
    """
    from rich.console import Console

    from echo_sgl.cli.calibration import Driver, fit_all
    from echo_sgl.cli.url import server_root
    from echo_sgl.errors import ConfigError
    from echo_sgl.estimators.batch_time import BATCH_TIME_MODELS
    from echo_sgl.estimators.profile import save_profile

    if model is not None and model not in BATCH_TIME_MODELS:
        known = ", ".join(BATCH_TIME_MODELS)
        raise ConfigError(f"--model is {model!r}; known are {known}")
    driver = Driver(server_root(url), api_key, random.Random(seed))
    driver.require_idle()
    console = Console(stderr=True)
    with console.status("measuring") as status:
        samples = driver.measure(
            seconds, on_wave=lambda share: status.update(f"measuring, {share:.0%}")
        )
    calibration = fit_all(samples, driver.server, seed=seed)
    Console().print(error_table(calibration))
    profile = calibration.profile(model)
    save_profile(profile, output)
    console.print(f"{profile.estimator.NAME} written to {output}", highlight=False)


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
