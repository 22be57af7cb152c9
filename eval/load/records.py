"""What is known of every request that the load generator sent, and its JSONL form."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import orjson

from echo_sgl.types import Task

LATE_BOUND_S = 0.05


class Status(StrEnum):
    """How a request ended; `cancelled`: the phase was over before the answer was."""

    PENDING = "pending"
    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Record:
    """One request as its client saw it.

    Units: seconds since the phase began. `sent_s` is when the last byte of the request was
    handed to the network, `end_s` when the answer was complete or given up. Token times and
    gaps stay empty for answers that were not streamed.
    """

    id: str
    task: Task
    scheduled_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    status: Status = Status.PENDING
    error: str = ""

    @property
    def late(self) -> bool:
        """The client sent later than the schedule allows: its times are not the server's.

        Only online requests have a schedule; an offline line goes when its turn comes.
        """
        if self.task is not Task.ONLINE or self.sent_s is None:
            return False
        return self.sent_s - self.scheduled_s > LATE_BOUND_S

    @property
    def ttft_s(self) -> float | None:
        """Wait for the first token, from the scheduled time.

        A request that was given up without a token counts with the time it had waited: it
        would have waited longer, and leaving it out would flatter the slower server.
        """
        waited_until_s = self.first_token_s
        if waited_until_s is None and self.status is Status.CANCELLED:
            waited_until_s = self.end_s
        return None if waited_until_s is None else waited_until_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (n - 1) for a complete, streamed answer of n > 1 tokens."""
        if self.status is not Status.OK or self.first_token_s is None or self.last_token_s is None:
            return None
        if self.completion_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.completion_tokens - 1)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def end(self, status: Status, at_s: float, error: str = "") -> None:
        """Close the record; the first end holds."""
        if self.status is Status.PENDING:
            self.status, self.end_s, self.error = status, at_s, error


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write gzip'd JSONL, one record a line, in the order of sending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # No name and no time: equal records give equal bytes.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for record in records:
            file.write(orjson.dumps(_rounded(record)) + b"\n")


def read_records(path: Path) -> list[Record]:
    """Read what `write_records` wrote."""
    with gzip.open(path, "rb") as file:
        rows = [orjson.loads(line) for line in file]
    enums = ({"task": Task(row["task"]), "status": Status(row["status"])} for row in rows)
    return [Record(**(row | values)) for row, values in zip(rows, enums, strict=True)]


def _rounded(record: Record) -> dict[str, object]:
    """Microseconds are finer than any claim; full floats double the file."""
    row = {name: getattr(record, name) for name in (f.name for f in dataclasses.fields(record))}
    row["gaps_s"] = [round(gap_s, 6) for gap_s in record.gaps_s]
    return {
        key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()
    }
