"""The simulator beside a real server: one small pair, compared in counts and not in times."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_sgl.cli.tuning.calibration import Driver, fit_all
from echo_sgl.config import load_config
from echo_sgl.sim.server_config import ServerConfig
from echo_sgl.types import Task
from eval.ablation.arms import preset_arm
from eval.arms import Arm
from eval.corun import hold
from eval.corun.hold import PlugsEnded
from eval.corun.phases import begin_job, empty_cache, end_job
from eval.fidelity.replay import Prompts, bodies_of, replay
from eval.load.client import Phase
from eval.load.mix import Mix, online_body
from eval.load.records import Record, Status
from eval.servers.models import demo_model
from eval.servers.server import LOCAL, Server
from eval.workloads.jobs import batch_line
from eval.workloads.prompts import SyntheticText, load_tokenizer
from eval.workloads.traces import Arrival
from tests.servers import COMMON_ARGS, NAMED, ServerPool

# What online requests used before, calibration too, is not in the simulation.
CONFIG = "[reserve]\npredictor = 'off'\n"
NUM_DOCUMENTS, NUM_QUESTIONS, DOCUMENT_TOKENS = 15, 4, 1500
LIMIT_S = 240.0
MOST_PLAYS = 5


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "no-reserve.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


@pytest.fixture
def server(server_for: ServerPool, config_path: Path) -> Iterator[Server]:
    with server_for.once((*COMMON_ARGS, *NAMED), config=str(config_path)) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(demo_model("tiny")))


@pytest.fixture(scope="module")
def mix(tokenizer: Any) -> Mix:
    """Questions about documents that do not fit the pool together, a few people beside them."""
    texts = SyntheticText(tokenizer, 0)
    documents = [texts.text(number, DOCUMENT_TOKENS) for number in range(NUM_DOCUMENTS)]
    job = [
        batch_line(f"{number}/{question}", online_body(f"{document} {question} is asked", 8))
        for number, document in enumerate(documents)
        for question in range(NUM_QUESTIONS)
    ]
    random.Random(0).shuffle(job)
    arrivals = [Arrival(0.3 + 0.1 * number, 60 + 9 * number, 6) for number in range(12)]
    bodies = [
        online_body(texts.text(100 + number, one.prompt_tokens), one.output_tokens)
        for number, one in enumerate(arrivals)
    ]
    return Mix(arrivals, [dict(body, model="tiny") for body in bodies], _named(job))


def _named(job: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line | {"body": line["body"] | {"model": "tiny"}} for line in job]


async def play(server: Server, arm: Arm, mix: Mix) -> list[Record]:
    """On hold until the server has all lines: what is done first hangs on who came first."""
    phase, lines = Phase(server.url), mix.lines(arm, stream=False)
    job = await begin_job(server, phase, lines, window=len(lines), on_hold=True)
    await phase.open_loop(mix.schedule(arm), limit_s=LIMIT_S)
    await end_job(job, within_s=LIMIT_S)
    return phase.records


def num_steps(server: Server) -> int:
    [replica] = LOCAL.get(f"{server.url}/echo/steps", timeout=30).json()["replicas"]
    return int(replica["num_steps"])


def hit_ratio(records: list[Record]) -> float:
    mine = [one for one in records if one.task is Task.OFFLINE]
    return sum(one.cached_tokens for one in mine) / sum(one.prompt_tokens for one in mine)


def documents(records: list[Record]) -> list[int]:
    """In the order in which their first answers came."""
    ended = sorted((one for one in records if one.task is Task.OFFLINE), key=_end_s)
    return list(dict.fromkeys(int(one.id.partition("/")[0]) for one in ended))


def _end_s(record: Record) -> float:
    assert record.end_s is not None
    return record.end_s


def tokens_by_id(records: list[Record]) -> dict[str, tuple[int, int]]:
    return {one.id: (one.prompt_tokens, one.completion_tokens) for one in records}


@pytest.mark.server
def test_what_a_server_did_is_what_its_simulated_twin_does(
    server: Server, config_path: Path, mix: Mix, tokenizer: Any
) -> None:
    driver = Driver(server.url, None, random.Random(0))
    samples = driver.measure(5.0, on_wave=lambda share: None)
    profile = fit_all(samples, driver.server, seed=0, host=driver.host_time()).profile()
    assert profile.host is not None and profile.host.intake_s > 0
    real: list[Record] = []
    for _ in range(MOST_PLAYS):
        empty_cache(server)
        before = num_steps(server)
        with contextlib.suppress(PlugsEnded):  # on a slow machine the lines may come too late
            real = asyncio.run(play(server, preset_arm("echo"), mix))
            break
    assert real, f"the lines came too late {MOST_PLAYS} times"
    steps = num_steps(server) - before

    config = ServerConfig(
        device=profile.estimator,
        kv_tokens=driver.server["max_total_tokens"],
        echo=load_config(config_path),
        max_running_requests=driver.server["max_running_requests"],
        chunked_prefill_tokens=driver.server["chunked_prefill_tokens"],
        host=profile.host,
    )
    sim, results = replay(config, real, Prompts(bodies_of(mix), tokenizer), end_s=math.inf)
    assert {one.status for one in (*real, *sim)} == {Status.OK}
    assert tokens_by_id(sim) == tokens_by_id(real)
    # How long steps take differs from run to run, and with it what ends first of what runs at once:
    # a single document may end elsewhere. In an order of chance the mean distance would be 5.
    places = {document: place for place, document in enumerate(documents(sim))}
    apart = [abs(places[one] - place) for place, one in enumerate(documents(real))]
    assert sum(apart) / NUM_DOCUMENTS < 3
    assert hit_ratio(real) > 0.5
    assert hit_ratio(sim) == pytest.approx(hit_ratio(real), abs=0.05)
    assert steps / 3 < results.num_steps < steps * 3


@pytest.mark.server
def test_a_job_whose_lines_come_too_late_to_be_held_is_taken_back(
    server: Server, mix: Mix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "PLUGS_SHARE", 0.01)  # they end within some steps
    with pytest.raises(PlugsEnded, match="length"):
        asyncio.run(play(server, preset_arm("echo"), mix))
    empty_cache(server)  # which it refuses while anybody is there
