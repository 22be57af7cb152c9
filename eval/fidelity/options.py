"""What is replayed in the simulator, and what it must know of the servers that were measured."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from eval.ablation.options import AblationOptions
from eval.fidelity.replay import check_job
from eval.figures.slo import Slo
from eval.workloads import WorkloadError
from eval.workloads.jobs import limit_answers, read_job

DEFAULT_ARMS = "echo,hygen,bs"
# What an ablation's servers may have had besides, and is simulated, or tells in nothing.
KNOWN_ARGS = ("--sleep-on-idle", "--enable-mixed-chunk")
# Of the server's own settings, what the simulator has, and what they are if nobody says.
SETTINGS: dict[str, Any] = {
    "page_size": 1,
    "disable_overlap_schedule": False,
    "max_prefill_tokens": 16384,
    "schedule_conservativeness": 1.0,
}


@dataclass(frozen=True, slots=True)
class Load:
    """What is else measured on a stock server first: the online rate, and what is promised."""

    rate_rps: float
    slo: Slo


def facts_of(options: AblationOptions, server_args: Sequence[str], where: str) -> dict[str, Any]:
    """A server as its options made it; `server_args`: all that it was started with.

    Errors: `WorkloadError` when the options do not tell, or name what is not simulated.
    """
    given = (options.pool_tokens, options.max_running_requests, options.chunked_prefill_size)
    if not all(given):
        raise WorkloadError(
            f"{where}: nothing says how large the server was; a run with --pool-tokens, "
            "--max-running-requests and --chunked-prefill-size does"
        )
    more = shlex.split(options.server_args)
    if unknown := [arg for arg in more if arg not in KNOWN_ARGS]:
        raise WorkloadError(
            f"{where} was measured with {shlex.join(unknown)}, which is not simulated; known are "
            f"{', '.join(KNOWN_ARGS)}"
        )
    names = ("max_total_tokens", "max_running_requests", "chunked_prefill_tokens")
    return {
        **SETTINGS,
        **dict(zip(names, given, strict=True)),
        "is_mixed_chunk": "--enable-mixed-chunk" in server_args,
        "disable_overlap_schedule": "cpu" in server_args,  # our platform's steps do not overlap
    }


def check_load(options: AblationOptions) -> None:
    """Errors: `WorkloadError` names what the simulator does not play, or a bad job file."""
    stock = [name for name, arm in options.picked_arms().items() if not arm.settings]
    if stock:
        raise WorkloadError(
            f"{', '.join(stock)} are stock schedulers, which the simulator does not play; "
            f"allowed are Echo's presets, as {DEFAULT_ARMS}"
        )
    if not options.job_name:
        raise WorkloadError(
            f"the lines of workload {options.workload} have windows of their own, which a "
            "simulated trace does not have; choose another workload, or name a --job"
        )
    if Path(options.job_name).is_file():
        check_job(limit_answers(read_job(Path(options.job_name)), options.max_answer_tokens))


def given_load(rate_rps: float, promise: str) -> Load | None:
    """Errors: `WorkloadError` when the promise is not two times above 0."""
    if not rate_rps:
        return None
    try:
        ttft_s, tpot_s = (float(part) for part in promise.split(","))
    except ValueError:
        ttft_s = tpot_s = 0.0
    if not (ttft_s > 0 and tpot_s > 0 and rate_rps > 0):
        raise WorkloadError(
            f"--rate-rps is {rate_rps:g} and --promise {promise!r}; give a rate above 0, and TTFT "
            "and TPOT in seconds as 1.5,0.15"
        )
    return Load(rate_rps, Slo(ttft_s, tpot_s))


def stored_options(folder: Path, arms: str) -> AblationOptions:
    """The options that a folder was measured with. Errors: `WorkloadError` when it has none."""
    try:
        measured = orjson.loads((folder / "raw" / "options.json").read_bytes())
    except OSError as error:
        raise WorkloadError(f"{folder} holds no results: {error.strerror}") from error
    return AblationOptions(**measured, arms=arms, resume=True)
