"""`make demo`: live chat and a job file on one server, first with stock SGLang, then with Echo."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from echo_sgl.types import Task
from eval.arms import Arm, pick_arms
from eval.corun.phases import empty_cache
from eval.demo.report import ArmResult, print_results
from eval.load.client import Phase, Request, make_request
from eval.load.mix import offline_requests
from eval.load.records import Record, Status
from eval.paths import BUILD_DIR, LOGS_DIR
from eval.servers.machine import device_args, on_cpu
from eval.servers.models import SHAPES, find_model
from eval.servers.server import Server, ServerStartError, running_server
from eval.workloads import WorkloadError
from eval.workloads.jobs import BatchLine, write_job
from eval.workloads.prompts import SyntheticText, Tokenizer, load_tokenizer
from eval.workloads.stdlib_job import StdlibJob
from eval.workloads.traces import bursty_arrivals

JOB_FILE = BUILD_DIR / "demo" / "job.jsonl"
SERVED_MODEL = "echo-demo"
ARM_TITLES = {"stock": "stock SGLang", "echo": "SGLang + Echo"}
WINDOW = 512
SYSTEM_PROMPT = "You are a friendly assistant. Answer in one short sentence."
SERVER_ARGS = ("--served-model-name", SERVED_MODEL, "--enable-cache-report", "--enable-metrics")
# The pool holds less than half of the documents: whether a question finds its document in
# the cache depends on the order of the questions.
DEMO_MODEL_ARGS = (
    *("--max-total-tokens", "12000"),
    *("--max-running-requests", "16"),
    *("--chunked-prefill-size", "512"),
)


@dataclass(frozen=True, slots=True)
class DemoSize:
    """How much is played against each arm; `limit_s` ends an arm that takes too long."""

    num_documents: int
    questions_per_document: int
    answer_tokens: int
    quiet_s: float
    quiet_rps: float
    burst_rps: float
    chat_tokens: tuple[int, int]
    limit_s: float
    seed: int = 0


CPU_SIZE = DemoSize(
    12, 20, 16, quiet_s=4, quiet_rps=0.4, burst_rps=4, chat_tokens=(40, 160), limit_s=150
)
ACCELERATOR_SIZE = DemoSize(
    48, 60, 64, quiet_s=8, quiet_rps=2, burst_rps=40, chat_tokens=(100, 1500), limit_s=300
)
BURST_S = 2.0


@dataclass(frozen=True, slots=True)
class Play:
    """What every arm is served: the model, the job and the chat."""

    model: str
    server_args: tuple[str, ...]
    job: list[BatchLine]
    chat: list[tuple[float, Request]]
    limit_s: float


def main(argv: list[str]) -> None:
    """Play the demo; a server that does not start ends it with code 1 and the end of its log."""
    parser = argparse.ArgumentParser(prog="python -m eval.demo", description=__doc__)
    parser.add_argument(
        "--model",
        default="",
        help=f"hub id, folder, or a shape without weights: {', '.join(SHAPES)}; default: a small "
        "model, built on the spot",
    )
    parser.add_argument("--server-args", default="", help="more arguments for both servers")
    options = parser.parse_args(argv)
    console = Console()
    try:
        play = _prepare(options.model, shlex.split(options.server_args), console)
        results = [_play_arm(name, play, console) for name in ARM_TITLES]
    except (ServerStartError, WorkloadError) as error:
        console.print(f"The demo stopped: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
    print_results(results, console)
    _print_next_step(play, console)


def _prepare(named_model: str, server_args: Sequence[str], console: Console) -> Play:
    """Build what is needed and say what will be seen."""
    size = CPU_SIZE if on_cpu() else ACCELERATOR_SIZE
    with console.status("building the demo model and the job file"):
        model, load_args = find_model(named_model or "small")
        tokenizer = load_tokenizer(model)
        job = StdlibJob(
            SERVED_MODEL,
            num_documents=size.num_documents,
            questions_per_document=size.questions_per_document,
            answer_tokens=size.answer_tokens,
            seed=size.seed,
        ).lines(tokenizer)
        write_job(JOB_FILE, job)
        chat = list(chat_requests(size, tokenizer))
    console.print(
        f"[bold]{len(job)} offline questions[/] about {size.num_documents} files of Python's "
        "library, in mixed order, and [bold]live chat[/] that comes in bursts: on one server, "
        f"twice.\nModel: {_shown(model)}. Job file: {_shown(JOB_FILE)}.",
        highlight=False,
    )
    limits = DEMO_MODEL_ARGS if on_cpu() or not named_model else ()
    args = (*device_args(), *load_args, *limits, *SERVER_ARGS, *server_args)
    return Play(model, args, job, chat, size.limit_s)


def chat_requests(size: DemoSize, tokenizer: Tokenizer) -> Iterator[tuple[float, Request]]:
    """Chat requests with their times, as many as the longest arm could take."""
    texts, rng = SyntheticText(tokenizer, size.seed), random.Random(size.seed)
    times_s = bursty_arrivals(
        seed=size.seed,
        quiet_rps=size.quiet_rps,
        burst_rps=size.burst_rps,
        quiet_s=size.quiet_s,
        burst_s=BURST_S,
    )
    for index, at_s in enumerate(itertools.takewhile(lambda at_s: at_s < size.limit_s, times_s)):
        question = texts.text(index, rng.randint(*size.chat_tokens))
        body = {
            "model": SERVED_MODEL,
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question},
            ],
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        yield at_s, make_request(f"chat-{index}", Task.ONLINE, "/v1/chat/completions", body)


def _play_arm(name: str, play: Play, console: Console) -> ArmResult:
    """Start the arm's server, serve both loads, stop it."""
    arm, title = pick_arms([name])[name], ARM_TITLES[name]
    log_path = LOGS_DIR / f"demo-{name}.log"
    started_s = time.monotonic()
    args = (*play.server_args, *arm.args)
    with (
        console.status(f"{title}: starting the server (half a minute or more)") as status,
        running_server(play.model, args, config=arm.config, log_path=log_path) as server,
    ):
        asyncio.run(_warm_up(server, arm, play))
        empty_cache(server)
        status.stop()
        console.print(f"{title}: ready after {time.monotonic() - started_s:.0f} s")
        with _progress(console) as progress:
            records = asyncio.run(_serve_both(server, arm, play, _Ticker(progress, title, play)))
    return ArmResult(name, title, records)


