"""Drive an idle server over a grid of steps, fit every batch-time model, keep the best."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import httpx
import numpy as np

from echo_sgl.batch_shape import BatchRow
from echo_sgl.cli.connection import open_blocking_client
from echo_sgl.cli.server_route import fetch_replicas
from echo_sgl.cli.tuning.calibration_grid import Wave, grid
from echo_sgl.cli.tuning.streamed import read_chunk
from echo_sgl.cli.watching.steps import StepsError, fetch_steps
from echo_sgl.estimators.batch_time import BATCH_TIME_MODELS, create_batch_time
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.held_out import (
    Errors,
    Samples,
    choose_best,
    held_out_errors,
    split_samples,
)
from echo_sgl.estimators.host_time import Beside, HostTime, fit_host_time
from echo_sgl.estimators.profile import Profile
from echo_sgl.estimators.refit import first_fit
from echo_sgl.estimators.roofline_time import RooflineBatchTime, Transformer
from echo_sgl.types import MAX_TRACE_S

HELD_OUT_SHARE = 0.25
REQUEST_TIMEOUT_S = 300.0
WARM_UP_REQUESTS = 3
LONE_REQUESTS, LONE_PROMPT_TOKENS = 12, 8
# So many decode while others come, which are known by their length among the steps.
BESIDE_PROMPT_TOKENS = {1: 9, 8: 10}
BESIDE_DECODE_TOKENS = 64
POLL_S = 0.5
# Of the time to measure: a large wave that takes as long is the last, as larger ones take longer.
LARGE_WAVE_SHARE = 0.1
# Ids below these are often special tokens of a tokenizer.
FIRST_TOKEN_ID = 16
Note = dict[str, Any]
"""A step as `/echo/trace` tells it, by the names of its columns."""


class BusyServerError(StepsError):
    """Somebody uses the server; what is measured now would be theirs."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Every fitted model with its errors on held-out steps, the best one as a profile."""

    models: dict[str, BatchTimeModel]
    errors: dict[str, Errors]
    best: str
    num_samples: int
    server: dict[str, Any]
    largest_step: dict[str, int] | None = None
    host: HostTime | None = None

    def profile(self, name: str | None = None) -> Profile:
        """A model by its name, or the best, with its provenance."""
        chosen = name or self.best
        return Profile(
            device=self.server["device"],
            model=self.server["model"],
            sglang_version=self.server["sglang_version"],
            date=date.today().isoformat(),
            num_samples=self.num_samples,
            errors=self.errors[chosen],
            estimator=self.models[chosen],
            largest_step=self.largest_step,
            host=self.host,
            num_ranks=self.server.get("num_ranks"),
            weights=self.server.get("weights"),
            transformer=self.server.get("transformer"),
        )


