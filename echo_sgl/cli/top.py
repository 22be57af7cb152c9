"""`echo-sgl top`: what a server does now, on one screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from echo_sgl.cli.stats import ScrapeError, fetch_metrics
from echo_sgl.cli.url import server_root

if TYPE_CHECKING:
    from echo_sgl.cli.samples import Samples


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the server.

    `recent` holds the counts of the last `interval_s` seconds; at the first look those since
    the server's start, and None. `trouble` says why the server gave no new figures.
    """

    now: Samples
    recent: Samples
    interval_s: float | None = None
    trouble: str = ""


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

    from echo_sgl.cli.top_screen import screen

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


def look(url: str) -> Look:
    """Errors: `ScrapeError` when the server cannot be reached or shows no metric of Echo's."""
    samples = fetch_samples(url)
    return Look(samples, samples)


def looks(url: str, first: Look, every_s: float) -> Iterator[Look]:
    """Look again and again; while the server is away, its last figures with the trouble."""
    before, before_s = first.now, time.monotonic()
    last = first
    while True:
        time.sleep(every_s)
        try:
            now, now_s = fetch_samples(url), time.monotonic()
        except ScrapeError as error:
            yield Look(last.now, last.recent, last.interval_s, trouble=str(error))
            continue
        last = Look(now, now.since(before), now_s - before_s)
        before, before_s = now, now_s
        yield last


def fetch_samples(url: str) -> Samples:
    """Errors: `ScrapeError`."""
    from echo_sgl.cli.samples import Samples

    return fetch_metrics(url, Samples.parse)
