"""Play a trace of online requests on a live server, with offline work beside it, and time both."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from echo_sgl.cli.connection import bearer, open_client
from echo_sgl.cli.server_route import MAX_SHOWN_CHARS, failure
from echo_sgl.cli.tuning.replay_load import OfflineBody, ReplayError, ReplayLoad
from echo_sgl.cli.tuning.streamed import Chunk, read_chunk
from echo_sgl.cli.watching.steps import StepsError, fetch_steps
from echo_sgl.config import EchoConfig, parse_config
from echo_sgl.estimators.budget import Measurement, Target
from echo_sgl.sim.workload import Trace

DRAIN_S = 120.0
IDLE_TIMEOUT_S = 300.0
IDLE_POLL_S = 0.5
OFFLINE_WINDOW, WARM_UP_REQUESTS = 64, 16
# A server that has too much to do says so; whom it turns away waits for ever.
REFUSED = {httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE}
# What it says of an offline line that it never takes, and how long it is left alone when busy.
UNFIT = {httpx.codes.BAD_REQUEST, httpx.codes.NOT_FOUND, httpx.codes.UNPROCESSABLE_ENTITY}
RETRY_S = 0.5
KEY_REFUSED = {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}


@dataclass(slots=True)
class Outcome:
    """Latencies of the online requests, infinite where no answer came; offline tokens done in
    `elapsed_s`, which ends with the last of them.
    """

    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)
    offline_tokens: int = 0
    elapsed_s: float = 1.0

    def measurement(self, targets: Sequence[Target]) -> Measurement:
        """The statistics that targets ask for. Errors: `ReplayError` when one has no values."""
        values = {"ttft": self.ttfts_s, "tpot": self.tpots_s}
        for target in targets:
            if not values[target.metric]:
                raise ReplayError(
                    f"{target.name} has no values: no request of the trace generates more than "
                    "one token. Use a longer part of it (--seconds)"
                )
        measured = {one.name: _statistic(values[one.metric], one.statistic) for one in targets}
        return Measurement(measured, len(self.ttfts_s), self.offline_tokens / self.elapsed_s)


class Replayer:
    """Replays one trace as often as asked, each time with fresh prompts on an idle server."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        trace: Trace,
        *,
        jobs: Path | None,
        speed: float,
        rng: random.Random,
        admin_api_key: str | None = None,
    ) -> None:
        self._url, self._api_key = url, api_key
        self._admin_api_key = admin_api_key or api_key
        replicas = fetch_steps(url, api_key)
        if len(replicas) != 1:
            raise StepsError(f"the server has {len(replicas)} replicas; search on one of them")
        self.server: dict[str, Any] = replicas[0]["server"]
        self.config: EchoConfig = parse_config(replicas[0]["config"])
        self.load = ReplayLoad(trace, self.server, jobs=jobs, speed=speed, rng=rng)
        self._has_budget = self.config.steps.limit == "budget"
        self._is_warm = False

    @property
    def seconds(self) -> float:
        """How long requests arrive for."""
        return max(1.0, self.load.arrivals[-1][0])

    def measure(self, budget_s: float, targets: Sequence[Target]) -> Measurement:
        """One replay under a budget; 0 leaves the offline work out, and the budget as it is.

        At first that is what the server was started with: an earlier search may have left one in
        which online prompts are cut to pieces.
        """
        first_s = 0.0 if self._is_warm or not self._has_budget else self.config.steps.budget_s
        if set_s := budget_s or first_s:
            set_budget(self._url, self._admin_api_key, set_s)
        if not self._is_warm:
            asyncio.run(self._warm_up())
        asyncio.run(self._settle())
        outcome = asyncio.run(self._replay(has_offline=budget_s > 0))
        return outcome.measurement(targets)

    async def _warm_up(self) -> None:
        """Send a few of the requests at once: a server's first ones wait for what it sets up."""
        self._is_warm = True
        await self._settle()
        async with open_client(self._url, self._api_key, WARM_UP_REQUESTS) as client:
            bodies = itertools.islice(self.load.online_bodies(), WARM_UP_REQUESTS)
            now_s, outcome = time.monotonic(), Outcome()
            await asyncio.gather(*(_online(client, body, now_s, outcome) for body in bodies))

    async def _replay(self, *, has_offline: bool) -> Outcome:
        outcome = Outcome()
        async with open_client(self._url, self._api_key, 10_000) as client:
            offline = self.load.offline_bodies() if has_offline else iter(())
            async with _background(
                self._offline(client, offline, outcome) for _ in range(OFFLINE_WINDOW)
            ):
                bodies = list(self.load.online_bodies())
                start_s = time.monotonic()
                tasks = [
                    asyncio.create_task(_online(client, body, start_s + at_s, outcome))
                    for (at_s, _, _), body in zip(self.load.arrivals, bodies, strict=True)
                ]
                await asyncio.wait(
                    tasks, timeout=self.seconds + DRAIN_S, return_when=asyncio.FIRST_EXCEPTION
                )
                outcome.elapsed_s = time.monotonic() - start_s
                # What is answered while this ends is beyond the time that it is divided by.
                num_tokens = outcome.offline_tokens
                for task in tasks:
                    task.cancel()
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(result, Exception):
                        raise ReplayError(f"an online request failed: {result}") from result
        outcome.offline_tokens = num_tokens
        return outcome

    async def _offline(
        self, client: httpx.AsyncClient, bodies: Iterator[OfflineBody], outcome: Outcome
    ) -> None:
        for url, body, line in bodies:
            reply = await client.post(url, json=body)
            if reply.status_code in REFUSED:
                await asyncio.sleep(RETRY_S)
            elif line and reply.status_code in UNFIT:
                self.load.refuse(line, " ".join(reply.text.split())[:MAX_SHOWN_CHARS])
            else:
                answer = reply.raise_for_status().json()
                usage = answer.get("usage") or answer["meta_info"]
                outcome.offline_tokens += usage["prompt_tokens"] + usage.get("completion_tokens", 0)

    async def _settle(self) -> None:
        """Wait until the server is idle and forget what it cached, so that replays are alike."""
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            [state] = fetch_steps(self._url, self._api_key)
            if not state["num_running"] and not state["num_waiting"]:
                break
            if time.monotonic() > deadline_s:
                raise ReplayError(
                    f"the server is still busy after {IDLE_TIMEOUT_S:.0f} s: "
                    f"{state['num_running']} requests run and {state['num_waiting']} wait. "
                    "Search when nobody else uses it"
                )
            await asyncio.sleep(IDLE_POLL_S)
        await self._empty_cache()

    async def _empty_cache(self) -> None:
        try:
            async with open_client(self._url, self._admin_api_key, 1) as client:
                reply = await client.post("/flush_cache")
        except httpx.RequestError as error:
            raise _lost(self._url, error) from error
        _require_key(f"{self._url}/flush_cache", reply)
        if reply.status_code != httpx.codes.OK:
            raise ReplayError(
                f"{self._url}/flush_cache answers {reply.status_code}: {reply.text[:300]}. With "
                "what the last replay cached, replays would not be alike"
            )


