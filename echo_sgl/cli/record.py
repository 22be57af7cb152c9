"""`echo-sgl record`: a trace of a live server's requests, without what was in them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from echo_sgl.errors import EchoError

POLL_S = 5.0
FORMAT_VERSION = 1


class RecordError(EchoError, OSError):
    """Nothing was recorded, or it cannot be written where it should."""


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
    requests begin alike in this recording and nothing else. Ctrl-C ends it early.
    """
    from echo_sgl.cli.server_route import fetch
    from echo_sgl.cli.url import server_root

    if not output.parent.is_dir():
        raise RecordError(f"--output {output} is in a folder that does not exist")
    if ".jsonl" not in output.suffixes:
        raise RecordError(f"--output is {output}; name it .jsonl, as recording.jsonl")
    root, recording = server_root(url), secrets.token_hex(16)

    def ask(after: str) -> list[dict[str, Any]]:
        answer = fetch(root, "/echo/recording", api_key, recording=recording, after=after)
        replicas: list[dict[str, Any]] = answer["replicas"]
        return replicas

    collected = Collected()
    for left_s in _ticks(seconds, time.monotonic, time.sleep):
        collected.take(ask(collected.after))
        typer.echo(f"{len(collected.rows)} requests, {left_s:.0f} s left", err=True)
    if not collected.rows:
        raise RecordError("no request ended while recording; nothing was written")
    try:
        output.write_text("".join(collected.lines()), encoding="utf-8")
    except OSError as error:
        raise RecordError(f"--output {output} cannot be written: {error.strerror}") from error
    if collected.num_lost:
        typer.echo(f"warning: {collected.num_lost} requests ended too fast to be kept", err=True)
    typer.echo(f"{len(collected.rows)} requests written to {output}", err=True)


class Collected:
    """What the replicas have told so far."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.num_lost = 0
        self._next: dict[int, int] = {}
        self._block_tokens = 0

    @property
    def after(self) -> str:
        """The next request's number of each replica, as the route takes it."""
        return ",".join(f"{replica}:{number}" for replica, number in sorted(self._next.items()))

    def take(self, replicas: list[dict[str, Any]]) -> None:
        for one in replicas:
            is_first = one["replica"] not in self._next
            self.num_lost += 0 if is_first else one["num_lost"]
            self._next[one["replica"]] = one["next"]
            self._block_tokens = one["block_tokens"]
            # What the first answer holds was noted for somebody else's recording.
            rows = () if is_first else one["rows"]
            self.rows += [dict(zip(one["columns"], row, strict=True)) for row in rows]

    def lines(self) -> Iterator[str]:
        """The file's lines, in order of arrival; time starts with the first one."""
        head = {"format": "echo-recording", "version": FORMAT_VERSION}
        yield json.dumps({**head, "block_tokens": self._block_tokens}) + "\n"
        start_s = min(row["at_s"] for row in self.rows)
        for row in sorted(self.rows, key=lambda one: float(one["at_s"])):
            yield json.dumps({**row, "at_s": round(row["at_s"] - start_s, 6)}) + "\n"


def _ticks(
    seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[float]:
    """Seconds left, at the start, every `POLL_S` and at the end; an interrupt ends it early."""
    end_s = clock() + seconds
    yield seconds
    while (left_s := end_s - clock()) > 0:
        try:
            sleep(min(POLL_S, left_s))
        except KeyboardInterrupt:
            end_s = clock()
        yield max(0.0, end_s - clock())
