"""Kill the batch service at random moments and see what is left: `python -m eval.crash`.

Store, routes and dispatcher are the real ones; `eval.servers.stub_server` answers the lines.
Each round brings a job into one of four phases, waits a random time, ends the server with
SIGKILL, looks into the database, starts it again. Every job's output and error file must in the
end hold each of its lines exactly once, and no kill may cost more answers than the window holds.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from echo_sgl.batches.lines.job_line import COMPLETIONS_URL
from echo_sgl.batches.store.database import DATABASE_NAME
from echo_sgl.config import BatchesConfig
from eval.options import count
from eval.paths import RESULTS_DIR
from eval.servers.machine import provenance
from eval.servers.server import free_port
from eval.servers.stub_server import MODEL, serve

PHASES = ("validating", "running", "finalizing", "cancelling")
ENDED = ("failed", "completed", "expired", "cancelled")
ENDING = ("finalizing", *ENDED)
WINDOW_LINES = 32
READY_TIMEOUT_S = 600.0
END_TIMEOUT_S = 600.0


class CrashError(AssertionError):
    """A promise was broken; the message names the round and what was found."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One round: what state the database was in, and how many answers had no record yet."""

    phase: str
    state: str
    num_recorded: int
    num_lost_answers: int


@dataclass(slots=True)
class Job:
    """A batch on its way, and the prompts of its lines by custom_id."""

    batch_id: str
    prompts: dict[str, str]
    kills: list[Kill] = field(default_factory=list)
    num_blamed: int = 0  # lines that were alone at their third kill, and so fail


class Victim:
    """A stub server that is killed and started again on one state directory.

    It is forked from this process, which has everything imported: a start takes a moment.
    """

    def __init__(self, folder: Path, delay_s: float) -> None:
        self.state_dir = folder / "state"
        self.calls_path = folder / "calls.txt"
        self._log_path = folder / "server.log"
        self._delay_s = delay_s
        self.http = httpx.Client()
        self.start()

    def start(self) -> None:
        """Return when the server answers."""
        self.calls_before = self.calls()
        port = free_port()
        self.http.close()
        self.process = multiprocessing.get_context("fork").Process(target=self._serve, args=(port,))
        self.process.start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=END_TIMEOUT_S)
        wait_until(self._is_ready, READY_TIMEOUT_S, "the server is ready")

    def _serve(self, port: int) -> None:
        with self._log_path.open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        config = BatchesConfig(window_lines=WINDOW_LINES, max_uploads_per_minute=100_000)
        serve(port, self.state_dir, delay_s=self._delay_s, calls=self.calls_path, config=config)

    def _is_ready(self) -> bool:
        if not self.process.is_alive():
            raise CrashError(f"the server did not start: {self._log_path.read_text()[-2000:]}")
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/batches/{batch_id}").json()
        return found

    def calls(self) -> Counter[str]:
        """How often each prompt was answered, over all lives of the server."""
        if not self.calls_path.exists():
            return Counter()
        return Counter(self.calls_path.read_text().split("\n")[:-1])

    def wait_for_end(self, batch_id: str) -> None:
        """Return at once when the batch is being finalized, or has ended."""
        connection = sqlite3.connect(self.state_dir / DATABASE_NAME)
        with contextlib.closing(connection):
            query = "SELECT status FROM batches WHERE id = ?"
            deadline_s = time.monotonic() + END_TIMEOUT_S
            while connection.execute(query, (batch_id,)).fetchone()[0] not in ENDING:
                if time.monotonic() > deadline_s:
                    raise CrashError(f"waited {END_TIMEOUT_S:.0f} s until {batch_id} ends")

    def recorded(self, batch_id: str) -> tuple[str, set[str]]:
        """The batch's state and the names of its lines with a record, from the database."""
        connection = sqlite3.connect(self.state_dir / DATABASE_NAME)
        with contextlib.closing(connection):
            state, number = connection.execute(
                "SELECT status, number FROM batches WHERE id = ?", (batch_id,)
            ).fetchone()
            query = "SELECT custom_id FROM lines WHERE batch_number = ? AND outcome IS NOT NULL"
            return state, {row[0] for row in connection.execute(query, (number,))}


