"""Clients of a service as a trace: each has a rate, gaps and lengths of its own, hour by hour.

Most of a service's requests come from a few clients, and some of these send in clumps: all of
them as one Poisson process would be kinder than they are (ServeGen, Alibaba's inference service).
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.workloads import WorkloadError, read_lines
from eval.workloads.traces import Arrival

COLUMNS = "t_s,client,rate_rps,cv,pattern,p1,p2,client_mean_in,client_mean_out"
# A client whose lengths were not published has those of all others on average (m-small's).
MEAN_LENGTHS = 147.1, 19.5
# What all clients send on average, by scaling each one's gaps: a server of a fleet, to which its
# clients keep. Who replays a trace stretches it to a rate.
MEAN_RPS = 1.0


@dataclass(frozen=True, slots=True)
class Client:
    """What one client sends in one window; gaps of `shape`, whose mean is one over the rate."""

    start_s: float
    rate_rps: float
    pattern: str
    shape: float
    mean_lengths: tuple[float, float]


def is_clients(path: Path) -> bool:
    """Whether a file has the columns of `read_clients`."""
    return next((line.strip() for _, line in read_lines(path, max_chars=256)), "") == COLUMNS


def read_clients(path: Path) -> list[Client]:
    """What each client sends in each window of a file, in the order of time.

    Errors: `WorkloadError` names the file, the line and what is wrong with it.
    """
    lines = (line for _, line in read_lines(path))
    clients = []
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            clients.append(_client(row))
        except (TypeError, ValueError) as error:
            raise WorkloadError(f"{path}, line {number}: {error}; {COLUMNS} are needed") from error
    if len({one.start_s for one in clients}) < 2:
        raise WorkloadError(f"{path} holds fewer than two windows of {COLUMNS}")
    return sorted(clients, key=lambda one: one.start_s)


def client_trace(clients: list[Client], *, seed: int) -> list[Arrival]:
    """The requests of all clients in order of time, the first at 0 s, `MEAN_RPS` on average.

    Lengths are exponential around the client's own means, as those of answers were found to be.
    """
    rng = random.Random(seed)
    windows = [list(group) for _, group in itertools.groupby(clients, key=lambda c: c.start_s)]
    window_s = min(b[0].start_s - a[0].start_s for a, b in itertools.pairwise(windows))
    scale = MEAN_RPS * len(windows) / sum(one.rate_rps for one in clients)
    arrivals = [
        Arrival(one.start_s + at_s, *_lengths(one, rng))
        for one in clients
        for at_s in _times_s(one, one.rate_rps * scale, window_s, rng)
    ]
    arrivals.sort(key=lambda one: one.at_s)
    if not arrivals:
        raise WorkloadError("no client sends a request; their rates are too low")
    first_s = arrivals[0].at_s
    return [Arrival(one.at_s - first_s, one.prompt_tokens, one.output_tokens) for one in arrivals]


def _client(row: dict[str, str]) -> Client:
    means = tuple(
        float(row[column] or mean)
        for column, mean in zip(("client_mean_in", "client_mean_out"), MEAN_LENGTHS, strict=True)
    )
    numbers = float(row["t_s"]), float(row["rate_rps"]), float(row["p1"])
    if row["pattern"] not in ("Gamma", "Weibull"):
        raise ValueError(f"pattern is {row['pattern']!r:.40}; it is Gamma or Weibull")
    if not all(0 < one < math.inf for one in (*numbers[1:], *means)) or not numbers[0] >= 0:
        raise ValueError("rates, shapes and lengths are above 0, times at least 0")
    return Client(numbers[0], numbers[1], row["pattern"], numbers[2], (means[0], means[1]))


def _times_s(
    client: Client, rate_rps: float, window_s: float, rng: random.Random
) -> Iterator[float]:
    """From the start of the window: a renewal process that has run for as long before. One that
    began there would send its first requests too early.
    """
    at_s = -window_s
    while (at_s := at_s + _gap(client, rng) / rate_rps) < window_s:
        if at_s >= 0.0:
            yield at_s


def _gap(client: Client, rng: random.Random) -> float:
    """Of mean 1."""
    shape = client.shape
    if client.pattern == "Gamma":
        return rng.gammavariate(shape, 1.0 / shape)
    return rng.weibullvariate(1.0 / math.gamma(1.0 + 1.0 / shape), shape)


def _lengths(client: Client, rng: random.Random) -> tuple[int, int]:
    prompt, answer = (max(1, round(rng.expovariate(1.0 / one))) for one in client.mean_lengths)
    return prompt, answer
