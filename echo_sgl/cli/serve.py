"""`echo-sgl serve`: SGLang's own server, with Echo switched on by a config."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_sgl.config import CONFIG_ENV, load_config, resolve_config_path
from echo_sgl.errors import ConfigError

PLUGIN_NAME = "echo_sgl"
PLUGIN_FILTER_ENV = "SGLANG_PLUGINS"


def serve(
    context: typer.Context,
    config: Annotated[
        str, typer.Option(help="TOML file, or the name of a preset that ships with the package.")
    ] = "echo",
) -> None:
    """Start `sglang serve` with Echo on; all other arguments go to SGLang as they are.

    Example:

        echo-sgl serve --config configs/echo.toml --model-path Qwen/Qwen3-0.6B --enable-metrics

    SGLang has a `--config` too: what follows a bare `--` is never read by this command.
    """
    path = resolve_config_path(config)
    load_config(path)
    check_plugin_filter(os.environ.get(PLUGIN_FILTER_ENV, ""))
    script = Path(sys.executable).with_name("sglang")
    if not script.exists():
        typer.echo(
            f"echo-sgl: SGLang's command is not installed beside this Python ({script} is "
            f"missing). Install it with: {sys.executable} -m pip install sglang",
            err=True,
        )
        raise typer.Exit(1)
    os.environ[CONFIG_ENV] = str(path.absolute())
    # Replacing the process keeps the pid, so that signals and supervisors reach the server.
    os.execv(sys.executable, [sys.executable, str(script), "serve", *context.args])


def check_plugin_filter(value: str) -> None:
    """Refuse a `SGLANG_PLUGINS` that leaves Echo out: the server would silently run stock."""
    names = [name.strip() for name in value.split(",")]
    if value and PLUGIN_NAME not in names:
        raise ConfigError(
            f"{PLUGIN_FILTER_ENV} is {value!r}, so SGLang would not load Echo; "
            f"add {PLUGIN_NAME} to the list or unset the variable"
        )
