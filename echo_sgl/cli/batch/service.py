"""`echo-sgl batch submit|list|status|watch|...`: jobs that the server works on by itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_sgl.cli.text import batch_id, utf_8
from echo_sgl.errors import EchoError

if TYPE_CHECKING:
    from echo_sgl.batches.lines.journal import JournalPaths
    from echo_sgl.cli.batch.client import BatchClient

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
Url = Annotated[str, typer.Option(help="Where the server listens.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--api-key", help="Sent as bearer token.", envvar=["ECHO_SGL_API_KEY", "OPENAI_API_KEY"]
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
BatchId = Annotated[
    str, typer.Argument(help="The id that submit printed: batch_...", callback=batch_id)
]
Every = Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, max=86_400)]
# Characters; a terminal breaks what is too long for it, where a table would cut ids to fit.
TABLE_WIDTH = 1000
DEFAULT_URL = "http://127.0.0.1:30000"


class JobError(EchoError, ValueError):
    """The job file or the options do not fit."""


def submit(
    jobs: Annotated[Path, typer.Argument(help="One request a line, all for the same endpoint.")],
    url: Url = DEFAULT_URL,
    window: Annotated[
        str, typer.Option(help="Time to finish in: 24h, on echo-sgl's servers 1h to 24h.")
    ] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE to keep with the batch; may be repeated.")
    ] = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Upload a job file and let the server work through it; prints the batch's id.

    Example:

        echo-sgl batch submit jobs.jsonl --url http://127.0.0.1:30000 --window 6h
    """
    window = utf_8("--window", window)
    pairs = dict(_pair(item) for item in metadata or [])
    with connected(url, api_key) as client:
        batch = client.submit(jobs, endpoint=endpoint_of(jobs), window=window, metadata=pairs)
    _show(batch, as_json, batch["id"])


def list_(
    url: Url = DEFAULT_URL,
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=100)] = 20,
    after: Annotated[
        str | None, typer.Option(help="Go on behind the batch of this id.", callback=batch_id)
    ] = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List batches, newest first.

    Example:

        echo-sgl batch list --url http://127.0.0.1:30000
    """
    from rich.console import Console

    from echo_sgl.cli.batch.view import batch_table

    with connected(url, api_key) as client:
        page = client.list(limit, after)
    if as_json:
        _show(page, as_json, "")
        return
    Console(width=TABLE_WIDTH, soft_wrap=True).print(batch_table(page["data"]))


def status(
    batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False
) -> None:
    """Show one batch: state, lines, tokens, and what is wrong with its file.

    Example:

        echo-sgl batch status batch_0123456789abcdef0123456789abcdef
    """
    from echo_sgl.cli.batch.view import summary

    with connected(url, api_key) as client:
        batch = client.get(batch_id)
    _show(batch, as_json, summary(batch))


def watch(
    batch_id: BatchId,
    url: Url = DEFAULT_URL,
    every: Every = 2.0,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show progress, rate, time left and hit ratio until the batch has ended.

    Example:

        echo-sgl batch watch batch_0123456789abcdef0123456789abcdef

    Exit code: 0 when it completed, 1 when lines of it failed, or it failed as a whole, expired or
    was cancelled. Ctrl-C only ends the watching.
    """
    from echo_sgl.cli.batch.view import is_well

    with connected(url, api_key) as client:
        batch = watch_batch(client, batch_id, every, as_json=as_json)
    if not is_well(batch):
        raise typer.Exit(EXIT_FAILED)


def cancel(
    batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False
) -> None:
    """End a batch; what is answered is kept, and retry goes on with the rest.

    Example:

        echo-sgl batch cancel batch_0123456789abcdef0123456789abcdef
    """
    _act("cancel", batch_id, url, api_key, as_json)


def retry(
    batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False
) -> None:
    """Do the lines again that failed, expired or were cancelled (echo-sgl's servers).

    Example:

        echo-sgl batch retry batch_0123456789abcdef0123456789abcdef
    """
    _act("retry", batch_id, url, api_key, as_json)


def pause(
    batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False
) -> None:
    """Send no more lines for now; its window goes on (echo-sgl's servers).

    Example:

        echo-sgl batch pause batch_0123456789abcdef0123456789abcdef
    """
    _act("pause", batch_id, url, api_key, as_json)


def resume(
    batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False
) -> None:
    """Go on with a paused batch (echo-sgl's servers).

    Example:

        echo-sgl batch resume batch_0123456789abcdef0123456789abcdef
    """
    _act("resume", batch_id, url, api_key, as_json)


