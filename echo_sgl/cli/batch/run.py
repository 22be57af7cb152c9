"""One `batch run`: check the file, find the servers, open the journal, send, sum up."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.console import Console
from rich.text import Text

from echo_sgl.batches.lines.job_file import (
    Entry,
    JobFile,
    JobFileError,
    LineProblem,
    LineReader,
    check_job_file,
)
from echo_sgl.batches.lines.journal import Journal, JournalError, JournalPaths, in_utf_8
from echo_sgl.cli.batch.sender import Sender, SendOptions
from echo_sgl.cli.batch.service import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, result_paths
from echo_sgl.cli.batch.tally import Display, Tally
from echo_sgl.cli.connection import LOST, Connection, first_of, open_client

MAX_SHOWN_PROBLEMS = 50


class InvalidLinesError(JobFileError):
    """Some lines are not valid and nothing was sent."""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """What the user asked for."""

    jobs: Path
    output: Path
    errors: Path | None
    urls: Sequence[str]
    api_key: str | None
    options: SendOptions
    skip_invalid: bool
    overwrite: bool
    in_prefix_order: bool
    as_json: bool

    @property
    def journal_paths(self) -> JournalPaths:
        """Errors: those of `result_paths`, `JournalError` also when one is the job file."""
        paths = result_paths(self.output, self.errors)
        for path in (paths.output, paths.errors, paths.state):
            if path.resolve() == self.jobs.resolve():
                raise JournalError(f"{path} is the job file itself; choose another --output")
        return paths

    @property
    def again(self) -> str:
        """How to go on with a run that was interrupted."""
        with_what = " without --overwrite" if self.overwrite else ""
        return f"run the same command again{with_what}"


def execute(plan: BatchRun) -> int:
    """Run to the end or until interrupted; the exit code, which lines of earlier runs count for."""
    paths = plan.journal_paths
    with Console(stderr=True).status(Text(f"checking {plan.jobs}")):
        job = check_job_file(plan.jobs)
    tally = Tally(job.num_lines)
    display = Display(tally)
    try:
        asyncio.run(_run(plan, paths, job, display))
        exit_code = EXIT_FAILED if paths.errors.stat().st_size else EXIT_OK
    except (KeyboardInterrupt, asyncio.CancelledError):
        exit_code = EXIT_INTERRUPTED
    _sum_up(plan, paths, display, is_interrupted=exit_code == EXIT_INTERRUPTED)
    return exit_code


async def _run(plan: BatchRun, paths: JournalPaths, job: JobFile, display: Display) -> None:
    this_task = asyncio.current_task()
    assert this_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    rng = random.Random()  # jitter only: two runs must not ask in step
    async with contextlib.AsyncExitStack() as stack:
        clients = [open_client(url, plan.api_key, plan.options.window) for url in plan.urls]
        for client in clients:
            await stack.enter_async_context(client)
        connections = [Connection(client, say=display.say, rng=rng) for client in clients]
        job = await _check_models(plan, job, connections)
        _report_problems(plan, job, display)
        models = sorted({entry.model for entry in job.entries})
        for connection in connections:
            connection.needed_models = models
        journal = Journal(paths, job.sha256, overwrite=plan.overwrite)
        reader = LineReader(plan.jobs)
        try:
            sender = Sender(
                connections, reader, journal, options=plan.options, display=display, rng=rng
            )
            entries = _entries_left(plan, job, journal)
            display.tally.skipped = len(job.problems)
            display.tally.already_done = len(job.entries) - len(entries)
            with display.running():
                await sender.run(entries)
        finally:
            reader.close()
            journal.close()


async def _check_models(plan: BatchRun, job: JobFile, connections: Sequence[Connection]) -> JobFile:
    """Find lines with a model that the servers lack; a job that is refused anyway never waits."""
    if not job.problems or plan.skip_invalid:
        waits = [connection.wait_models() for connection in connections]
        return job.restrict_models(await first_of(waits))
    for connection in connections:
        with contextlib.suppress(*LOST):
            return job.restrict_models(await connection.models())
    return job


def _report_problems(plan: BatchRun, job: JobFile, display: Display) -> None:
    for problem in job.problems[:MAX_SHOWN_PROBLEMS]:
        display.say(_shown(plan.jobs, problem))
    num_more = len(job.problems) - MAX_SHOWN_PROBLEMS
    if num_more > 0:
        display.say(f"... and {num_more} more lines that are not valid")
    counts = f"{len(job.problems)} of {job.num_lines} lines of {plan.jobs} are not valid"
    if job.problems and (not plan.skip_invalid or not job.entries):
        way_out = (
            "Mend them, or carry on without them: --skip-invalid" if job.entries else "Mend them"
        )
        raise InvalidLinesError(f"{counts}; nothing was sent. {way_out}")
    if job.problems:
        display.say(f"{counts}; carrying on without them")


def _shown(path: Path, problem: LineProblem) -> str:
    return f"{path}:{problem.line_number}: {problem.message} [{problem.code}]"


def _entries_left(plan: BatchRun, job: JobFile, journal: Journal) -> Sequence[Entry]:
    entries = job.in_prefix_order() if plan.in_prefix_order else job.entries
    return [entry for entry in entries if entry.custom_id not in journal.finished]


def _sum_up(plan: BatchRun, paths: JournalPaths, display: Display, *, is_interrupted: bool) -> None:
    tally = display.tally
    if plan.as_json:
        document = tally.as_json() | {
            "output": in_utf_8(paths.output),
            "errors": in_utf_8(paths.errors),
            "interrupted": is_interrupted,
        }
        sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
    counts = [f"{tally.ok} answered", f"{tally.failed} failed"]
    counts += [f"{tally.already_done} done before"] if tally.already_done else []
    counts += [f"{tally.skipped} not valid"] if tally.skipped else []
    counts += [f"{tally.left} left"] if tally.left else []
    display.say(f"{', '.join(counts)} of {tally.lines} lines in {tally.seconds:.1f} s")
    display.say(tally.status())
    if len(plan.urls) > 1:
        parts = [f"{count} lines by {url}" for url, count in sorted(tally.by_server.items())]
        display.say(", ".join(parts) or "no line was sent")
    if tally.failed:
        display.say(f"the failed lines and their reasons are in {paths.errors}")
    if tally.ok and tally.hit_ratio is None:
        display.say("hits are unknown: start the server with --enable-cache-report to see them")
    if is_interrupted:
        display.say(f"interrupted; {plan.again} to do the lines that are left")
