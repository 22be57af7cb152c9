"""The options of a co-run: one dataclass gives the command line, its help and config.json.

`option`, `check_options` and `add_arguments` make such a dataclass; other experiments use them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from eval.arms import ARMS, pick_arms


def option(default: Any, help: str, low: float | None = None) -> Any:
    """A field with its help and the least value that is allowed."""
    return field(default=default, metadata={"help": help, "low": low})


def check_options(options: Any) -> None:
    """Errors: `ValueError` names the flag whose value is too low, or a bad `name`."""
    for item in dataclasses.fields(options):
        value, low = getattr(options, item.name), item.metadata.get("low")
        if low is not None and not value >= low:
            raise ValueError(f"{flag(item.name)} is {value!r}; it must be {low} or more")
    name = options.name
    if name and not _is_folder_name(name):
        raise ValueError(f"--name is {name!r}; it names one folder: letters, digits, _.-")


def add_arguments(
    parser: argparse.ArgumentParser, kind: Any, defaults: Mapping[str, Any] | None = None
) -> None:
    """One argument for each field of the dataclass `kind` that has a help."""
    for item in dataclasses.fields(kind):
        if "help" not in item.metadata:
            continue
        how: dict[str, Any] = {"type": type(item.default)}
        if isinstance(item.default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        default = (defaults or {}).get(item.name, item.default)
        parser.add_argument(flag(item.name), default=default, help=item.metadata["help"], **how)


def positive(text: str) -> float:
    """An argument that is a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def count(text: str) -> int:
    """An argument that is a whole number from 1 up."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return value


def folder_name(text: str) -> str:
    """An argument that names a folder of results."""
    if not _is_folder_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} does not name one folder: letters, digits, _.-")
    return text


def _is_folder_name(text: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+", text) and text.strip("."))


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class CorunOptions:
    """What is run; 0 means "no limit" or "the server's own default" where the help says so."""

    phases_apart: ClassVar[bool] = False

    name: str = option("corun", "folder under eval/results/ that takes the results")
    arms: str = option(",".join(ARMS), "comma list of arms, the first is the base of the ratios")
    model: str = option("base", "demo model (tiny, small, base, large), folder or hub id")
    trace: str = option("azure_conv_2023.csv.gz", "CSV of arrivals: path or real workload's name")
    trace_start_s: float = option(0.0, "where in the trace to start, in its own time", 0)
    time_scale: float = option(0.0, "stretch of the trace's gaps; 0: taken from --rate-rps", 0)
    rate_rps: float = option(0.5, "mean online requests a second, unless --time-scale is set", 0)
    length_scale: float = option(0.25, "factor on the trace's prompt and answer lengths", 0)
    max_prompt_tokens: int = option(1000, "longer online prompts are cut to this; 0: none is", 0)
    shared_prefix_tokens: int = option(0, "start that all online prompts share", 0)
    duration_s: float = option(120.0, "how long online requests keep coming", 1)
    lead_s: float = option(20.0, "offline runs this long before online joins it", 0)
    drain_s: float = option(120.0, "how long unanswered online requests are waited for", 1)
    job: str = option("qmsum_val", "'stdlib', a file of OpenAI batch lines, or a text set")
    document_tokens: int = option(2000, "a text set's documents are cut to this; 0: whole", 0)
    max_answer_tokens: int = option(0, "longest offline answer; 0: as the job says", 0)
    job_order: str = option("shuffled", "shuffled (by seed) or given")
    window: int = option(512, "offline lines in flight", 1)
    stream_offline: bool = option(False, "stream offline answers too: their TTFT, more client CPU")
    pool_tokens: int = option(20_000, "KV pool (--max-total-tokens); 0: server's default", 0)
    max_running_requests: int = option(16, "the server's limit; 0: server's default", 0)
    chunked_prefill_size: int = option(512, "prefill tokens a step; 0: server's default", 0)
    server_args: str = option("", "more arguments for every arm's server, as one string")
    repetitions: int = option(3, "server starts per arm; their order alternates", 1)
    seed: int = option(0, "of prompts, job order and server", 0)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("--name is ''; it names one folder")
        check_options(self)
        if self.job_order not in ("shuffled", "given"):
            raise ValueError(f"--job-order is {self.job_order!r}; allowed are shuffled, given")
        pick_arms(self.arm_names)

    @property
    def arm_names(self) -> list[str]:
        return [name.strip() for name in self.arms.split(",")]


def parse_options(argv: Sequence[str], prog: str) -> CorunOptions:
    """Read the command line; wrong values end the process with code 2 and a sentence."""
    parser = argparse.ArgumentParser(
        prog=prog, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_arguments(parser, CorunOptions)
    try:
        return CorunOptions(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