def results(
    batch_id: BatchId,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where answers go.")],
    errors: Annotated[
        Path | None, typer.Option(help="Where failed lines go.  [default: OUTPUT.errors.jsonl]")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Download what a batch that has ended answered, and what failed.

    Example:

        echo-sgl batch results batch_0123456789abcdef0123456789abcdef --output out.jsonl
    """
    from echo_sgl.cli.batch.client import ENDED
    from echo_sgl.cli.batch.view import counts_of, summary

    paths = result_paths(output, errors)
    with connected(url, api_key) as client:
        batch = client.get(batch_id)
        if batch["status"] not in ENDED:
            raise JobError(
                f"{batch_id} is {batch['status']}; wait for its end with: echo-sgl batch watch "
                f"{batch_id} --url {url}"
            )
        if batch["status"] == "failed":
            raise JobError(f"there are no results: {summary(batch)}")
        download(client, batch, paths.output, paths.errors)
    counts = counts_of(batch)
    _show(batch, as_json, f"{counts['completed']} answered, {counts['failed']} failed")


@contextmanager
def connected(url: str, api_key: str | None) -> Iterator[BatchClient]:
    """A client for the block."""
    from echo_sgl.cli.batch.client import BatchClient
    from echo_sgl.cli.url import server_root

    client = BatchClient(server_root(url), api_key)
    try:
        yield client
    finally:
        client.close()


def watch_batch(
    client: BatchClient, batch_id: str, every_s: float, *, as_json: bool = False
) -> dict[str, Any]:
    """Show a batch's progress until it has ended; then its last state."""
    from rich.console import Console

    from echo_sgl.cli.batch.client import wait_ended
    from echo_sgl.cli.batch.view import Progress

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    progress = Progress()
    last = ""

    def show(batch: dict[str, Any]) -> None:
        nonlocal last
        line = progress.line(batch, time.time())
        if as_json:
            _print_json(batch)
        elif console.is_terminal:
            live.update(line)
        elif line != last:
            console.print(f"echo-sgl: {line}", markup=False)
        last = line

    def say(message: str) -> None:
        console.print(f"echo-sgl: {message}", markup=False)

    with console.status("looking") as live:
        return wait_ended(client, batch_id, every_s, show, say)


def download(client: BatchClient, batch: dict[str, Any], output: Path, errors: Path) -> None:
    """Write both files; one that the batch does not have is left away, or emptied."""
    client.download(batch.get("output_file_id"), output)
    if batch.get("error_file_id") or os.path.exists(errors):
        client.download(batch.get("error_file_id"), errors)


def result_paths(output: Path, errors: Path | None) -> JournalPaths:
    """Where a batch's answers and its failed lines go.

    Errors: `JobError` when one of them is a folder, `JournalError` when both are the same file.
    """
    from echo_sgl.batches.lines.journal import JournalPaths

    for option, path in (("--output", output), ("--errors", errors)):
        if path is not None and os.path.isdir(path):
            raise JobError(f"{option} is {path}, which is a folder; name a file in it")
    return JournalPaths.beside(output, errors)


def endpoint_of(jobs: Path) -> str:
    """The `url` of a job file's first line: all lines of a batch go to one endpoint.

    Errors: `JobError` when the file cannot be read or its first line is no request, `JobFileError`
    when it is a pipe or holds no lines.
    """
    from echo_sgl.batches.lines.job_file import no_lines, open_job_file
    from echo_sgl.batches.lines.job_line import LineError, parse_line

    try:
        with open_job_file(jobs) as file:
            lines = (line.removeprefix(b"\xef\xbb\xbf") for line in file)
            first = next((line for line in lines if line.strip()), None)
        if first is None:
            raise no_lines(jobs)
        return parse_line(first.rstrip(b"\r\n")).url
    except OSError as error:
        raise JobError(f"job file {jobs} cannot be read: {error.strerror}") from error
    except LineError as error:
        raise JobError(f"{jobs}, first line: {error}") from error


def _act(action: str, batch_id: str, url: str, api_key: str | None, as_json: bool) -> None:
    with connected(url, api_key) as client:
        batch = client.act(batch_id, action)
    paused = " (paused)" if batch.get("paused_at") else ""
    _show(batch, as_json, f"{batch_id} is {batch['status']}{paused}")


def _pair(item: str) -> tuple[str, str]:
    key, separator, value = utf_8("--metadata", item).partition("=")
    if not separator or not key:
        raise JobError(f"--metadata is {item!r}; write it as KEY=VALUE")
    return key, value


def _show(document: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        _print_json(document)
    else:
        typer.echo(text)


def _print_json(document: dict[str, Any]) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(document).decode() + "\n")
    sys.stdout.flush()
