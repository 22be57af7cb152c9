"""`echo-sgl serve`: SGLang's own server, with Echo switched on by a config."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from echo_sgl.config import (
    CALIBRATE_ENV,
    CONFIG_ENV,
    DATABASE_URL_ENV,
    FORCE_PROFILE_ENV,
    KEYS_FILE_ENV,
    STATE_DIR_ENV,
    load_config,
    resolve_config_path,
)
from echo_sgl.errors import ConfigError

PLUGIN_NAME = "echo_sgl"
PLUGIN_FILTER_ENV = "SGLANG_PLUGINS"
SGLANG_HOST, SGLANG_PORT = "127.0.0.1", "30000"


Config = Annotated[
    str, typer.Option(help="TOML file, or the name of a preset that ships with the package.")
]
ForceProfile = Annotated[
    bool, typer.Option(help="Use the config's profile although it is for another machine.")
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Measure it once it is up; write its profile.")
]
CalibrateSeconds = Annotated[
    float, typer.Option(help="With --calibrate: how long to measure.", min=5, max=86_400)
]
EchoStateDir = Annotated[
    Path | None,
    typer.Option(
        help="Serve OpenAI's Files and Batches; jobs and files are kept here.",
        envvar=STATE_DIR_ENV,
    ),
]
EchoDatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="Keep jobs in this PostgreSQL, which several servers may share.  [default: SQLite "
        "in the state directory]",
        envvar=DATABASE_URL_ENV,
    ),
]
EchoKeysFile = Annotated[
    Path | None,
    typer.Option(
        help="Further API keys, one tenant a line: NAME KEY or NAME sha256:HEX.",
        envvar=KEYS_FILE_ENV,
    ),
]


def serve(
    context: typer.Context,
    config: Config = "echo",
    force_profile: ForceProfile = False,
    calibrate: Calibrate = False,
    calibrate_seconds: CalibrateSeconds = 60.0,
    echo_state_dir: EchoStateDir = None,
    echo_database_url: EchoDatabaseUrl = None,
    echo_keys_file: EchoKeysFile = None,
) -> None:
    """Start `sglang serve` with Echo on; all other arguments go to SGLang as they are.

    Example:

        echo-sgl serve --config configs/echo.toml --model-path Qwen/Qwen3-0.6B --enable-metrics

    With `--echo-state-dir DIR` the server takes job files too: see `echo-sgl batch`.

    SGLang has a `--config` too: what follows a bare `--` is never read by this command.
    """
    path = resolve_config_path(config)
    profile = load_config(path).estimator.profile
    if calibrate:
        check_profile_target(profile, path)
    else:
        check_profile(profile)
    _set_up_batches(echo_state_dir, echo_database_url, echo_keys_file)
    check_plugin_filter(os.environ.get(PLUGIN_FILTER_ENV, ""))
    script = sglang_script()
    check_port(context.args)
    os.environ[CONFIG_ENV] = str(path.absolute())
    if calibrate:
        os.environ[CALIBRATE_ENV] = str(calibrate_seconds)
    if force_profile:
        os.environ[FORCE_PROFILE_ENV] = "1"
    # Replacing the process keeps the pid, so that signals and supervisors reach the server.
    os.execv(sys.executable, [sys.executable, str(script), "serve", *context.args])


def sglang_script() -> Path:
    """SGLang's command of this Python: beside it, or where its packages put theirs."""
    user = sysconfig.get_preferred_scheme("user")
    folders = (
        Path(sys.executable).parent,
        Path(sysconfig.get_path("scripts")),
        Path(sysconfig.get_path("scripts", user)),
    )
    found = [path for folder in folders if (path := folder / "sglang").exists()]
    if not found:
        typer.echo(
            "echo-sgl: SGLang's command is not installed for this Python: there is no sglang in "
            f"{', '.join(map(str, dict.fromkeys(folders)))}. Install it with: {sys.executable} "
            "-m pip install sglang",
            err=True,
        )
        raise typer.Exit(1)
    return found[0]


def check_profile(profile: str) -> None:
    """Refuse a profile that cannot be read now; whether it fits the device shows at start."""
    if profile:
        from echo_sgl.estimators.profile import load_profile

        load_profile(profile, device="", model="", force=True)


def check_profile_target(profile: str, config: Path) -> None:
    """Refuse to calibrate without a place for the result."""
    if not profile:
        raise ConfigError(
            f"--calibrate writes the profile that the config names, but {config} names none; "
            'set profile = "FILE" in its section [estimator]'
        )
    from echo_sgl.estimators.profile import replaced_profile

    replaced_profile(profile)


def check_port(arguments: Sequence[str], *, default_port: str = SGLANG_PORT) -> None:
    """Refuse a port that is taken: SGLang finds that out once its model is loaded, and stays there.

    Where SGLang reads a config of its own, a port that is not among its `arguments` is not known.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", nargs="?", default=SGLANG_HOST)
    for name in ("--port", "--config"):
        parser.add_argument(name, nargs="?", const="")
    given, _ = parser.parse_known_args(arguments)
    host, port = given.host, given.port
    if port is None and given.config is None:
        port = default_port
    if not (host and port and port.isdigit()):
        return  # what is wrong with it SGLang says
    try:
        [(family, *_, address), *_] = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the server cannot listen on {host}, port {port}: {error}; end what listens there or "
            "give another --port"
        ) from error


def _set_up_batches(
    state_dir: Path | None, database_url: str | None, keys_file: Path | None
) -> None:
    """Hand the batch service's options on, after a look that costs less than a server's start."""
    for name in (STATE_DIR_ENV, DATABASE_URL_ENV, KEYS_FILE_ENV):
        os.environ.pop(name, None)
    if state_dir is None:
        if database_url or keys_file:
            raise ConfigError(
                "--echo-database-url and --echo-keys-file belong to the batch service; switch it "
                "on with --echo-state-dir DIR"
            )
        return
    from echo_sgl.batches.http.tenants import read_keys_file
    from echo_sgl.batches.store.job_store import open_store

    open_store(state_dir, database_url).close()
    os.environ[STATE_DIR_ENV] = str(state_dir.absolute())
    if database_url:
        os.environ[DATABASE_URL_ENV] = database_url
    if keys_file:
        read_keys_file(keys_file)
        os.environ[KEYS_FILE_ENV] = str(keys_file.absolute())


def check_plugin_filter(value: str) -> None:
    """Refuse a `SGLANG_PLUGINS` that leaves Echo out: the server would silently run stock."""
    names = [name.strip() for name in value.split(",")]
    if value and PLUGIN_NAME not in names:
        raise ConfigError(
            f"{PLUGIN_FILTER_ENV} is {value!r}, so SGLang would not load Echo; "
            f"add {PLUGIN_NAME} to the list or unset the variable"
        )
