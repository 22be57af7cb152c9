"""Looks at a server's counts, one after the other, as `echo-sgl top` shows them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo_sgl.cli.watching.stats import ScrapeError, fetch_metrics

if TYPE_CHECKING:
    from echo_sgl.cli.watching.samples import Samples


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
    from echo_sgl.cli.watching.samples import Samples

    return fetch_metrics(url, Samples.parse)