def set_budget(url: str, api_key: str | None, budget_s: float) -> None:
    """Tell the server the time that each of its steps with online work may take.

    Errors: `ReplayError` holds what the server answers.
    """
    try:
        reply = httpx.post(
            f"{url}/echo/budget", json={"budget_s": budget_s}, headers=bearer(api_key), timeout=60
        )
    except httpx.RequestError as error:
        raise _lost(url, error) from error
    _require_key(f"{url}/echo/budget", reply)
    if reply.status_code >= 500:
        raise ReplayError(failure(f"{url}/echo/budget", reply))
    if reply.status_code != httpx.codes.OK:
        raise ReplayError(
            f"{url}/echo/budget answers {reply.status_code}: {reply.text[:300]}. "
            'Start the server with Echo and steps.limit = "budget"'
        )


def _require_key(address: str, reply: httpx.Response) -> None:
    if reply.status_code in KEY_REFUSED:
        raise ReplayError(
            f"{address} answers {reply.status_code}: it wants the server's admin key, where it has "
            "one, else its API key. Give it with --admin-api-key"
        )


def _lost(url: str, error: httpx.RequestError) -> ReplayError:
    return ReplayError(
        f"the server at {url} failed meanwhile: {str(error) or type(error).__name__}. Search again "
        "when it is back"
    )


async def _online(
    client: httpx.AsyncClient, body: dict[str, Any], due_s: float, outcome: Outcome
) -> None:
    """Send a request when it is due; late sending counts as waiting."""
    await asyncio.sleep(due_s - time.monotonic())
    first_s = last_s = ttft_s = tpot_s = math.inf
    num_tokens = 0
    try:
        async with client.stream("POST", "/generate", json=body) as reply:
            if reply.status_code in REFUSED:
                return
            if reply.status_code != httpx.codes.OK:
                text = (await reply.aread()).decode(errors="replace")
                raise ReplayError(f"the server answers {reply.status_code}: {text[:300]}")
            async for line in reply.aiter_lines():
                if (chunk := read_chunk(line)) is None:
                    continue
                if _is_cut(chunk):
                    tpot_s = math.inf
                    return
                last_s, num_tokens = time.monotonic(), chunk.num_tokens
                first_s = min(first_s, last_s)
                # What came in time did so, also when the answer's end is not waited for.
                ttft_s = first_s - due_s
                if num_tokens > 1:
                    tpot_s = (last_s - first_s) / (num_tokens - 1)
        if num_tokens < 2:
            tpot_s = 0.0
    finally:
        outcome.ttfts_s.append(ttft_s)
        if body["sampling_params"]["max_new_tokens"] > 1:
            outcome.tpots_s.append(tpot_s)


def _is_cut(chunk: Chunk) -> bool:
    """Whether the server turned the request away, or gave it up.

    Errors: `ReplayError` when it is one that it never takes.
    """
    if chunk.error is not None and chunk.status and chunk.status not in REFUSED:
        raise ReplayError(f"the server answers {chunk.status}: {chunk.error[:MAX_SHOWN_CHARS]}")
    return chunk.error is not None


def _statistic(values_s: Sequence[float], statistic: str) -> float:
    if statistic == "mean":
        return math.fsum(values_s) / len(values_s)
    share = int(statistic.removeprefix("p")) / 100
    # No interpolation: between a time and infinity there is nothing.
    return float(np.quantile(values_s, share, method="higher"))


@asynccontextmanager
async def _background(coroutines: Iterable[Any]) -> AsyncIterator[None]:
    """Tasks that run beside the block and end with it; one that failed before fails it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        failed = [task.exception() for task in tasks if task.done() and task.exception()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failed:
        raise ReplayError(f"an offline request failed: {failed[0]}") from failed[0]
