"""`batch run` on a server with a batch service: hand the file over, watch, fetch the results."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from rich.console import Console
from rich.text import Text

from echo_sgl.batches.lines.job_file import JobFile, check_job_file
from echo_sgl.batches.lines.journal import JournalError, in_utf_8
from echo_sgl.cli.batch.client import (
    ENDED,
    TOO_MANY,
    AwayError,
    BatchClient,
    BatchServiceError,
    GoneError,
    OutputError,
    check_writable,
)
from echo_sgl.cli.batch.service import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    download,
    watch_batch,
)
from echo_sgl.cli.batch.view import cached_share, counts_of, hit_ratio, is_well, num_done, summary

if TYPE_CHECKING:
    from echo_sgl.cli.batch.run import BatchRun

EVERY_S = 1.0
CONFLICT = 409
_RETRIED = ("cancelled", "expired")
# The batch of a run is found again by this, however the run ended.
RUN_KEY = "echo_sgl_run"
MAX_PAUSE_S = 60.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EBADF)  # EBADF: NFS, which wants to write
NEWEST = 100  # of the batches on a page: one that was made just now is among them
T = TypeVar("T")


def hand_over(plan: BatchRun) -> int | None:
    """The exit code; None when the lines must be sent from here, as to several servers."""
    if len(plan.urls) > 1:
        return None
    with _ended_by_sigterm():
        return _hand_over(plan)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM is an interruption like Ctrl-C's, as where lines are sent from here."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _hand_over(plan: BatchRun) -> int | None:
    client = BatchClient(plan.urls[0], plan.api_key)
    try:
        if os.path.exists(plan.journal_paths.state):  # a folder that is closed holds none
            return None
        if (has_service := _has_service(client)) is False:
            return None
        with Console(stderr=True).status(Text(f"checking {plan.jobs}")):
            job = check_job_file(plan.jobs)
        endpoints = {entry.url for entry in job.entries}
        if job.problems or len(endpoints) != 1:
            return None
        if not (has_service or _wait_service(client)):
            return None
        return _run(plan, client, job, endpoints.pop())
    except KeyboardInterrupt:
        if plan.as_json:
            _print_document(plan, {}, is_interrupted=True)
        return EXIT_INTERRUPTED
    finally:
        client.close()


def _has_service(client: BatchClient) -> bool | None:
    """Whether the server takes batches; None: it is away."""
    with contextlib.suppress(AwayError):
        return client.has_service()
    return None


def _wait_service(client: BatchClient) -> bool:
    """The same, waiting for as long as the server is away.

    An earlier run may have handed the job over: were its lines sent from here, all of them would
    be computed twice once the server is back.
    """
    return _once_back(client, client.has_service)


def _once_back(client: BatchClient, call: Callable[[], T]) -> T:
    """What a call gives once the server is there, and not full; meanwhile it comes again.

    Errors: `AwayError` where the server has no room and does not expect any.
    """
    is_told = False
    while True:
        try:
            return call()
        except AwayError as error:
            if error.status_code == TOO_MANY and error.retry_after_s is None:
                raise
            if not is_told:
                _console().print(f"echo-sgl: {_why_waiting(client, error)}")
            is_told, pause_s = True, min(error.retry_after_s or 0.0, MAX_PAUSE_S)
        time.sleep(max(EVERY_S, pause_s))


def _why_waiting(client: BatchClient, error: AwayError) -> str:
    if error.status_code == TOO_MANY:
        return f"{error}; waiting"
    reason = error.status_code or type(error.__cause__).__name__
    return f"no server is ready at {client.url} ({reason}); waiting for it"


def _console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def _submitted(plan: BatchRun, client: BatchClient, endpoint: str, run_id: str) -> dict[str, Any]:
    """A new batch; it is not made twice when an answer is lost."""
    file_id = _once_back(client, lambda: client.upload(plan.jobs))

    def create() -> dict[str, Any]:
        for batch in client.list(NEWEST)["data"]:
            if batch.get("input_file_id") == file_id:
                return dict(batch)
        return client.create(file_id, endpoint=endpoint, window="24h", metadata={RUN_KEY: run_id})

    try:
        return _once_back(client, create)
    except (BatchServiceError, KeyboardInterrupt):
        client.forget(file_id)  # which is refused where a batch was made of it after all
        raise


def _run(plan: BatchRun, client: BatchClient, job: JobFile, endpoint: str) -> int:
    paths = plan.journal_paths
    for path in (paths.output, paths.errors):
        check_writable(path)
    with _alone(plan):
        batch = _begun(plan, client, job, endpoint)
    try:
        batch = watch_batch(client, batch["id"], EVERY_S)
        if batch["status"] != "failed":
            _fetch(plan, client, batch)
    except KeyboardInterrupt:
        _console().print(f"echo-sgl: {_how_to_go_on(plan, client, batch)}")
        if plan.as_json:
            _print_document(plan, _last_look(client, batch), is_interrupted=True)
        return EXIT_INTERRUPTED
    _sum_up(plan, batch)
    return EXIT_OK if is_well(batch) or _is_answered(batch) else EXIT_FAILED


@contextlib.contextmanager
def _alone(plan: BatchRun) -> Iterator[None]:
    """Runs of one job file begin one after the other: the second finds the batch of the first.

    The lock is on the job file itself and leaves nothing behind. File systems without locks have
    none: two runs that begin at once make two batches there.
    """
    with plan.jobs.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _console().print(f"echo-sgl: another run hands {plan.jobs} over; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def _begun(plan: BatchRun, client: BatchClient, job: JobFile, endpoint: str) -> dict[str, Any]:
    """The batch that does the job: an earlier run's, or a new one."""
    name = f"{job.sha256}:{plan.output.absolute()}"
    run_id = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    batch = _find(plan, client, run_id)
    if batch is not None:
        _console().print(f"echo-sgl: going on with {batch['id']}")
        return batch
    batch = _submitted(plan, client, endpoint, run_id)
    _console().print(f"echo-sgl: {batch['id']} is submitted; the server works on by itself")
    return batch


