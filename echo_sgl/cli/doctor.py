"""`echo-sgl doctor`: would a server start with Echo on? The same check, without a server."""

from __future__ import annotations

import json
import os
from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.console import Console

from echo_sgl.cli.serve import PLUGIN_FILTER_ENV, PLUGIN_NAME, check_plugin_filter, check_profile
from echo_sgl.config import load_config, resolve_config_path
from echo_sgl.errors import ConfigError


def doctor(
    config: Annotated[str, typer.Option(help="Config file or preset to check.")] = "echo",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check SGLang's version, every hook's signature, the plugin and a config.

    Example: echo-sgl doctor --config configs/echo.toml
    """
    checks = {
        "plugin": _plugin_problems(),
        "config": _config_problems(config),
        "engine": _engine_problems(),
    }
    problems = [problem for found in checks.values() for problem in found]
    if as_json:
        typer.echo(json.dumps({"ok": not problems, "checks": checks}))
    else:
        console = Console()
        for name, found in checks.items():
            console.print(f"[green]ok[/]  {name}" if not found else f"[red]bad[/] {name}")
            for problem in found:
                console.print(f"      {problem}", markup=False)
    raise typer.Exit(1 if problems else 0)


def _plugin_problems() -> list[str]:
    problems = []
    if not any(entry.name == PLUGIN_NAME for entry in entry_points(group="sglang.srt.plugins")):
        problems.append("SGLang does not see the plugin: install the echo-sgl package")
    try:
        check_plugin_filter(os.environ.get(PLUGIN_FILTER_ENV, ""))
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _config_problems(config: str) -> list[str]:
    try:
        check_profile(load_config(resolve_config_path(config)).estimator.profile)
    except ConfigError as error:
        return [str(error)]
    return []


def _engine_problems() -> list[str]:
    from echo_sgl.engine.seams import engine_problems

    return engine_problems()
