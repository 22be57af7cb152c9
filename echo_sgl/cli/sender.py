"""Send the lines of a job file to a server, each until it is answered or fails for good."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import orjson

from echo_sgl.batches.job_file import Entry, LineReader
from echo_sgl.batches.journal import Journal, Record
from echo_sgl.batches.lines import EMBEDDINGS_URL, BatchLine
from echo_sgl.batches.replies import Reply, Usage, Verdict, output_record
from echo_sgl.cli.connection import Connection
from echo_sgl.cli.tally import Display
from echo_sgl.cli.window import Window, backoff_s
from echo_sgl.types import OFFLINE_SERVICE_TIER

MESSAGE_INTERVAL_S = 10.0  # 50,000 lines can fail in the same way
REFUSED_BACKOFF_CAP_S = 10.0


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How lines are sent. `max_retries` bounds broken replies of one line, not refusals."""

    window: int = 64
    window_tokens: int = 1_000_000
    max_retries: int = 5
    is_flex: bool = True


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


class Sender:
    """Keeps a bounded window of lines in the server and records what comes back."""

    def __init__(
        self,
        connection: Connection,
        reader: LineReader,
        journal: Journal,
        *,
        options: SendOptions,
        display: Display,
        rng: random.Random,
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._writer = JournalWriter(journal)
        self._options = options
        self._display = display
        self._tally = display.tally
        self._rng = rng
        self._window = Window(options.window, options.window_tokens)
        self._recording: set[asyncio.Task[None]] = set()
        self._num_refused = 0
        self._next_message_s: dict[Verdict, float] = {}

    async def run(self, entries: Iterable[Entry]) -> None:
        """Send all entries in their order; return when each one's record is on disk.

        Cancellation drops what is in flight and keeps every answer that has come in.
        """
        queue = iter(entries)
        workers = [asyncio.create_task(self._work(queue)) for _ in range(self._options.window)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await asyncio.gather(*self._recording)

    async def _work(self, queue: Iterator[Entry]) -> None:
        for entry in queue:
            line = self._reader.read(entry)
            reply = await self._answer(entry, line)
            task = asyncio.create_task(self._record(entry.custom_id, reply))
            self._recording.add(task)
            task.add_done_callback(self._recording.discard)
            # A cancelled run keeps the answers that it has.
            await asyncio.shield(task)

    async def _record(self, custom_id: str, reply: Reply) -> None:
        is_ok = reply.verdict is Verdict.ANSWERED
        await self._writer.write((is_ok, output_record(custom_id, reply)))
        self._tally.add(Usage.of_body(reply.body), is_ok=is_ok)
        self._display.update()

    async def _answer(self, entry: Entry, line: BatchLine) -> Reply:
        """The reply that settles the line."""
        content = self._content(line)
        num_refusals = num_broken = 0
        while True:
            async with self._window.slot(entry.tokens):
                reply = await self._connection.post(line.url, content)
                self._adapt(reply)
            if reply is None:
                self._tally.retries += 1
                continue
            if reply.verdict is Verdict.REFUSED:
                await self._wait_refused(reply, num_refusals)
                num_refusals += 1
            elif reply.verdict is Verdict.BROKEN and num_broken < self._options.max_retries:
                await self._wait_broken(entry, reply, num_broken)
                num_broken += 1
            else:
                return reply
            self._tally.retries += 1

    def _content(self, line: BatchLine) -> bytes:
        if self._options.is_flex and line.url != EMBEDDINGS_URL:
            return orjson.dumps({**line.body, "service_tier": OFFLINE_SERVICE_TIER})
        return orjson.dumps(line.body)

    def _adapt(self, reply: Reply | None) -> None:
        if reply is None:
            return
        if reply.verdict is Verdict.REFUSED:
            self._window.shrink()
        else:
            self._window.grow()

    async def _wait_refused(self, reply: Reply, attempt: int) -> None:
        self._num_refused += 1
        try:
            self._say_seldom(
                Verdict.REFUSED,
                f"the server takes no more work ({reply.reason}); {self._num_refused} lines "
                f"wait with back-off until it does, {self._window.limit} are sent at a time",
            )
            await asyncio.sleep(backoff_s(attempt, self._rng, cap_s=REFUSED_BACKOFF_CAP_S))
        finally:
            self._num_refused -= 1

    async def _wait_broken(self, entry: Entry, reply: Reply, attempt: int) -> None:
        delay_s = backoff_s(attempt, self._rng)
        self._say_seldom(
            Verdict.BROKEN,
            f"line {entry.line_number} ({entry.custom_id}) failed ({reply.reason}); retry "
            f"{attempt + 1} of {self._options.max_retries} in {delay_s:.1f} s",
        )
        await asyncio.sleep(delay_s)

    def _say_seldom(self, kind: Verdict, message: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_message_s.get(kind, 0.0):
            self._next_message_s[kind] = now_s + MESSAGE_INTERVAL_S
            self._display.say(message)
