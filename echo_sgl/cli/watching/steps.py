"""`echo-sgl steps`: what the server's last steps ran and how long they took."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from echo_sgl.cli.server_route import ServerRouteError, fetch_replicas
from echo_sgl.errors import EchoError

steps_app = typer.Typer(help="Look at the steps that the server ran.", no_args_is_help=True)
_NEEDED = ("server", "config", "num_running", "num_waiting", "num_steps")


class StepsError(ServerRouteError):
    """The server's steps cannot be used; the message says what to do."""


class StepsFileError(EchoError, OSError):
    """The steps cannot be written where they should."""


@steps_app.callback()
def steps() -> None:
    """Look at the steps that the server ran."""


@steps_app.command()
def dump(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    output: Annotated[
        Path | None, typer.Option(help="CSV file to write.  [default: standard output]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as bearer token.", envvar=["ECHO_SGL_API_KEY", "OPENAI_API_KEY"]),
    ] = None,
) -> None:
    """Write the last steps as CSV: one row a step, its composition and its time in seconds.

    Example:

        echo-sgl steps dump --url http://127.0.0.1:30000 --output steps.csv
    """
    from echo_sgl.cli.url import server_root

    if output is not None and not output.parent.is_dir():
        raise StepsFileError(f"--output {output} is in a folder that does not exist")
    replicas = fetch_steps(server_root(url), api_key)
    num_rows = _write(replicas, sys.stdout) if output is None else _write_file(replicas, output)
    typer.echo(f"{num_rows} steps", err=True)


def fetch_steps(url: str, api_key: str | None = None) -> list[dict[str, Any]]:
    """Columns and rows of each replica.

    Errors: `ServerRouteError` when the server cannot be reached or does not know the route.
    """
    return fetch_replicas(url, "/echo/steps", api_key, needs=_NEEDED)


def _write_file(replicas: list[dict[str, Any]], path: Path) -> int:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            return _write(replicas, file)
    except OSError as error:
        raise StepsFileError(f"--output {path} cannot be written: {error.strerror}") from error


def _write(replicas: list[dict[str, Any]], file: IO[str]) -> int:
    writer = csv.writer(file)
    writer.writerow(["replica", *replicas[0]["columns"]])
    for number, replica in enumerate(replicas):
        writer.writerows([number, *row] for row in replica["rows"])
    return sum(len(replica["rows"]) for replica in replicas)
