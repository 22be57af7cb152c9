"""What a co-run sends: online requests of a trace and an offline job, the same for every arm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echo_sgl.types import Task
from eval.arms import Arm
from eval.load.client import Request, make_request
from eval.options import CorunOptions
from eval.workloads import WorkloadError, find_data
from eval.workloads.jobs import (
    COMPLETIONS_URL,
    BatchLine,
    limit_answers,
    read_job,
    shuffled,
    text_set_files,
    text_set_lines,
)
from eval.workloads.online import read_online
from eval.workloads.prompts import SyntheticText, Tokenizer, TracePrompts
from eval.workloads.stdlib_job import StdlibJob
from eval.workloads.traces import (
    Arrival,
    scale_lengths,
    slice_trace,
    time_scale_for_rate,
)

SERVED_MODEL = "eval-model"
JOB_FILE_SUFFIXES = (".jsonl", ".jsonl.gz")
_SHARED_START_INDEX = -1  # its own text: no request has this index


@dataclass(frozen=True, slots=True)
class Mix:
    """Both loads before an arm's request fields are added."""

    arrivals: list[Arrival]
    online_bodies: list[dict[str, Any]]
    job: list[BatchLine]

    def schedule(self, arm: Arm) -> list[tuple[float, Request]]:
        """The online requests with their times (s from the start)."""
        fields = arm.fields(Task.ONLINE)
        return [
            (
                arrival.at_s,
                make_request(f"online-{index}", Task.ONLINE, COMPLETIONS_URL, body | dict(fields)),
            )
            for index, (arrival, body) in enumerate(
                zip(self.arrivals, self.online_bodies, strict=True)
            )
        ]

    def lines(self, arm: Arm, *, stream: bool) -> list[Request]:
        """The offline requests in the job's order; none for an arm without a job."""
        if not arm.has_job:
            return []
        return offline_requests(self.job, arm, stream=stream)


def offline_requests(job: Iterable[BatchLine], arm: Arm, *, stream: bool) -> list[Request]:
    fields = dict(arm.fields(Task.OFFLINE))
    return [
        make_request(
            line["custom_id"], Task.OFFLINE, line["url"], line["body"] | fields, stream=stream
        )
        for line in job
    ]


def build_mix(options: CorunOptions, tokenizer: Tokenizer) -> Mix:
    """Read the trace and the job and make the online prompts.

    Errors: `WorkloadError` for bad files, and when a request cannot fit into the KV pool.
    """
    arrivals = _arrivals(options)
    _check_pool(arrivals, options)
    texts = SyntheticText(tokenizer, options.seed)
    prompts = TracePrompts(texts)
    start = ""
    if options.shared_prefix_tokens:
        start = texts.text(_SHARED_START_INDEX, options.shared_prefix_tokens)
    bodies = [
        online_body(prompts.text(index, one, shared_start=start), one.output_tokens)
        for index, one in enumerate(arrivals)
    ]
    return Mix(arrivals, bodies, _job(options, tokenizer))


def _arrivals(options: CorunOptions) -> list[Arrival]:
    trace = read_online(find_data(options.trace), seed=options.seed)
    start_s, duration_s = options.trace_start_s, options.duration_s
    time_scale = options.time_scale or time_scale_for_rate(
        trace, start_s=start_s, duration_s=duration_s, rate_rps=options.rate_rps
    )
    cut = slice_trace(trace, start_s=start_s, duration_s=duration_s, time_scale=time_scale)
    if not cut:
        raise WorkloadError(
            f"no request of {options.trace} falls into {duration_s:g} s from {start_s:g} s on; "
            "lower --trace-start-s or --time-scale"
        )
    scaled = scale_lengths(cut, options.length_scale, max_prompt_tokens=options.max_prompt_tokens)
    return _with_shared_prefix(scaled, options.shared_prefix_tokens)


def _with_shared_prefix(arrivals: Sequence[Arrival], shared_tokens: int) -> list[Arrival]:
    """The shared start comes on top of a trace's own lengths."""
    return [replace(one, prompt_tokens=one.prompt_tokens + shared_tokens) for one in arrivals]


def _check_pool(arrivals: Iterable[Arrival], options: CorunOptions) -> None:
    longest = max(one.prompt_tokens + one.output_tokens for one in arrivals)
    if options.pool_tokens and longest >= options.pool_tokens:
        raise WorkloadError(
            f"an online request needs {longest} tokens of a pool of {options.pool_tokens}; "
            "lower --length-scale or --max-prompt-tokens, or raise --pool-tokens"
        )


def online_body(prompt: str, output_tokens: int) -> dict[str, Any]:
    """A completion of exactly that many tokens, whatever the model would say."""
    return {
        "model": SERVED_MODEL,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _job(options: CorunOptions, tokenizer: Tokenizer) -> list[BatchLine]:
    lines = named_job(
        options.job, tokenizer, document_tokens=options.document_tokens, seed=options.seed
    )
    if options.job_order == "shuffled":
        lines = shuffled(lines, options.seed)
    return limit_answers(lines, options.max_answer_tokens)


def named_job(
    name: str, tokenizer: Tokenizer, *, document_tokens: int, document_parts: int = 1, seed: int = 0
) -> list[BatchLine]:
    """The lines of 'stdlib', of a file of batch lines, or of a text set, see `text_set_lines`."""
    if name == "stdlib":
        return StdlibJob(SERVED_MODEL, seed=seed).lines(tokenizer)
    if name.endswith(JOB_FILE_SUFFIXES) or Path(name).is_file():
        # A job file names the model that it was written for; here it runs on ours.
        return [
            line | {"body": line["body"] | {"model": SERVED_MODEL}} for line in read_job(Path(name))
        ]
    return text_set_lines(
        text_set_files(name),
        tokenizer,
        model=SERVED_MODEL,
        document_tokens=document_tokens,
        document_parts=document_parts,
    )
