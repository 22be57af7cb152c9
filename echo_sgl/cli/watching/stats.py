"""`echo-sgl stats`: what a running server did for each task class."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from echo_sgl.cli.url import ServerUrlError, server_root
from echo_sgl.types import Task

if TYPE_CHECKING:
    import httpx
    from rich.table import Table

    from echo_sgl.cli.watching.scrape import TaskFigures

SCRAPE_TIMEOUT_S = 10.0
NOTHING = "-"
T = TypeVar("T")
_COUNTS = ("punished_tokens", "recomputed_tokens", "retractions", "held_back", "reserve_hits")
_GAUGES = (
    "cached_tokens",
    "protected_tokens",
    "active_kv_tokens",
    "kv_limit_tokens",
    "reserve_tokens",
    "pool_requests",
)


class ScrapeError(Exception):
    """The server gave no figures; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the server: since its start, and over the last interval when watching.

    `trouble` says why the server gave no new figures; they are the last ones then.
    """

    total: dict[Task, TaskFigures]
    recent: dict[Task, TaskFigures] | None = None
    interval_s: float = math.nan
    trouble: str = ""

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {task: _figures_json(self.total[task]) for task in self.total}
        if self.recent is not None:
            recent = {task: _figures_json(self.recent[task]) for task in self.recent}
            document["recent"] = {"interval_s": self.interval_s, **recent}
        return document


def stats(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line a look.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until interrupted.")] = False,
    every: Annotated[
        float, typer.Option(help="With --watch: seconds between two looks.", min=0.1, max=86_400)
    ] = 2.0,
) -> None:
    """Print requests, tokens, cache hit rate and latency per task class.

    Example:

        echo-sgl stats --url http://127.0.0.1:30000 --watch --every 5
    """
    try:
        if watch:
            _watch(server_root(url), as_json, every)
        else:
            _print_one(server_root(url), as_json)
    except ScrapeError as error:
        typer.echo(f"echo-sgl: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def scrape(url: str) -> dict[Task, TaskFigures]:
    """The figures of each class.

    Errors: `ScrapeError` when the server cannot be reached or shows no metric of Echo's.
    """
    from echo_sgl.cli.watching.scrape import parse_figures

    return fetch_metrics(url, parse_figures)


def fetch_metrics(url: str, parse: Callable[[str], T]) -> T:
    """Fetch `/metrics` and parse it by a function that finds nothing (falsy) without Echo.

    Errors: `ScrapeError` when the server cannot be reached or shows no metric of Echo's,
    `ProxyError`.
    """
    import httpx

    from echo_sgl.cli.connection import open_blocking_client

    try:
        with open_blocking_client(url, None, SCRAPE_TIMEOUT_S) as client:
            reply = client.get("/metrics", follow_redirects=True)
    except httpx.InvalidURL as error:
        raise ServerUrlError(url, str(error)) from error
    except httpx.RequestError as error:
        raise ScrapeError(
            f"no server answers at {url} ({error}). Is it running, and is --url right?"
        ) from error
    if reply.status_code != 200:
        raise ScrapeError(_refusal(f"{url}/metrics", reply))
    try:
        figures = parse(reply.text)
    except ValueError as error:
        raise ScrapeError(f"{url}/metrics is no Prometheus text ({error}). Is --url right?") from (
            error
        )
    if not figures:
        raise ScrapeError(
            f"{url}/metrics holds none of Echo's metrics: the server runs without Echo, or has "
            "served nothing yet. Start it with: "
            "echo-sgl serve --config echo --enable-metrics <SGLang's arguments>"
        )
    return figures


def _refusal(address: str, reply: httpx.Response) -> str:
    from echo_sgl.cli.server_route import failure

    if reply.status_code in (401, 403):
        return (
            f"{address} answers {reply.status_code}: it wants a key, and this command sends none. "
            "SGLang's own port shows its metrics without; name it with --url"
        )
    if reply.status_code >= 500:
        return failure(address, reply)
    return (
        f"{address} answers {reply.status_code}. Start the server with --enable-metrics to have it."
    )


def readings(url: str, every_s: float) -> Iterator[Reading]:
    """Look at the server again and again; each reading but the first has its last interval.

    While the server is away, as when it is started anew, its last figures with the trouble.
    """
    before, before_s = scrape(url), time.monotonic()
    last = Reading(before)
    yield last
    while True:
        time.sleep(every_s)
        try:
            now, now_s = scrape(url), time.monotonic()
        except ScrapeError as error:
            yield replace(last, trouble=str(error))
            continue
        recent = {task: now[task].since(before[task]) for task in now if task in before}
        last = Reading(now, recent, now_s - before_s)
        before, before_s = now, now_s
        yield last


def make_table(reading: Reading) -> Table:
    """One column per task class, and one more each for the last interval when there is one."""
    from rich.table import Table

    table = Table("", *(f"{task}" for task in reading.total), title="since the server's start")
    columns = [_cells(figures, math.nan) for figures in reading.total.values()]
    if reading.recent is not None:
        table.title = f"since the server's start, and in the last {reading.interval_s:.1f} s"
        for task, figures in reading.recent.items():
            table.add_column(f"{task}, last")
            columns.append(_cells(figures, reading.interval_s))
    if reading.trouble:
        table.caption = f"old figures: {reading.trouble}"
    for column in table.columns[1:]:
        column.justify = "right"
    names = dict.fromkeys(itertools.chain.from_iterable(columns))
    for name in names:
        table.add_row(name, *(cells.get(name, NOTHING) for cells in columns))
    return table


def _print_one(url: str, as_json: bool) -> None:
    reading = Reading(scrape(url))
    if as_json:
        _print_json(reading)
        return
    from rich.console import Console

    Console().print(make_table(reading))


def _watch(url: str, as_json: bool, every_s: float) -> None:
    if as_json:
        for reading in readings(url, every_s):
            if reading.trouble:
                typer.echo(f"echo-sgl: {reading.trouble}", err=True)
            else:
                _print_json(reading)
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for reading in readings(url, every_s):
            live.update(make_table(reading), refresh=True)


def _print_json(reading: Reading) -> None:
    import orjson

    # orjson writes NaN as null, which is what a figure without data should be.
    sys.stdout.write(orjson.dumps(reading.as_json(), option=orjson.OPT_NON_STR_KEYS).decode())
    sys.stdout.write("\n")
    sys.stdout.flush()


def _figures_json(figures: TaskFigures) -> dict[str, Any]:
    from echo_sgl.cli.watching.scrape import quantile

    return {
        "requests": figures.requests,
        "prompt_tokens": figures.prompt_tokens,
        "cached_prompt_tokens": figures.cached_prompt_tokens,
        "hit_rate": figures.hit_rate,
        "generated_tokens": figures.generated_tokens,
        "ttft_p50_s": quantile(figures.ttft_s, 0.5),
        "ttft_p99_s": quantile(figures.ttft_s, 0.99),
        "tpot_p50_s": quantile(figures.tpot_s, 0.5),
        "tpot_p99_s": quantile(figures.tpot_s, 0.99),
        "pool_requests": figures.pool_requests,
        "pool_oldest_age_s": figures.pool_oldest_age_s,
        "retractions": figures.retractions,
        "cached_tokens": figures.cached_tokens,
        "protected_tokens": figures.protected_tokens,
        "evicted_tokens": figures.evicted_tokens,
        "punished_tokens": figures.punished_tokens,
        "recomputed_tokens": figures.recomputed_tokens,
        "active_kv_tokens": figures.active_kv_tokens,
        "kv_limit_tokens": figures.kv_limit_tokens,
        "reserve_tokens": figures.reserve_tokens,
        "reserve_hits": figures.reserve_hits,
        "held_back": figures.held_back,
    }


def _cells(figures: TaskFigures, interval_s: float) -> dict[str, str]:
    """The rows of one column; over an interval, counts become rates per second."""
    values = _figures_json(figures)

    def count(value: float) -> str:
        return f"{value:,.0f}" if math.isnan(interval_s) else f"{value / interval_s:,.1f}/s"

    cells = {f"requests {outcome}": count(value) for outcome, value in figures.requests.items()}
    for name in ("prompt_tokens", "cached_prompt_tokens"):
        cells[name.replace("_", " ")] = count(values[name])
    cells["hit rate"] = _shown(values["hit_rate"], "{:.1%}")
    cells["generated tokens"] = count(values["generated_tokens"])
    for name in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"):
        label, share, _ = name.split("_")
        cells[f"{label.upper()} {share}, ms"] = _shown(values[name] * 1000, "{:,.1f}")
    for worth, num_tokens in figures.evicted_tokens.items():
        cells[f"evicted {worth.replace('_', ' ')} tokens"] = count(num_tokens)
    for name in _COUNTS:
        cells[name.replace("_", " ")] = count(values[name])
    for name in _GAUGES:
        cells[name.replace("_", " ")] = f"{values[name]:,.0f}"
    cells["pool oldest, s"] = f"{figures.pool_oldest_age_s:,.1f}"
    return cells


def _shown(value: float, form: str) -> str:
    return NOTHING if math.isnan(value) else form.format(value)
