"""One job on one server and on two, one of which may die half way: `python -m eval.two_servers`.

The arms hand the job to the batch service (one server, then two that share PostgreSQL) or send its
lines from `batch run` with one or two `--url`. Every arm starts on empty caches; afterwards output
and error file must hold each line of the job exactly once. On one machine two servers share its
cores, so what this shows is sharing, takeover and hits, not twice the speed.

With `--router PYTHON`, an interpreter that has SGLang's router (package sglang-router; it wants an
environment of its own), one arm more sends the lines through it.

Where one server works alone, the CPU time of its HTTP process says what the batch service costs:
the same lines go through it, by the dispatcher or by a client of its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from echo_sgl.configs import __path__ as config_dirs
from eval.corun.phases import empty_cache
from eval.demo.run import DEMO_MODEL_ARGS
from eval.options import count
from eval.paths import LOGS_DIR, RESULTS_DIR
from eval.servers.machine import device_args, provenance
from eval.servers.models import demo_model
from eval.servers.postgres import MISSING, binaries, running_postgres
from eval.servers.router import probe, running_router, version_of
from eval.servers.server import LOCAL, Server, start_server, stop_server, wait_ready
from eval.two_servers.report import markdown
from eval.workloads.jobs import write_job
from eval.workloads.prompts import load_tokenizer
from eval.workloads.stdlib_job import StdlibJob

SERVED_MODEL = "echo-demo"
WINDOW_LINES = 32
# One thread each, or two servers would take each other's core; an idle one must not poll.
ENV = {"OMP_NUM_THREADS": "1"}
NAMED = ("--served-model-name", SERVED_MODEL, "--enable-cache-report", "--enable-metrics")
SERVER_ARGS = (*NAMED, "--sleep-on-idle", *DEMO_MODEL_ARGS)
LIMIT_S = 900.0


class FleetError(AssertionError):
    """A promise was broken; the message says what was found."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How the job is handed over, to how many servers, and whether the second is killed."""

    name: str
    num_servers: int
    by_url: bool
    is_killed: bool = False


ARMS = (
    Arm("one, batch service", 1, by_url=False),
    Arm("one, `--url`", 1, by_url=True),
    Arm("two, PostgreSQL", 2, by_url=False),
    Arm("two, `--url` twice", 2, by_url=True),
)
KILLED_ARMS = (
    Arm("two, `--url` twice, one killed", 2, by_url=True, is_killed=True),
    Arm("two, PostgreSQL, one killed", 2, by_url=False, is_killed=True),
)


ROUTED = Arm("two, sglang-router", 2, by_url=True)


