"""Which of several servers sends which line: contiguous ranges, so that sharing stays local."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from echo_sgl.batches.lines.job_file import Entry


@dataclass(slots=True)
class Line:
    """A line on its way; `num_crashes` counts the servers that died with it."""

    entry: Entry
    num_refused: int = 0
    num_broken: int = 0
    num_crashes: int = 0


class LineShares:
    """Gives each line to one server at a time until it is settled.

    The lines are cut into ranges of about equal tokens, one a server. Who has done its own takes
    the farther half of the longest range that is left, so a server that is slow or gone loses its
    range bit by bit, and a prefix is computed on a second server only where a range was cut.
    """

    def __init__(self, entries: Sequence[Entry], num_servers: int) -> None:
        self._ranges = _cut([Line(entry) for entry in entries], num_servers)
        self._num_left = len(entries)
        self._changed = asyncio.Event()

    async def take(self, server: int) -> Line | None:
        """The server's next line; waits while others may give some back. None when all are done."""
        while self._num_left:
            if line := self.try_take(server):
                return line
            self._changed.clear()
            await self._changed.wait()
        return None

    async def wait_settled(self) -> None:
        """Return when every line has its record."""
        while self._num_left:
            self._changed.clear()
            await self._changed.wait()

    def try_take(self, server: int) -> Line | None:
        """The server's next line, or None when all that are left are under way."""
        own = self._ranges[server]
        if not own:
            longest = max(self._ranges, key=len)
            own.extend(reversed([longest.pop() for _ in range((len(longest) + 1) // 2)]))
        return own.popleft() if own else None

    def give_back(self, server: int, line: Line) -> None:
        """The server has not settled it; whoever comes first takes it."""
        self._ranges[server].appendleft(line)
        self._changed.set()

    def settle(self) -> None:
        """One line has its record."""
        self._num_left -= 1
        if not self._num_left:
            self._changed.set()


def _cut(lines: Sequence[Line], num_parts: int) -> list[deque[Line]]:
    total = sum(line.entry.tokens for line in lines)
    parts: list[deque[Line]] = [deque() for _ in range(num_parts)]
    before = 0
    for line in lines:
        # By its middle, so that a line falls into the part that holds most of it.
        middle = 2 * before + line.entry.tokens
        parts[min(num_parts - 1, middle * num_parts // (2 * max(1, total)))].append(line)
        before += line.entry.tokens
    return parts