def _how_to_go_on(plan: BatchRun, client: BatchClient, batch: dict[str, Any]) -> str:
    if batch.get("status") in ENDED:
        return f"{batch['id']} has ended; {plan.again} to fetch its results"
    return (
        f"{batch['id']} goes on; {plan.again} to fetch its results, or end it with: "
        f"echo-sgl batch cancel {batch['id']} --url {client.url}"
    )


def _last_look(client: BatchClient, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as it is now; as it was where the server does not say, or Ctrl-C comes again."""
    with contextlib.suppress(BatchServiceError, KeyboardInterrupt):
        return client.get(batch["id"])
    return batch


def _fetch(plan: BatchRun, client: BatchClient, batch: dict[str, Any]) -> None:
    """Errors: `OutputError`, which says how to get at the answers all the same."""
    paths = plan.journal_paths
    try:
        download(client, batch, paths.output, paths.errors)
    except GoneError as error:
        raise OutputError(f"{error}: run the same command with --overwrite") from error
    except (OutputError, BatchServiceError) as error:
        raise OutputError(
            f"{error}. The answers stay on the server; fetch them with: "
            f"echo-sgl batch results {batch['id']} -o OUTPUT --url {client.url}"
        ) from error


def _find(plan: BatchRun, client: BatchClient, run_id: str) -> dict[str, Any] | None:
    """The batch that an earlier run of the same command made, going again if it was ended.

    Errors: `JournalError` when there is none, but the output holds something.
    """
    if plan.overwrite:
        return None
    batch = client.find(RUN_KEY, run_id)
    if batch is None or batch["status"] == "failed":
        for path in (plan.journal_paths.output, plan.journal_paths.errors):
            if path.exists() and path.stat().st_size:
                raise JournalError(
                    f"{path} holds data of something else. Choose another --output, or throw its "
                    "content away with --overwrite"
                )
        return None
    if batch["status"] in _RETRIED and not _is_answered(batch):
        return _retried(client, batch["id"])
    return batch


def _is_answered(batch: dict[str, Any]) -> bool:
    """Whether every line has its answer, however the batch ended."""
    counts = counts_of(batch)
    return counts["completed"] == counts["total"] > 0


def _retried(client: BatchClient, batch_id: str) -> dict[str, Any] | None:
    """The batch, going again; None when its file was never checked or is gone."""
    try:
        return client.act(batch_id, "retry")
    except BatchServiceError as error:
        if error.status_code != CONFLICT:
            raise
    batch = client.get(batch_id)  # somebody else may have been quicker
    return None if batch["status"] in _RETRIED else batch


def _sum_up(plan: BatchRun, batch: dict[str, Any]) -> None:
    if plan.as_json:
        _print_document(plan, batch, is_interrupted=False)
    console, counts = _console(), counts_of(batch)
    if batch["status"] == "failed":
        console.print(summary(batch))
        return
    console.print(
        f"echo-sgl: {counts['completed']} answered, {counts['failed']} failed of "
        f"{counts['total']} lines; hits {hit_ratio(batch)}"
    )
    if counts["failed"]:
        errors = plan.journal_paths.errors
        console.print(f"echo-sgl: the failed lines and their reasons are in {errors}")


def _print_document(plan: BatchRun, batch: dict[str, Any], *, is_interrupted: bool) -> None:
    """What became of the run, for scripts; null is what is not known, as without a batch (`{}`)."""
    counts, usage = counts_of(batch) if batch else {}, batch.get("usage") or {}
    document = {
        "batch_id": batch.get("id"),
        "status": batch.get("status"),
        "problems": (batch.get("errors") or {}).get("data") or [],
        "lines": counts.get("total"),
        "ok": counts.get("completed"),
        "failed": counts.get("failed"),
        "left": counts["total"] - num_done(batch) if counts else None,
        "prompt_tokens": usage.get("input_tokens", 0),
        "generated_tokens": usage.get("output_tokens", 0),
        "cached_tokens": (usage.get("input_tokens_details") or {}).get("cached_tokens"),
        "hit_ratio": cached_share(batch),
        "output": in_utf_8(plan.journal_paths.output),
        "errors": in_utf_8(plan.journal_paths.errors),
        "interrupted": is_interrupted,
    }
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