class Driver:
    """Sends waves and reads back the steps that they became."""

    def __init__(self, url: str, api_key: str | None, rng: random.Random) -> None:
        self._url, self._api_key, self._random = url, api_key, rng
        self._client = open_blocking_client(url, api_key, REQUEST_TIMEOUT_S)
        self.server: dict[str, Any] = self._replica()["server"]
        self.num_others = self._num_sent = 0
        self._counting = threading.Lock()
        self._lone_s: list[float] = []
        self._beside_s: dict[int, list[float]] = {}
        self._start_s = 0.0
        self._probed: list[Note] = []

    def require_idle(self, *, within_s: float = 0.0) -> None:
        """Wait that long at most. Errors: `BusyServerError` says what is running."""
        deadline_s = time.monotonic() + within_s
        while (replica := self._replica())["num_running"] or replica["num_waiting"]:
            if time.monotonic() >= deadline_s:
                raise BusyServerError(
                    f"the server at {self._url} is busy: {replica['num_running']} requests run "
                    f"and {replica['num_waiting']} wait, {replica['num_offline']} of them offline. "
                    "Calibrate when nobody uses it; their steps would be measured instead"
                )
            time.sleep(POLL_S)

    def measure(self, seconds: float, on_wave: Callable[[float], None]) -> Samples:
        """Drive the grid for that long; rows and times of the steps that it became.

        `num_others` then are the requests of others that were started meanwhile.
        """
        self._send(Wave(((0, 8, 2),) * WARM_UP_REQUESTS))
        replica, self._start_s = self._replica(), time.monotonic()
        before, num_others = replica["num_steps"], replica["num_started"] - self._num_sent
        self._lone_s = [self._time_of(LONE_PROMPT_TOKENS) for _ in range(LONE_REQUESTS)]
        most = max(1, self.server["max_running_requests"] - 1)
        self._beside_s = {
            count: self._times_beside(count) for count in BESIDE_PROMPT_TOKENS if count <= most
        }
        # Now: the grid has prompts of these lengths, too, and more steps than the server keeps.
        self._probed = self._notes()
        self._drive(seconds, on_wave)
        after = self._replica()
        self.num_others = after["num_started"] - self._num_sent - num_others
        table = np.array(after["rows"][before - after["num_steps"] :], dtype=np.float64)
        num_columns = len(BatchRow._fields)
        return table[:, :num_columns], table[:, num_columns]

    def _drive(self, seconds: float, on_wave: Callable[[float], None]) -> None:
        """Send waves of the grid until so much time has passed since the measurement began."""
        takes_large = True
        for wave in grid(self.server, self._random):
            if wave.is_large and not takes_large:
                continue
            start_s = time.monotonic()
            self._send(wave)
            end_s = time.monotonic()
            if wave.is_large:
                takes_large = end_s - start_s < LARGE_WAVE_SHARE * seconds
            on_wave(min(1.0, (end_s - self._start_s) / seconds))
            if end_s - self._start_s >= seconds:
                return

    def forget_traffic(self) -> bool:
        """Keep reserve and budget from taking the waves for traffic; whether the server agreed."""
        try:
            return self._client.post("/echo/forget-traffic").is_success
        except httpx.HTTPError as error:
            raise StepsError(f"the server at {self._url} failed meanwhile: {error}") from error

    def host_time(self) -> HostTime | None:
        """What the server took beside its device in `measure`; None if its steps do not tell."""
        gaps, probed = host_gaps(self._notes()), self._probed
        lone_s = list(zip(self._lone_s, _prefill_times(probed, LONE_PROMPT_TOKENS), strict=False))
        if not gaps or not lone_s:
            return None
        beside = [one for count in self._beside_s for one in self._beside(probed, count)]
        return fit_host_time(gaps, lone_s, beside)

    def _notes(self) -> list[Note]:
        """The steps of `measure` so far, of the last hour if it takes longer."""
        elapsed_s = min(MAX_TRACE_S, time.monotonic() - self._start_s)
        [replica] = fetch_replicas(self._url, "/echo/trace", self._api_key, seconds=elapsed_s)
        return [dict(zip(replica["columns"], row, strict=True)) for row in replica["rows"]]

    def _beside(self, notes: Sequence[Note], num_decoding: int) -> list[Beside]:
        """The requests that came meanwhile, with the steps that they became."""
        length = BESIDE_PROMPT_TOKENS[num_decoding]
        period_s = decode_period_s(notes, length)
        times = zip(self._beside_s[num_decoding], _prefill_times(notes, length), strict=False)
        # The first of them may have come before the decodes, the last one after them.
        return [Beside(num_decoding, *time_s, period_s) for time_s in times][1:-1]

    def _time_of(self, prompt_tokens: int) -> float:
        """How long the client of one request with one token of answer waits."""
        prompt, start_s = self._tokens(prompt_tokens), time.monotonic()
        self._generate(prompt, 1)
        return time.monotonic() - start_s

    def _times_beside(self, num_decoding: int) -> list[float]:
        """The same for requests that come, one at a time, while so many others decode."""
        waits_s: list[float] = []
        most = self.server["max_context_tokens"] - LONE_PROMPT_TOKENS - 1
        num_tokens = min(BESIDE_DECODE_TOKENS, most)
        with ThreadPoolExecutor(num_decoding) as others:
            prompts = [self._tokens(LONE_PROMPT_TOKENS) for _ in range(num_decoding)]
            decoding = [others.submit(self._generate, prompt, num_tokens) for prompt in prompts]
            while not any(one.done() for one in decoding):
                waits_s.append(self._time_of(BESIDE_PROMPT_TOKENS[num_decoding]))
            for one in decoding:
                one.result()
        return waits_s

    def _send(self, wave: Wave) -> None:
        shared = self._tokens(wave.shared_tokens)
        if shared:
            self._generate(shared, 1)
        with ThreadPoolExecutor(len(wave.requests)) as pool:
            list(pool.map(partial(self._request, shared), wave.requests))

    def _request(self, shared: list[int], request: tuple[int, int, int]) -> None:
        cached, new, generated = request
        prompt = shared + self._tokens(cached)
        if cached:
            self._generate(prompt, 1)
        self._generate(prompt + self._tokens(new), generated)

    def _generate(self, prompt: list[int], max_new_tokens: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        with self._counting:
            self._num_sent += 1
        try:
            # Streamed, as people read: each token's way out takes the host's time at each step.
            with self._client.stream("POST", "/generate", json=body) as answer:
                answer.raise_for_status()
                chunks = [read_chunk(line) for line in answer.iter_lines()]
        except httpx.HTTPError as error:
            raise StepsError(f"the server at {self._url} failed meanwhile: {error}") from error
        if failed := next((one for one in chunks if one is not None and one.error), None):
            raise StepsError(
                f"the server at {self._url} answers {failed.error!r} ({failed.status}). Calibrate "
                "one that queues what it has no place for yet: without --max-queued-requests"
            )

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN_ID, self.server["vocab"]) for _ in range(count)]

    def _replica(self) -> dict[str, Any]:
        replicas = fetch_steps(self._url, self._api_key)
        if len(replicas) != 1:
            raise StepsError(
                f"the server has {len(replicas)} replicas; calibrate one that was started with "
                "--dp-size 1 on the same device"
            )
        return replicas[0]