def main(argv: list[str]) -> None:
    """Run the rounds, print the table, write the results."""
    parser = argparse.ArgumentParser(prog="python -m eval.crash", description=__doc__)
    parser.add_argument("--rounds", type=count, default=200)
    parser.add_argument("--lines", type=count, default=300, help="of each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS_DIR / "crash")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        jobs = list(run(Path(folder), given.rounds, given.lines, given.seed))
    summary = summarise(jobs, given.lines)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "summary.json").write_bytes(
        orjson.dumps({**provenance(), **summary}, option=orjson.OPT_INDENT_2) + b"\n"
    )
    kills = [asdict(kill) for job in jobs for kill in job.kills]
    (given.output / "kills.jsonl").write_bytes(b"".join(orjson.dumps(k) + b"\n" for k in kills))
    (given.output / "summary.md").write_text(markdown(summary))
    print(markdown(summary))


def run(folder: Path, rounds: int, num_lines: int, seed: int) -> Iterator[Job]:
    """Kill `rounds` times; gives each job when it has ended and was found whole.

    Errors: `CrashError` when a line is lost, stands twice, or too many answers were lost.
    """
    rng = random.Random(seed)
    victim = Victim(folder, delay_s=0.01)
    job: Job | None = None
    try:
        for round_number in range(rounds):
            phase = PHASES[round_number % len(PHASES)]
            # A job that was not ended by the last rounds serves for later phases too.
            if job is None or phase == "validating":
                if job is not None:
                    yield check(victim, job)
                job = create(victim, num_lines, f"{seed}-{round_number}")
            strike(victim, job, phase, rng)
            victim.start()
            if victim.batch(job.batch_id)["status"] in ENDED:
                yield check(victim, job)
                job = None
        if job is not None:
            yield check(victim, job)
    finally:
        victim.kill()
        victim.http.close()


def create(victim: Victim, num_lines: int, name: str) -> Job:
    """Upload a job and start its batch; one line in twenty is one that fails."""
    prompts = {
        f"{name}-{index}": f"{'bad' if index % 20 == 0 else 'good'} {name} {index}"
        for index in range(num_lines)
    }
    lines = [
        orjson.dumps(
            {
                "custom_id": custom_id,
                "method": "POST",
                "url": COMPLETIONS_URL,
                "body": {"model": MODEL, "prompt": prompt},
            }
        )
        for custom_id, prompt in prompts.items()
    ]
    upload = victim.http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("job.jsonl", b"\n".join(lines))}
    )
    body = {"input_file_id": upload.json()["id"], "endpoint": COMPLETIONS_URL}
    batch = victim.http.post("/v1/batches", json={**body, "completion_window": "24h"})
    return Job(batch.json()["id"], prompts)


def strike(victim: Victim, job: Job, phase: str, rng: random.Random) -> None:
    """Bring the job into the phase, as far as it is not beyond, wait a moment, kill."""

    def reached(num_done: int) -> Callable[[], bool]:
        def holds() -> bool:
            batch = victim.batch(job.batch_id)
            counts = batch["request_counts"]
            is_done = counts["completed"] + counts["failed"] >= num_done
            return batch["status"] in ENDED or (batch["status"] != "validating" and is_done)

        return holds

    num_lines = len(job.prompts)
    if phase == "validating":
        moment_s = rng.uniform(0.0, 0.6)
    elif phase == "running":
        wait_until(reached(1), END_TIMEOUT_S, "a line is done")
        moment_s = rng.uniform(0.0, 0.15)
    elif phase == "finalizing":
        # It lasts for milliseconds: looked for in the database, and not with waits in between.
        wait_until(reached(num_lines - WINDOW_LINES), END_TIMEOUT_S, "the last lines run")
        victim.wait_for_end(job.batch_id)
        moment_s = rng.uniform(0.0, 0.005)
    else:
        wait_until(reached(1), END_TIMEOUT_S, "a line is done")
        victim.http.post(f"/v1/batches/{job.batch_id}/cancel")
        moment_s = rng.uniform(0.0, 0.03)
    time.sleep(moment_s)
    victim.kill()
    state, recorded = victim.recorded(job.batch_id)
    calls = victim.calls() - victim.calls_before  # what this life answered
    answered = {name for name, prompt in job.prompts.items() if calls[prompt]}
    lost = answered - recorded
    if len(lost) > WINDOW_LINES:
        raise CrashError(f"{len(lost)} answers were lost, the window holds {WINDOW_LINES}")
    job.kills.append(Kill(phase, state, len(recorded), len(lost)))