class Fleet:
    """Servers on one PostgreSQL, started when an arm needs them and again after a kill."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self._folder = folder
        self._config = folder / "echo.toml"
        preset = (Path(config_dirs[0]) / "echo.toml").read_text(encoding="utf-8")
        given = f"window_lines = {WINDOW_LINES} "
        self._config.write_text(preset.replace("window_lines = 256", given), encoding="utf-8")
        self._database_url = database_url
        self._servers: list[Server] = []

    def ready(self, num_servers: int) -> list[Server]:
        """So many running servers with empty caches."""
        for index in range(num_servers):
            if index == len(self._servers):
                self._servers.append(self._start(index))
            elif self._servers[index].process.poll() is not None:
                stop_server(self._servers[index])  # what it left behind
                self._servers[index] = self._start(index)
        servers = self._servers[:num_servers]
        for server in servers:
            empty_cache(server)
        return servers

    def stop(self) -> None:
        for server in self._servers:
            stop_server(server)

    def _start(self, index: int) -> Server:
        print(f"starting server {index + 1}", file=sys.stderr)
        state = ("--echo-state-dir", str(self._folder / f"state-{index}"))
        args = (*device_args(), *SERVER_ARGS, *state, "--echo-database-url", self._database_url)
        log_path = LOGS_DIR / f"two-servers-{index}.log"
        model = demo_model("small")
        server = start_server(model, args, config=self._config, env=ENV, log_path=log_path)
        try:
            wait_ready(server)
            warm_up(server)
        except BaseException:
            stop_server(server)
            raise
        return server


def main(argv: list[str]) -> None:
    """Run the arms, write and print the results."""
    parser = argparse.ArgumentParser(prog="python -m eval.two_servers", description=__doc__)
    parser.add_argument("--documents", type=count, default=12)
    parser.add_argument("--questions", type=count, default=20, help="about each document")
    parser.add_argument("--router", type=Path, metavar="PYTHON")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR / "two-servers")
    given = parser.parse_args(argv)
    folder_of_postgres = binaries()
    if folder_of_postgres is None:
        sys.exit(f"error: {MISSING}")
    with tempfile.TemporaryDirectory() as name, running_postgres(folder_of_postgres) as url:
        folder = Path(name)
        names = make_job(folder / "jobs.jsonl", given.documents, given.questions)
        fleet = Fleet(folder, url)
        try:
            rows = [run_arm(fleet, arm, folder, names) for arm in ARMS]
            routed = run_routed(fleet, given.router, folder, names) if given.router else {}
            rows += [routed.pop("row")] if routed else []
            rows += [run_arm(fleet, arm, folder, names) for arm in KILLED_ARMS]
        finally:
            fleet.stop()
    summary = {**provenance(), "lines": len(names), "window_lines": WINDOW_LINES, "arms": rows}
    summary |= {"router": routed or None}
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "summary.json").write_bytes(
        orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n"
    )
    (given.output / "summary.md").write_text(markdown(summary), encoding="utf-8")
    print(markdown(summary))


def make_job(path: Path, num_documents: int, num_questions: int) -> list[str]:
    """Write the job file; the names of its lines."""
    job = StdlibJob(
        SERVED_MODEL, num_documents=num_documents, questions_per_document=num_questions
    ).lines(load_tokenizer(str(demo_model("small"))))
    write_job(path, job)
    return [str(line["custom_id"]) for line in job]


def run_routed(fleet: Fleet, python: Path, folder: Path, names: list[str]) -> dict[str, Any]:
    """The job through the router, and what else passes it."""
    urls = [server.url for server in fleet.ready(ROUTED.num_servers)]
    with running_router(python, urls, LOGS_DIR / "two-servers-router.log") as url:
        row = run_arm(fleet, ROUTED, folder, names, router_url=url)
        return {"version": version_of(python), "row": row, **probe(url, SERVED_MODEL)}


def run_arm(
    fleet: Fleet, arm: Arm, folder: Path, names: list[str], router_url: str | None = None
) -> dict[str, Any]:
    """One run of the job; its figures.

    Errors: `FleetError` when a line is missing, failed, or stands twice.
    """
    servers = fleet.ready(arm.num_servers)
    print(arm.name, file=sys.stderr)
    before = [answered(server) for server in servers]
    cpu_before_s = cpu_s(servers[0].process.pid)
    output = folder / f"{arm.name.replace(' ', '-').replace('`', '')}.jsonl"
    start_s = time.monotonic()
    urls = [server.url for server in servers[: None if arm.by_url else 1]]
    command = _command(arm, [router_url] if router_url else urls, folder, output)
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    at_kill: list[float] = []
    try:
        if arm.is_killed:
            wait_until(lambda: num_done(arm, servers[0], output) >= len(names) / 2, process)
            at_kill = [kill(servers[1])]
        stdout, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    wall_s = time.monotonic() - start_s
    check(output, names)
    figures = orjson.loads(stdout)
    after = [answered(server) for server in servers[: 1 if at_kill else None]] + at_kill
    tokens = figures["prompt_tokens"] + figures["generated_tokens"]
    return {
        "arm": arm.name,
        "seconds": wall_s,
        "lines_per_s": len(names) / wall_s,
        "tokens_per_s": tokens / wall_s,
        "hit_ratio": figures["hit_ratio"],
        "lines_by_server": [round(b - a) for a, b in zip(before, after, strict=True)],
        "machine_load": os.getloadavg()[0],
        "http_cpu_s": cpu_s(servers[0].process.pid) - cpu_before_s,
    }


def warm_up(server: Server) -> None:
    """The first requests pay for imports, thread pools and the first fit of the step's time."""
    body = {"model": SERVED_MODEL, "prompt": "def " * 400, "max_tokens": 32, "ignore_eos": True}
    for index in range(8):
        fields = {**body, "prompt": f"{index} {body['prompt']}", "service_tier": "flex"}
        LOCAL.post(f"{server.url}/v1/completions", json=fields, timeout=LIMIT_S).raise_for_status()


def kill(server: Server) -> float:
    """End a server with SIGKILL; the lines that it had finished."""
    num_lines = answered(server)
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    return num_lines


def _command(arm: Arm, urls: list[str], folder: Path, output: Path) -> list[str]:
    """`batch run` as a process."""
    command = [sys.executable, "-m", "echo_sgl.cli", "batch", "run", str(folder / "jobs.jsonl")]
    command += ["--output", str(output), "--json", "--window", str(WINDOW_LINES)]
    for url in urls:
        command += ["--url", url]
    return command + (["--direct"] if arm.by_url else [])


def num_done(arm: Arm, server: Server, output: Path) -> int:
    """Lines with a record so far."""
    if arm.by_url:
        return output.read_bytes().count(b"\n") if output.exists() else 0
    newest = LOCAL.get(f"{server.url}/v1/batches", params={"limit": 1}, timeout=60).json()["data"]
    if not newest or newest[0]["status"] not in ("in_progress", "finalizing"):
        return 0
    counts = newest[0]["request_counts"]
    return int(counts["completed"] + counts["failed"])


def check(output: Path, names: list[str]) -> None:
    """Errors: `FleetError` when the files do not hold every line of the job once, answered."""
    errors = output.with_name(f"{output.stem}.errors.jsonl")
    failed = errors.read_text(encoding="utf-8").splitlines() if errors.exists() else []
    if failed:
        raise FleetError(f"{len(failed)} lines failed, the first: {failed[0][:500]}")
    found = Counter(orjson.loads(line)["custom_id"] for line in output.read_bytes().splitlines())
    if found != Counter(names):
        missing, extra = set(names) - set(found), found - Counter(names)
        raise FleetError(f"missing {missing}, too many {dict(extra)}")


def answered(server: Server) -> float:
    """Offline requests that the server finished."""
    page = LOCAL.get(f"{server.url}/metrics", timeout=60).text
    wanted = {"task": "offline", "outcome": "finished"}
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "echo_sgl_requests_total" and wanted.items() <= sample.labels.items()
    )


def cpu_s(pid: int) -> float:
    """CPU time of one process so far: with its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Errors: `FleetError` when the command ends before it holds, or it never does."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise FleetError("the job was over before it was half way, or never came so far")
        time.sleep(0.05)