def _prefill_times(notes: Sequence[Note], prompt_tokens: int) -> list[float]:
    """Of steps that prefilled such a prompt and nothing else."""
    return [
        note["time_s"]
        for note in notes
        if note["prefill_tokens"] == prompt_tokens and note["time_s"] is not None
    ]


def decode_period_s(notes: Sequence[Note], prompt_tokens: int) -> float:
    """From the start of a decode step to that of the next, while such prompts came; 0 if none."""
    places = [place for place, one in enumerate(notes) if one["prefill_tokens"] == prompt_tokens]
    during = notes[places[0] : places[-1]] if places else []
    periods_s = [
        after["start_s"] - note["start_s"]
        for note, after in itertools.pairwise(during)
        if not note["num_prefills"] and not after["num_prefills"]
    ]
    return float(np.median(periods_s)) if periods_s else 0.0


def host_gaps(notes: Sequence[Note]) -> list[tuple[int, float]]:
    """Of steps that another one waited for: their requests, and the time until that began.

    The next step decodes: then somebody was there all the time between the two.
    """
    return [
        (note["num_prefills"] + note["num_decodes"], after["start_s"] - end_s)
        for note, after in itertools.pairwise(notes)
        if note["time_s"] is not None and after["num_decodes"]
        for end_s in (note["start_s"] + note["time_s"],)
    ]


def wait_until_up(url: str) -> None:
    """Return when the server is healthy, or its launcher, our parent, is gone.

    Errors: `StepsError` in the latter case; those of `open_blocking_client`.
    """
    parent = os.getppid()
    with open_blocking_client(url, None, REQUEST_TIMEOUT_S) as client:
        while os.getppid() == parent:
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health").status_code == httpx.codes.OK:
                    return
            time.sleep(POLL_S)
    raise StepsError(f"the server at {url} ended before it was up")


def fit_all(
    samples: Samples, server: dict[str, Any], *, seed: int, host: HostTime | None = None
) -> Calibration:
    """Fit every model that the server's facts allow, judge all on the same held-out steps.

    Errors: `ValueError` names the column of samples that cannot be fitted.
    """
    fitted, held_out = split_samples(samples, held_out_share=HELD_OUT_SHARE, seed=seed)
    sizes = server["transformer"]
    transformer = Transformer(**sizes) if sizes else None
    names = [name for name in BATCH_TIME_MODELS if transformer or name != RooflineBatchTime.NAME]
    captured = server["captured_batch_sizes"]
    models = {
        name: first_fit(
            create_batch_time(name, captured_batch_sizes=captured, transformer=transformer),
            *fitted,
        )
        for name in names
    }
    errors: dict[str, Errors] = {
        name: held_out_errors(model, held_out) for name, model in models.items()
    }
    largest = dict(zip(BatchRow._fields, map(int, samples[0].max(axis=0)), strict=True))
    best = choose_best(errors)
    return Calibration(models, errors, best, len(samples[1]), server, largest, host)