async def _warm_up(server: Server, arm: Arm, play: Play) -> None:
    """The first requests pay for imports and thread pools; the figures shall not."""
    first = [request for _, request in play.chat[:2]]
    first += offline_requests(play.job[:2], arm, stream=True)
    await Phase(server.url).closed_loop(first, window=len(first), limit_s=play.limit_s)


async def _serve_both(server: Server, arm: Arm, play: Play, ticker: _Ticker) -> list[Record]:
    """Chat goes on until the last line of the job is answered."""
    lines = offline_requests(play.job, arm, stream=True)
    phase = Phase(server.url, on_end=ticker.tick)
    job_runs = True

    async def work() -> None:
        nonlocal job_runs
        await phase.closed_loop(lines, window=WINDOW, limit_s=play.limit_s)
        job_runs = False

    chat = itertools.takewhile(lambda _: job_runs, play.chat)
    await asyncio.gather(work(), phase.open_loop(chat, limit_s=play.limit_s))
    return phase.records


class _Ticker:
    """Moves the progress bar of one arm."""

    def __init__(self, progress: Progress, title: str, play: Play) -> None:
        self._progress = progress
        self._row = progress.add_task(title, total=len(play.job), chats=0)
        self._num_chats = 0

    def tick(self, record: Record) -> None:
        if record.status is not Status.OK:
            return
        if record.task is Task.ONLINE:
            self._num_chats += 1
            self._progress.update(self._row, chats=self._num_chats)
        else:
            self._progress.advance(self._row)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}:"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("job lines, {task.fields[chats]} chats answered,"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=2,  # the server needs the cores
    )


def _print_next_step(play: Play, console: Console) -> None:
    serve = ["echo-sgl serve --config echo --model-path", _shown(play.model), *play.server_args]
    console.print(
        "\nTo look further, start a server of your own, give it the job, and watch each class "
        "with [bold]echo-sgl stats --watch[/]:"
    )
    for command in (
        " ".join(serve) + " --port 30000",
        f"echo-sgl batch run {_shown(JOB_FILE)} --output build/demo/out.jsonl",
        "echo-sgl stats --watch",
    ):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def _shown(path: Path | str) -> str:
    """A path below the repository as seen from there; anything else as it is."""
    root = BUILD_DIR.parent
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else str(path)
