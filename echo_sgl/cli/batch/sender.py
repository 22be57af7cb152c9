"""Send the lines of a job file to servers, each until it is answered or fails for good."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from echo_sgl.batches.dispatch.window import MAX_CRASHES, Weight, Window, backoff_s
from echo_sgl.batches.lines.job_file import Entry, LineReader
from echo_sgl.batches.lines.job_line import EMBEDDINGS_URL, BatchLine
from echo_sgl.batches.lines.journal import Journal, Record
from echo_sgl.batches.lines.replies import Reply, Usage, Verdict, crashed_record, output_record
from echo_sgl.cli.batch.shares import Line, LineShares
from echo_sgl.cli.batch.tally import Display
from echo_sgl.cli.connection import Connection, Loss, first_of
from echo_sgl.types import OFFLINE_SERVICE_TIER

MESSAGE_INTERVAL_S = 10.0  # 50,000 lines can fail in the same way
REFUSED_BACKOFF_CAP_S = 10.0


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How lines are sent to each server.

    `max_retries` bounds broken replies of one line, not refusals.
    """

    window: int = 64
    window_tokens: int = 1_000_000
    max_retries: int = 5
    is_flex: bool = True


async def _all_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


class JournalWriter:
    """Writes records from many tasks; those that wait at the same time share one fsync."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pending: list[Record] = []
        self._turn = asyncio.Lock()

    async def write(self, record: Record) -> None:
        """Return when the record is on disk."""
        self._pending.append(record)
        async with self._turn:
            records, self._pending = self._pending, []
            if records:  # else whoever had the turn before has written it
                await asyncio.to_thread(self._journal.append, records)


@dataclass(frozen=True, slots=True)
class Target:
    """One server and what may be in it at a time."""

    connection: Connection
    window: Window


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a line."""

    is_ok: bool
    record: bytes
    usage: Usage = field(default_factory=Usage)


class Sender:
    """Keeps a bounded window of lines in each server and records what comes back."""

    def __init__(
        self,
        connections: Sequence[Connection],
        reader: LineReader,
        journal: Journal,
        *,
        options: SendOptions,
        display: Display,
        rng: random.Random,
    ) -> None:
        self._targets = [
            Target(connection, Window(options.window, options.window_tokens))
            for connection in connections
        ]
        self._reader = reader
        self._writer = JournalWriter(journal)
        self._options = options
        self._display = display
        self._tally = display.tally
        self._rng = rng
        self._recording: set[asyncio.Task[None]] = set()
        self._num_refused = 0
        self._next_message_s: dict[Verdict, float] = {}

    async def run(self, entries: Sequence[Entry]) -> None:
        """Send all entries in their order; return when each one's record is on disk.

        Cancellation drops what is in flight and keeps every answer that has come in.
        """
        shares = LineShares(entries, len(self._targets))
        for target in self._targets:
            target.connection.begin()
        workers = [
            asyncio.create_task(self._work(shares, server))
            for server in range(len(self._targets))
            for _ in range(self._options.window)
        ]
        all_settled = asyncio.create_task(shares.wait_settled())
        try:
            # A server that is away keeps its workers waiting, but not the run.
            await first_of([all_settled, _all_of(workers)])
        finally:
            for task in (all_settled, *workers):
                task.cancel()
            await asyncio.gather(all_settled, *workers, return_exceptions=True)
            await asyncio.gather(*self._recording)
            for target in self._targets:
                await target.connection.close()

    async def _work(self, shares: LineShares, server: int) -> None:
        target = self._targets[server]
        while True:
            await target.connection.wait_there()
            line = await shares.take(server)
            if line is None:
                return
            outcome = await self._try(target, line)
            if outcome is None:
                shares.give_back(server, line)
                continue
            task = asyncio.create_task(self._record(outcome, target))
            self._recording.add(task)
            task.add_done_callback(self._recording.discard)
            # A cancelled run keeps the answers that it has.
            await asyncio.shield(task)
            shares.settle()

    async def _record(self, outcome: Outcome, target: Target) -> None:
        await self._writer.write((outcome.is_ok, outcome.record))
        self._tally.add(outcome.usage, is_ok=outcome.is_ok, server=target.connection.url)
        self._display.update()

    async def _try(self, target: Target, line: Line) -> Outcome | None:
        """Send the line once; None when it is to be sent again."""
        entry = line.entry
        request = self._reader.read(entry)
        weight = Weight(entry.tokens, request.num_requests, line.num_crashes)
        async with target.window.slot(weight) as number:
            if target.connection.is_away:
                return None
            content = self._content(request, target.connection.names)
            reply = await target.connection.post(request.url, content)
            if not isinstance(reply, Loss):
                _adapt(target.window, reply, number, weight.num_requests)
        outcome = await self._judge(target, line, reply)
        self._tally.retries += outcome is None
        return outcome

    async def _judge(self, target: Target, line: Line, reply: Reply | Loss) -> Outcome | None:
        if isinstance(reply, Loss):
            line.num_crashes += reply.was_sent
            if line.num_crashes < MAX_CRASHES:
                return None
            return Outcome(is_ok=False, record=crashed_record(line.entry.custom_id))
        if reply.verdict is Verdict.REFUSED:
            await self._wait_refused(target, reply, line.num_refused)
            line.num_refused += 1
            return None
        if reply.verdict is Verdict.BROKEN and line.num_broken < self._options.max_retries:
            await self._wait_broken(line, reply)
            line.num_broken += 1
            return None
        is_ok = reply.verdict is Verdict.ANSWERED
        record = output_record(line.entry.custom_id, reply)
        return Outcome(is_ok, record, Usage.of_body(reply.body))

    def _content(self, line: BatchLine, names: Mapping[str, str]) -> bytes:
        body = {**line.body, "model": names.get(line.model, line.model)}
        if self._options.is_flex and line.url != EMBEDDINGS_URL:
            body["service_tier"] = OFFLINE_SERVICE_TIER
        return orjson.dumps(body)

    async def _wait_refused(self, target: Target, reply: Reply, attempt: int) -> None:
        self._num_refused += 1
        try:
            self._say_seldom(
                Verdict.REFUSED,
                f"the server takes no more work ({reply.reason}); {self._num_refused} lines "
                f"wait with back-off until it does, {target.window.limit} are sent at a time",
            )
            await asyncio.sleep(backoff_s(attempt, self._rng, cap_s=REFUSED_BACKOFF_CAP_S))
        finally:
            self._num_refused -= 1

    async def _wait_broken(self, line: Line, reply: Reply) -> None:
        delay_s = backoff_s(line.num_broken, self._rng)
        self._say_seldom(
            Verdict.BROKEN,
            f"line {line.entry.line_number} ({line.entry.custom_id}) failed ({reply.reason}); "
            f"retry {line.num_broken + 1} of {self._options.max_retries} in {delay_s:.1f} s",
        )
        await asyncio.sleep(delay_s)

    def _say_seldom(self, kind: Verdict, message: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_message_s.get(kind, 0.0):
            self._next_message_s[kind] = now_s + MESSAGE_INTERVAL_S
            self._display.say(message)


def _adapt(window: Window, reply: Reply, number: int, num_requests: int) -> None:
    if reply.verdict is not Verdict.REFUSED:
        window.grow(num_requests)
    elif not reply.says_handed_back:
        window.shrink(number)
