"""The options of the cache experiments: one dataclass, and what each experiment sets otherwise."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.arms import Arm, pick_arms
from eval.cache.arms import CACHE_ARMS, parse_settings, with_settings
from eval.options import add_arguments, check_options, option
from eval.servers.models import SIZES
from eval.workloads.patterns import Segment

SHORT_JOBS = {
    "qmsum": "qmsum_val",
    "loogle": "loogle_shortdep_qa",
    "bbh": "bbh_dev",
    "mmlu": "mmlu_dev",
}


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What is run; the defaults are those of `offline`, `EXPERIMENTS` has the others'."""

    experiment: str
    name: str = option("", "results go to eval/results/NAME-JOB; default: cache-EXPERIMENT-JOB")
    arms: str = option(
        "stock-fcfs,stock-lpm,stock-lpm-128,psm,psm-echo,psm-next-use",
        "comma list of arms; known are " + ", ".join(CACHE_ARMS),
    )
    settings: str = option("", "config of all Echo arms, e.g. cache.protected_share=0.4,...")
    size: str = option("tiny", "demo model size: tiny, small, base or large")
    jobs: str = option(
        "qmsum,loogle", "comma list of qmsum, loogle, bbh, mmlu, or text sets by name or path"
    )
    requests: int = option(0, "as many lines of each job, drawn by seed; 0: all", 0)
    document_tokens: int = option(2000, "documents are cut to this; 0: whole", 0)
    max_answer_tokens: int = option(8, "longest offline answer; 0: as the job says", 0)
    window: int = option(256, "offline lines in flight", 1)
    pool_share: float = option(0.2, "KV pool as a share of the job's prefix working set", 0)
    pool_tokens: int = option(0, "KV pool in tokens instead of --pool-share", 0)
    max_running_requests: int = option(8, "the server's limit", 1)
    chunked_prefill_size: int = option(512, "prefill tokens a step", 1)
    sessions: str = option("tau,miniswe", "overlap: online conversations of tau, miniswe or files")
    num_sessions: int = option(28, "overlap: how many conversations", 1)
    sessions_at_once: int = option(3, "overlap: conversations that are held at the same time", 1)
    session_tokens: int = option(2600, "overlap: a conversation ends before a longer prompt", 1)
    session_answer_tokens: int = option(16, "overlap: longest online answer", 1)
    think_s: float = option(1.0, "overlap: mean wait between an answer and the next turn", 0)
    trace: str = option("azure_conv_2023.csv.gz", "burst: CSV with the online requests' lengths")
    length_scale: float = option(0.5, "burst: factor on the trace's lengths", 0)
    max_prompt_tokens: int = option(1000, "burst: longer online prompts are cut to this", 1)
    rate_rps: float = option(0.8, "burst: steady online requests a second", 0.01)
    burst_factor: float = option(4.0, "burst: how much faster they come in it", 1)
    bursts: int = option(3, "burst: how many of them, one after the other", 1)
    steady_s: float = option(30.0, "burst: steady time before each", 0)
    burst_s: float = option(30.0, "burst: length of each", 1)
    after_s: float = option(10.0, "burst: steady time after the last", 0)
    limit_s: float = option(300.0, "a phase that takes longer is ended", 1)
    repetitions: int = option(1, "server starts per arm; their order alternates", 1)
    seed: int = option(0, "of samples, orders, times and server", 0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.size not in SIZES:
            raise ValueError(f"--size is {self.size!r}; allowed are {', '.join(SIZES)}")
        self.picked_arms()

    @property
    def job_names(self) -> list[str]:
        """The text sets of `--jobs`, short names written out."""
        return [SHORT_JOBS.get(name, name) for name in _names(self.jobs)]

    @property
    def session_sets(self) -> list[str]:
        return _names(self.sessions)

    @property
    def burst_segments(self) -> list[Segment]:
        """The burst experiment's rates (requests/s) and times (s): steady and faster in turns."""
        steady = self.rate_rps, self.steady_s
        burst = self.rate_rps * self.burst_factor, self.burst_s
        return [*self.bursts * [steady, burst], (self.rate_rps, self.after_s)]

    def picked_arms(self) -> dict[str, Arm]:
        """The arms with the config values of `--settings`."""
        changes = parse_settings(_names(self.settings))
        picked = pick_arms(_names(self.arms), CACHE_ARMS)
        return {name: with_settings(arm, changes) for name, arm in picked.items()}

    def folder_name(self, job: str) -> str:
        short = {full: name for name, full in SHORT_JOBS.items()}.get(job, job.rpartition("/")[2])
        return f"{self.name or 'cache-' + self.experiment}-{short}"


EXPERIMENTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "offline": ("jobs about long documents alone, on a pool that holds a fifth of them", {}),
    "overlap": (
        "the same beside conversations: each class alone and both together",
        # With a smaller model the job would be through before the conversations have begun.
        {
            "arms": "psm,psm-lru,psm-echo,psm-next-use",
            "jobs": "qmsum",
            "size": "small",
            "repetitions": 2,
        },
    ),
    "burst": (
        "online traffic that comes faster now and then, with a reserve for it and without",
        {
            "arms": "reserve-off,reserve-peak",
            "jobs": "bbh",
            "document_tokens": 0,
            "max_answer_tokens": 256,
            "pool_tokens": 14_000,
            "max_running_requests": 32,
        },
    ),
    "control": (
        "few-shot jobs whose shared prefixes all fit into the pool: plain LRU is good there",
        {
            "arms": "stock-fcfs,stock-lpm,psm,psm-lru,psm-echo,psm-next-use",
            "jobs": "bbh,mmlu",
            "requests": 300,
            "document_tokens": 0,
            "pool_share": 1.0,
        },
    ),
}


def parse_options(argv: Sequence[str], prog: str) -> CacheOptions:
    """Read the command line; wrong values end the process with code 2 and a sentence."""
    parser = argparse.ArgumentParser(prog=prog)
    commands = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for experiment, (text, defaults) in EXPERIMENTS.items():
        command = commands.add_parser(
            experiment,
            help=text,
            description=text,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add_arguments(command, CacheOptions, defaults)
    try:
        return CacheOptions(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


def default_options(experiment: str, **changes: Any) -> CacheOptions:
    """An experiment's own defaults with changes. Errors: `ValueError` as for the options."""
    return CacheOptions(experiment, **{**EXPERIMENTS[experiment][1], **changes})


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
