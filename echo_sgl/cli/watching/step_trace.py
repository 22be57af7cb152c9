"""`echo-sgl trace`: the server's last steps as a trace to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echo_sgl.errors import EchoError
from echo_sgl.types import MAX_TRACE_S


class TraceFileError(EchoError, OSError):
    """The trace cannot be written where it should."""


def trace(
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    seconds: Annotated[
        float, typer.Option(help="How far to look back.", min=0.1, max=MAX_TRACE_S)
    ] = 10.0,
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as bearer token.", envvar=["ECHO_SGL_API_KEY", "OPENAI_API_KEY"]),
    ] = None,
) -> None:
    """Write the steps of the last seconds as a trace for ui.perfetto.dev.

    Example:

        echo-sgl trace --seconds 10 --output trace.json
    """
    import json

    from echo_sgl.cli.server_route import fetch_replicas
    from echo_sgl.cli.url import server_root
    from echo_sgl.cli.watching.trace_events import num_steps, trace_document

    if not output.parent.is_dir():
        raise TraceFileError(f"--output {output} is in a folder that does not exist")
    replicas = fetch_replicas(server_root(url), "/echo/trace", api_key, seconds=seconds)
    document = trace_document(replicas)
    try:
        output.write_text(json.dumps(document), encoding="utf-8")
    except OSError as error:
        raise TraceFileError(f"--output {output} cannot be written: {error.strerror}") from error
    typer.echo(f"{num_steps(document)} steps; open {output} in ui.perfetto.dev", err=True)
