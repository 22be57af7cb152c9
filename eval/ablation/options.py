"""The options of the ablation and what each of its workloads sets otherwise."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo_sgl.errors import ConfigError
from eval.ablation.arms import ALONE_ARM, BASE_ARM, PRESETS, ablation_arms, with_promises
from eval.ablation.budget import wants_budget
from eval.arms import Arm
from eval.cache.arms import Sections, parse_settings
from eval.figures.slo import Slo, parse_factors
from eval.options import add_arguments, check_options, flag, option

START_S = 35.0  # a server's start on a small CPU machine, for the estimate that is printed
BUDGET_REPLAYS = 18  # that a search takes at most, nearly always
ANSWER_LENGTHS = ("equal", "lognormal")


@dataclass(frozen=True, slots=True)
class Workload:
    """An online pattern and the offline job beside it; `document_parts` as in `text_set_lines`."""

    about: str
    text_set: str = ""
    document_parts: int = 1


WORKLOADS = {
    "azure-qmsum": Workload("Azure conversation trace beside QMSum", "qmsum_val"),
    "bursts-loogle": Workload("steady rate with bursts beside LooGLE", "loogle_shortdep_qa", 8),
    "long-answers": Workload(
        "short prompts, long answers, in clumps, beside LooGLE", "loogle_shortdep_qa", 8
    ),
    "llm-d": Workload("high and low phases beside three jobs of different windows"),
}


@dataclass(frozen=True, slots=True)
class AblationOptions:
    """What is run; 0 means "no limit" or "the server's own default" where the help says so."""

    name: str = option("", "results go to eval/results/ablation-NAME; default: the workload's")
    workload: str = option("azure-qmsum", "one of " + ", ".join(WORKLOADS))
    arms: str = option(
        ",".join((ALONE_ARM, "stock", BASE_ARM, *PRESETS)),
        "comma list; settings: echo:steps.limit=off:...",
    )
    settings: str = option("", "config of all Echo arms, e.g. estimator.profile=FILE,...")
    model: str = option("base", "demo model (tiny, small, base, large), folder or hub id")
    repetitions: int = option(5, "runs of each arm; their order alternates", 1)
    rounds: int = option(1, "of them in a row on the same servers, with the same promises", 1)
    resume: bool = option(False, "go on with an interrupted run of the same name")
    servers_up: int = option(1, "arms whose servers start at once and stay up for each other", 1)
    online_load: float = option(0.4, "mean online rate as a share of stock's saturation", 0.001)
    online_rps: float = option(0.0, "mean online rate itself; 0: as --online-load says", 0)
    slo_factor: str = option("", "SLO over alone p99, TTFT[,TPOT]; default 1.5, GPU 1.2,1.1")
    duration_s: float = option(40.0, "how long online requests keep coming", 1)
    lead_s: float = option(8.0, "offline runs this long before online joins it", 0)
    drain_s: float = option(15.0, "how long unanswered online requests are waited for", 1)
    ceiling_s: float = option(20.0, "how long offline runs alone", 1)
    ceilings_once: bool = option(False, "offline alone only in each arm's first repetition")
    references: int = option(2, "times stock alone is measured each repetition; best counts", 1)
    reference_only: bool = option(False, "online alone on the stock server only, not on each arm")
    find_budget_s: float = option(
        20.0, "arms with a budget: found by replays of so many seconds; 0: their preset's", 0
    )
    calibrate_s: float = option(20.0, "stock's saturation is measured for this long at most", 1)
    calibration_requests: int = option(400, "and with so many online requests at most", 20)
    calibration_window: int = option(0, "of these in flight; 0: twice the running ones or 256", 0)
    trace: str = option("azure_conv_2023.csv.gz", "file of arrivals and lengths, path or name")
    job: str = option("", "'stdlib', a file of OpenAI batch lines, or a text set; default: its own")
    trace_start_s: float = option(0.0, "azure: where in the trace to start, in its own time", 0)
    length_scale: float = option(
        0.25, "factor on the lengths of the trace, of llm-d and of long-answers", 0.001
    )
    max_prompt_tokens: int = option(1000, "longer online prompts are cut to this; 0: none is", 0)
    burst_factor: float = option(4.0, "bursts: how much faster requests come in them", 1)
    burst_s: float = option(10.0, "bursts: their length", 0.1)
    burst_every_s: float = option(40.0, "bursts: one in so many seconds", 0.1)
    phase_ratio: float = option(15.0, "llm-d: high rate over low rate", 1)
    phase_s: float = option(10.0, "llm-d: length of a phase, 90 in the published run", 0.1)
    answer_lengths: str = option("equal", "llm-d: " + " or ".join(ANSWER_LENGTHS))
    job_lines: int = option(3000, "llm-d: largest number of lines of its own jobs", 3)
    document_tokens: int = option(2000, "documents are cut to this; 0: whole", 0)
    document_parts: int = option(0, "parts of each document to ask about; 0: the workload's own", 0)
    max_answer_tokens: int = option(0, "longest offline answer; 0: as the job says", 0)
    window: int = option(512, "offline lines in flight; llm-d sends its jobs at once", 1)
    stream_offline: bool = option(False, "stream offline answers too")
    phases_apart: bool = option(False, "each phase as on a new server, with its whole window")
    pool_tokens: int = option(20_000, "KV pool (--max-total-tokens); 0: server's default", 0)
    max_running_requests: int = option(16, "the server's limit; 0: server's default", 0)
    chunked_prefill_size: int = option(512, "prefill tokens a step; 0: server's default", 0)
    server_args: str = option("", "more arguments for every arm's server, as one string")
    seed: int = option(0, "of prompts, times, job order and server", 0)

    def __post_init__(self) -> None:
        check_options(self)
        _check_choice("workload", self.workload, tuple(WORKLOADS))
        _check_choice("answer_lengths", self.answer_lengths, ANSWER_LENGTHS)
        if self.slo_factor:
            parse_factors(self.slo_factor)
        self._check_apart()
        for arm in self.picked_arms().values():
            with_promises(arm, Slo(1.0, 1.0))

    @property
    def job_name(self) -> str:
        """Of `eval.load.mix.named_job`; empty for llm-d's own jobs, which have windows."""
        return self.job or WORKLOADS[self.workload].text_set

    @property
    def changes(self) -> Sections:
        return parse_settings([text for text in self.settings.split(",") if text.strip()])

    @property
    def folder_name(self) -> str:
        return f"ablation-{self.name or self.workload}"

    def picked_arms(self) -> dict[str, Arm]:
        return ablation_arms([name.strip() for name in self.arms.split(",")], self.changes)

    def _check_apart(self) -> None:
        """Only Echo's scheduler tells when its pool has a whole window, and forgets traffic."""
        stock = [name for name, arm in self.picked_arms().items() if not arm.settings]
        if self.phases_apart and stock:
            raise ValueError(f"--phases-apart needs Echo's scheduler; leave {', '.join(stock)} out")

    def estimate_s(self) -> float:
        """How long the whole run takes at most, if servers start in `START_S`."""
        online_s = self.duration_s + self.drain_s
        alone_s = 0.0 if self.reference_only else online_s
        num_arms, num_runs = len(self.picked_arms()), len(self.picked_arms()) * self.repetitions
        num_starts = math.ceil(self.repetitions / self.rounds)
        num_budgets = sum(
            wants_budget(arm, f"{name} {self.settings}") for name, arm in self.picked_arms().items()
        )
        budget_s = num_budgets * (START_S + BUDGET_REPLAYS * self.find_budget_s)
        num_ceilings = num_arms if self.ceilings_once else num_runs
        return (
            self.calibrate_s
            + num_starts * (START_S + self.references * online_s + num_arms * START_S)
            + (num_starts * budget_s if self.find_budget_s else 0.0)
            + num_runs * (alone_s + self.lead_s + online_s)
            + num_ceilings * self.ceiling_s
        )


def parse_options(argv: Sequence[str], prog: str, **defaults: object) -> AblationOptions:
    """Read the command line; wrong values end the process with code 2 and a sentence."""
    parser = argparse.ArgumentParser(
        prog=prog, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_arguments(parser, AblationOptions, defaults)
    try:
        return AblationOptions(**vars(parser.parse_args(argv)))
    except (ValueError, ConfigError) as error:
        parser.error(str(error))


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{flag(name)} is {value!r}; allowed are {', '.join(allowed)}")
