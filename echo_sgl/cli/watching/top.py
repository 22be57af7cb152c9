"""`echo-sgl top`: what a server does now, on one screen."""

from __future__ import annotations

from typing import Annotated

import typer

from echo_sgl.cli.url import server_root
from echo_sgl.cli.watching.looks import look, looks
from echo_sgl.cli.watching.stats import ScrapeError


def top(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    every: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=86_400)
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen, since the server's start, and end.")
    ] = False,
) -> None:
    """Show classes, cache, reserve, steps, estimator, pool and jobs until Ctrl-C.

    Example:

        echo-sgl top --url http://127.0.0.1:30000 --every 5
    """
    from rich.console import Console
    from rich.live import Live

    from echo_sgl.cli.watching.top_screen import screen

    root = server_root(url)
    try:
        first = look(root)
        if once:
            Console().print(screen(root, first))
            return
        with Live(screen(root, first), auto_refresh=False, screen=Console().is_terminal) as live:
            for one in looks(root, first, every):
                live.update(screen(root, one), refresh=True)
    except ScrapeError as error:
        typer.echo(f"echo-sgl: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        return  # the way to end it
