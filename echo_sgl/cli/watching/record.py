"""`echo-sgl record`: a trace of a live server's requests, without what was in them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from io import SEEK_END, FileIO
from pathlib import Path
from typing import Annotated, Any

import typer

from echo_sgl.cli.server_route import ServerRouteError, fetch_replicas
from echo_sgl.errors import EchoError

POLL_S = 5.0
# A server that loads a large model anew is away for minutes.
GIVE_UP_S = 300.0
# Clocks that are nearer to each other are one machine's, read at different moments.
SAME_CLOCK_S = 120.0
FORMAT, FORMAT_VERSION = "echo-recording", 1
MAX_HEAD_BYTES = 1000
_NEEDED = ("log", "block_tokens", "next", "num_lost", "now_s")


class RecordError(EchoError, OSError):
    """Nothing was recorded, it cannot be written where it should, or the server stays away."""


def record(
    output: Annotated[Path, typer.Option(help="JSON lines to write, as recording.jsonl.")],
    seconds: Annotated[float, typer.Option(help="How long.", min=0.1, max=7 * 86_400)] = 600.0,
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as bearer token.", envvar=["ECHO_SGL_API_KEY", "OPENAI_API_KEY"]),
    ] = None,
) -> None:
    """Record when requests come and how long they are, for `echo-sgl plan`.

    Example:

        echo-sgl record --seconds 3600 --output recording.jsonl

    Prompts stay on the server: of them there are lengths, and hashes of blocks that tell which
    requests begin alike in this recording and nothing else. Ctrl-C ends it early. The file grows
    every few seconds and can be used at any time.
    """
    from echo_sgl.cli.url import server_root

    if not output.parent.is_dir():
        raise RecordError(f"--output {output} is in a folder that does not exist")
    if output.suffix != ".jsonl":
        raise RecordError(f"--output is {output}; name it .jsonl, as recording.jsonl")
    _require_recording(output)
    root, recording = server_root(url), secrets.token_hex(16)

    def ask(after: str) -> list[dict[str, Any]]:
        return fetch_replicas(
            root, "/echo/recording", api_key, needs=_NEEDED, recording=recording, after=after
        )

    file = RecordingFile(output)
    collected = Collected(file)
    poll = Poll(ask, collected, time.monotonic)
    try:
        for left_s in _ticks(seconds, time.monotonic, time.sleep):
            poll()
            typer.echo(f"{file.num_rows} requests, {left_s:.0f} s left", err=True)
    except KeyboardInterrupt:
        pass  # Not worth waiting for: the last answer's requests are in the file.
    _report(collected, file)


def _require_recording(output: Path) -> None:
    """Errors: `RecordError` when there is a file which is no recording, nor empty."""
    if not output.exists():
        return
    try:
        with output.open("rb") as file:
            head = file.readline(MAX_HEAD_BYTES)
    except OSError as error:
        raise RecordError(f"--output {output} cannot be replaced: {error.strerror}") from error
    if head and FORMAT.encode() not in head:
        raise RecordError(f"--output {output} is there and no recording, so it is not replaced")


class RecordingFile:
    """A recording on disk, whole after every `add`: requests in the order in which they ended.

    The file is made, in place of an older one, when the first requests end.
    Units: seconds since the recording began; below 0 for what came before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_rows = 0

    @property
    def kept(self) -> str:
        """What there is, for a message about what went wrong."""
        if not self.num_rows:
            return "nothing was written"
        return f"{self.num_rows} requests are kept in {self.path}, which is a whole recording"

    def add(self, rows: Sequence[dict[str, Any]], block_tokens: int) -> None:
        """Write requests to disk.

        Errors: `RecordError` when that fails; what was there before is there still.
        """
        if not rows:
            return
        try:
            if not self.num_rows:
                self._create(block_tokens)
            with self.path.open("ab", buffering=0) as file:
                _append(file, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        except OSError as error:
            raise RecordError(
                f"--output {self.path} cannot be written: {error.strerror}; {self.kept}"
            ) from error
        self.num_rows += len(rows)

    def _create(self, block_tokens: int) -> None:
        head = {"format": FORMAT, "version": FORMAT_VERSION, "block_tokens": block_tokens}
        self.path.write_bytes(json.dumps(head).encode() + b"\n")


class Collected:
    """Follows the logs of a server's replicas, and keeps what they tell in a file.

    A log is one process': a replica that answers with another one was started anew.
    """

    def __init__(self, file: RecordingFile) -> None:
        self.file = file
        self.num_lost = self.num_restarts = 0
        self._logs: dict[int, str] = {}
        self._next: dict[str, int] = {}
        self._origins_s: dict[str, float] = {}

    @property
    def has_begun(self) -> bool:
        return bool(self._logs)

    @property
    def after(self) -> str:
        """The next request's number of each replica, as the route takes it."""
        return ",".join(
            f"{replica}:{self._next[log]}" for replica, log in sorted(self._logs.items())
        )

    def take(self, replicas: Sequence[dict[str, Any]], now_s: float) -> bool:
        """Keep the answers to `after`; False if one was of another log, so that `after` changed.

        Units: seconds since the recording began.
        """
        rows: list[dict[str, Any]] = []
        is_understood = True
        for one in replicas:
            if self._logs.get(one["replica"]) == one["log"]:
                rows += self._rows(one)
            else:
                is_understood &= one["replica"] not in self._logs
                self._follow(one, now_s)
        self.file.add(rows, replicas[0]["block_tokens"] if replicas else 0)
        return is_understood

    def _rows(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        self.num_lost += one["num_lost"]
        self._next[one["log"]] = one["next"]
        origin_s = self._origins_s[one["log"]]
        rows = [dict(zip(one["columns"], row, strict=True)) for row in one["rows"]]
        return [{**row, "at_s": round(row["at_s"] - origin_s, 6)} for row in rows]

    def _follow(self, one: dict[str, Any], now_s: float) -> None:
        """Go on with the log of an answer: a first one from now on, a later one from its start."""
        replica, log = one["replica"], one["log"]
        is_first = replica not in self._logs
        self._logs[replica] = log
        # Two servers behind one address take turns: what was read of a log is not read again.
        if log in self._next:
            return
        # What the first answer holds was noted for somebody else's recording.
        self._next[log] = one["next"] if is_first else 0
        self.num_restarts += 0 if is_first else 1
        origin_s = one["now_s"] - now_s
        near = (known for known in self._origins_s.values() if abs(known - origin_s) < SAME_CLOCK_S)
        self._origins_s[log] = next(near, origin_s)


class Poll:
    """Asks once at each call, and bears with a server that does not answer for a while."""

    def __init__(
        self,
        ask: Callable[[str], Sequence[dict[str, Any]]],
        collected: Collected,
        clock: Callable[[], float],
    ) -> None:
        self._ask, self._collected, self._clock = ask, collected, clock
        self._start_s = clock()
        self._failing_since_s: float | None = None

    def __call__(self) -> None:
        """Errors: `RecordError` after `GIVE_UP_S` without an answer; the first one must come."""
        try:
            if not self._take():
                typer.echo("warning: the server was restarted; recording goes on", err=True)
                self._take()
        except ServerRouteError as error:
            self._bear(error)
        else:
            self._failing_since_s = None

    def _take(self) -> bool:
        answers = self._ask(self._collected.after)
        return self._collected.take(answers, self._clock() - self._start_s)

    def _bear(self, error: ServerRouteError) -> None:
        if not self._collected.has_begun:
            raise error
        now_s = self._clock()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if now_s - self._failing_since_s >= GIVE_UP_S:
            raise RecordError(
                f"no answer for {now_s - self._failing_since_s:.0f} s; "
                f"{self._collected.file.kept}. The last error: {error}"
            ) from error
        typer.echo(f"warning: {error}; asking again", err=True)


def _report(collected: Collected, file: RecordingFile) -> None:
    if not file.num_rows:
        raise RecordError("no request ended while recording; nothing was written")
    if collected.num_restarts:
        typer.echo(
            f"warning: the server was restarted {collected.num_restarts} times; what ended "
            "between its last answer and its stop is missing, and no prompt from before shares "
            "hashes with one from after",
            err=True,
        )
    if collected.num_lost:
        typer.echo(f"warning: {collected.num_lost} requests ended that were not kept", err=True)
    typer.echo(f"{file.num_rows} requests written to {file.path}", err=True)


def _append(file: FileIO, data: bytes) -> None:
    """All of it or, when there is no room for it, nothing."""
    end, left = file.seek(0, SEEK_END), memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(end)
        raise


def _ticks(
    seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[float]:
    """Seconds left, at the start, every `POLL_S` and at the end; an interrupt ends it early."""
    yield seconds
    end_s = clock() + seconds  # from the first answer on, however long that took
    while (left_s := end_s - clock()) > 0:
        try:
            sleep(min(POLL_S, left_s))
        except KeyboardInterrupt:
            end_s = clock()
        yield max(0.0, end_s - clock())
