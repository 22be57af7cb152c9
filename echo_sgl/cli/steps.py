"""`echo-sgl steps`: what the server's last steps ran and how long they took."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from echo_sgl.cli.server_route import ServerRouteError, fetch

steps_app = typer.Typer(help="Look at the steps that the server ran.", no_args_is_help=True)


class StepsError(ServerRouteError):
    """The server's steps cannot be used; the message says what to do."""


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

    replicas = fetch_steps(server_root(url), api_key)
    if output is None:
        num_rows = _write(replicas, sys.stdout)
    else:
        with output.open("w", newline="", encoding="utf-8") as file:
            num_rows = _write(replicas, file)
    typer.echo(f"{num_rows} steps", err=True)


def fetch_steps(url: str, api_key: str | None = None) -> list[dict[str, Any]]:
    """Columns and rows of each replica.

    Errors: `ServerRouteError` when the server cannot be reached or does not know the route.
    """
    replicas: list[dict[str, Any]] = fetch(url, "/echo/steps", api_key)["replicas"]
    return replicas


def _write(replicas: list[dict[str, Any]], file: IO[str]) -> int:
    writer = csv.writer(file)
    writer.writerow(["replica", *replicas[0]["columns"]])
    for number, replica in enumerate(replicas):
        writer.writerows([number, *row] for row in replica["rows"])
    return sum(len(replica["rows"]) for replica in replicas)
