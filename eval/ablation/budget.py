"""The budget of an arm whose steps have one: found on its server, as its users find it."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

from echo_sgl.cli.tuning.budget import evidence, run_search
from echo_sgl.cli.tuning.replay import Replayer
from echo_sgl.config import parse_config
from echo_sgl.estimators.budget import Target
from echo_sgl.sim.workload import Trace
from echo_sgl.types import Task
from eval.arms import Arm
from eval.figures.slo import Slo
from eval.load.mix import Mix
from eval.servers.server import Server
from eval.workloads.jobs import write_job

Tree = dict[str, Any]


def wants_budget(arm: Arm, said: str) -> bool:
    """Whether its steps have a budget that nobody chose; `said`: all settings that were given."""
    if not arm.settings or "steps.budget_s" in said:
        return False
    return parse_config(arm.settings).steps.limit == "budget"


def find_arm_budget(
    server: Server, mix: Mix, slo: Slo, *, seconds: float, job_path: Path, seed: int
) -> Tree:
    """The largest budget under which a replay of the online requests keeps what is promised.

    Where none does, the smallest that was tried: least is broken with it. Source: HyGen 4.2.
    """
    write_job(job_path, mix.job)
    replayer = Replayer(
        server.url,
        None,
        _trace(mix).between(0.0, seconds),
        jobs=job_path,
        speed=1.0,
        rng=random.Random(seed),
    )
    targets = (Target("ttft", "p99", slo.ttft_s), Target("tpot", "p99", slo.tpot_s))
    search = run_search(replayer, targets, stored_s=None)
    tried_s = [trial.budget_s for trial in search.trials if trial.budget_s]
    return {
        "budget_s": search.budget_s or min(tried_s, default=None),
        "keeps_promises": search.budget_s is not None,
        "evidence": list(evidence(search)),
    }


def _trace(mix: Mix) -> Trace:
    numbers: dict[int, int] = {}
    blocks = [
        array("q", (numbers.setdefault(block, len(numbers)) for block in one.blocks))
        for one in mix.arrivals
    ]
    return Trace(
        Task.ONLINE,
        array("d", (one.at_s for one in mix.arrivals)),
        array("q", (one.prompt_tokens for one in mix.arrivals)),
        array("q", (one.output_tokens for one in mix.arrivals)),
        blocks=blocks,
        block_tokens=max(1, round(mix.arrivals[0].block_tokens)),
    )