def check(victim: Victim, job: Job) -> Job:
    """Wait for the job's end and hold its files against its input."""
    wait_until(lambda: victim.batch(job.batch_id)["status"] in ENDED, END_TIMEOUT_S, "the job ends")
    batch = victim.batch(job.batch_id)
    names: Counter[str] = Counter()
    for file_id in (batch["output_file_id"], batch["error_file_id"]):
        if file_id:
            content = victim.http.get(f"/v1/files/{file_id}/content").content
            names.update(orjson.loads(line)["custom_id"] for line in content.splitlines())
            job.num_blamed += content.count(b'"server_crashed"')
    if names != Counter(list(job.prompts)):
        missing, extra = set(job.prompts) - set(names), names - Counter(list(job.prompts))
        raise CrashError(f"{job.batch_id}: missing {missing}, too many {dict(extra)}")
    calls = victim.calls()
    num_again = sum(max(0, calls[prompt] - 1) for prompt in job.prompts.values())
    if num_again > sum(kill.num_lost_answers for kill in job.kills):
        raise CrashError(f"{job.batch_id}: {num_again} lines were computed again")
    return job


def summarise(jobs: list[Job], num_lines: int) -> dict[str, Any]:
    """Counts by phase."""
    rows = {}
    for phase in PHASES:
        kills = [kill for job in jobs for kill in job.kills if kill.phase == phase]
        states = Counter(kill.state for kill in kills)
        lost = sorted(kill.num_lost_answers for kill in kills)
        rows[phase] = {
            "kills": len(kills),
            "state_after_kill": dict(states.most_common()),
            "answers_to_repeat_median": lost[len(lost) // 2] if lost else 0,
            "answers_to_repeat_max": max(lost, default=0),
        }
    return {
        "jobs": len(jobs),
        "lines_per_job": num_lines,
        "window_lines": WINDOW_LINES,
        "lines_missing": 0,  # `check` ends the run otherwise
        "lines_twice": 0,
        "lines_blamed": sum(job.num_blamed for job in jobs),
        "phases": rows,
    }


def markdown(summary: dict[str, Any]) -> str:
    """The table for people."""
    head = (
        f"# Killed with SIGKILL\n\n{summary['jobs']} jobs of {summary['lines_per_job']} lines; in "
        f"all of them output and error file together held every line exactly once.\nThe window "
        f"was {summary['window_lines']} lines: no more answers may be lost to a kill. "
        f"{summary['lines_blamed']} lines were alone in the engine\nat their third kill and so "
        "were taken for its cause (`server_crashed`).\n\n"
        "| phase aimed at | kills | state found in the database | answers lost, median | max |\n"
        "|---|---|---|---|---|\n"
    )
    rows = []
    for phase, row in summary["phases"].items():
        states = ", ".join(f"{state} {count}" for state, count in row["state_after_kill"].items())
        rows.append(
            f"| {phase} | {row['kills']} | {states} | {row['answers_to_repeat_median']} | "
            f"{row['answers_to_repeat_max']} |\n"
        )
    return head + "".join(rows)


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Errors: `CrashError` when it does not hold within the limit."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise CrashError(f"waited {limit_s:.0f} s until {what}")
        time.sleep(0.005)


if __name__ == "__main__":
    main(sys.argv[1:])
