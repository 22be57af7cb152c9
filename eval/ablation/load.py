"""What the ablation sends: each workload's online requests at a measured rate, and its job."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice

from echo_sgl.types import Task
from eval.ablation.options import WORKLOADS, AblationOptions
from eval.figures.deadlines import with_deadline
from eval.load.client import Request, make_request
from eval.load.mix import Mix, named_job, online_body
from eval.workloads import WorkloadError, find_data
from eval.workloads.jobs import (
    COMPLETIONS_URL,
    BatchLine,
    batch_line,
    limit_answers,
    shuffled,
)
from eval.workloads.online import read_online
from eval.workloads.patterns import (
    arrivals_until,
    burst_segments,
    gamma_arrivals,
    lognormal_lengths,
    phase_segments,
    poisson_arrivals,
)
from eval.workloads.prompts import SyntheticText, Tokenizer, TracePrompts
from eval.workloads.traces import (
    Arrival,
    again_and_again,
    scale_lengths,
    slice_trace,
    tell_once,
    time_scale_for_rate,
)

LLM_D = "llm-d"
# The published run: 512 tokens in, 128 out.
LLM_D_PROMPT_TOKENS, LLM_D_ANSWER_TOKENS, LLM_D_SIGMA = 512, 128, 0.8
# Three jobs: share of the lines, and completion window as a share of the time they run. What
# online leaves is enough for the first two by a wide margin if they go first, not if all mix.
LLM_D_JOBS = ((0.15, 0.6), (0.15, 1.0), (0.70, 10.0))
LONG_ANSWERS = "long-answers"
# Questions to a model that thinks before it answers: means, sigmas of the logarithms, the longest.
QUESTION_TOKENS, QUESTION_SIGMA, LONGEST_QUESTION = 300, 0.7, 4000
LONG_ANSWER_TOKENS, LONG_ANSWER_SIGMA, LONGEST_ANSWER = 900, 0.9, 3000
DRAWN = (LLM_D, LONG_ANSWERS)  # all of their online requests
# Of the gaps between arrivals, see `gamma_arrivals`; and lengths are drawn for so many requests.
CLUMPS, NUM_LONG_ANSWERS = 1.5, 10_000
# Own texts for each use: no two uses share an index.
CALIBRATION_INDEX, JOB_INDEX = 1_000_000, 2_000_000

Lengths = tuple[int, int]  # prompt tokens, answer tokens


def calibration_requests(options: AblationOptions, tokenizer: Tokenizer) -> list[Request]:
    """Online requests of the workload's lengths, to find out how many a second the server takes."""
    prompts = TracePrompts(SyntheticText(tokenizer, options.seed))
    bodies = (
        online_body(prompts.text(CALIBRATION_INDEX + index, one), one.output_tokens)
        for index, one in enumerate(islice(_requests(options), options.calibration_requests))
    )
    return [
        make_request(f"calibration-{index}", Task.ONLINE, COMPLETIONS_URL, body)
        for index, body in enumerate(bodies)
    ]


def calibration_window(options: AblationOptions) -> int:
    return options.calibration_window or 2 * options.max_running_requests or 256


def check_inputs(options: AblationOptions, tokenizer: Tokenizer) -> None:
    """Before a server is started: are trace and job there, and what they should be?

    Errors: `WorkloadError`.
    """
    if options.workload in DRAWN and options.trace != AblationOptions().trace:
        tell_once(f"warning: {options.workload} draws its online requests; --trace is not read")
    next(_requests(options))
    if options.job_name:
        _job(options, tokenizer, saturation_rps=0.0)


def build_mix(options: AblationOptions, tokenizer: Tokenizer, saturation_rps: float) -> Mix:
    """Both loads; online requests come at a share of the saturation or at a rate on average.

    Errors: `WorkloadError` for bad files, and when a request cannot fit into the KV pool.
    """
    rate_rps = options.online_rps or options.online_load * saturation_rps
    arrivals = _arrivals(options, rate_rps)
    longest = max(one.prompt_tokens + one.output_tokens for one in arrivals)
    if options.pool_tokens and longest >= options.pool_tokens:
        raise WorkloadError(
            f"an online request needs {longest} tokens of a pool of {options.pool_tokens}; "
            "lower --length-scale or --max-prompt-tokens, or raise --pool-tokens"
        )
    prompts = TracePrompts(SyntheticText(tokenizer, options.seed))
    bodies = [
        online_body(prompts.text(index, one), one.output_tokens)
        for index, one in enumerate(arrivals)
    ]
    return Mix(arrivals, bodies, _job(options, tokenizer, saturation_rps))


def _arrivals(options: AblationOptions, rate_rps: float) -> list[Arrival]:
    duration_s, start_s = options.duration_s, options.trace_start_s
    if options.workload == "azure-qmsum":
        trace = read_online(find_data(options.trace), seed=options.seed)
        scale = time_scale_for_rate(
            trace, start_s=start_s, duration_s=duration_s, rate_rps=rate_rps
        )
        cut = slice_trace(trace, start_s=start_s, duration_s=duration_s, time_scale=scale)
        if not cut:
            raise WorkloadError(
                f"the first requests of {options.trace} after {start_s:g} s come at once, at the "
                f"end of the {duration_s:g} s; choose another --trace-start-s, or raise the rate"
            )
        return _scaled(options, cut)
    times_s = arrivals_until(_times_s(options, rate_rps), duration_s=duration_s)
    requests = zip(times_s, _requests(options), strict=False)
    return [replace(one, at_s=at_s) for at_s, one in requests]


def _times_s(options: AblationOptions, rate_rps: float) -> Iterator[float]:
    """When the online requests of a workload by rule come, without end."""
    rng = random.Random(options.seed)
    if options.workload == LONG_ANSWERS:
        return gamma_arrivals(rate_rps, CLUMPS, rng)
    if options.workload == LLM_D:
        segments = phase_segments(rate_rps, ratio=options.phase_ratio, phase_s=options.phase_s)
    else:
        segments = burst_segments(
            rate_rps,
            factor=options.burst_factor,
            burst_s=options.burst_s,
            every_s=options.burst_every_s,
        )
    return poisson_arrivals(segments, rng)


def _requests(options: AblationOptions) -> Iterator[Arrival]:
    """The workload's online requests, without end, but for when they come."""
    if options.workload == LLM_D:
        lengths = _llm_d_lengths(options, options.seed)
    elif options.workload == LONG_ANSWERS:
        lengths = _long_answers(options)
    else:
        trace = read_online(find_data(options.trace), seed=options.seed)
        return again_and_again(_scaled(options, trace))
    return (Arrival(0.0, *one) for one in lengths)


def _scaled(options: AblationOptions, arrivals: list[Arrival]) -> list[Arrival]:
    return scale_lengths(
        arrivals, options.length_scale, max_prompt_tokens=options.max_prompt_tokens
    )


def _llm_d_lengths(options: AblationOptions, seed: int) -> Iterator[Lengths]:
    prompt = max(1, round(LLM_D_PROMPT_TOKENS * options.length_scale))
    answer = max(2, round(LLM_D_ANSWER_TOKENS * options.length_scale))
    if options.answer_lengths == "equal":
        return cycle([(prompt, answer)])
    drawn = lognormal_lengths(
        answer, sigma=LLM_D_SIGMA, count=options.job_lines, max_tokens=8 * answer, seed=seed
    )
    return cycle((prompt, tokens) for tokens in drawn)


def _long_answers(options: AblationOptions) -> Iterator[Lengths]:
    scale, most = options.length_scale, options.max_prompt_tokens or LONGEST_QUESTION
    prompts, answers = (
        lognormal_lengths(
            mean * scale, sigma=sigma, count=NUM_LONG_ANSWERS, max_tokens=longest, seed=seed
        )
        for mean, sigma, longest, seed in (
            (QUESTION_TOKENS, QUESTION_SIGMA, most, options.seed),
            (
                LONG_ANSWER_TOKENS,
                LONG_ANSWER_SIGMA,
                round(LONGEST_ANSWER * scale),
                options.seed + 1,
            ),
        )
    )
    return cycle(zip(prompts, answers, strict=True))


def _job(options: AblationOptions, tokenizer: Tokenizer, saturation_rps: float) -> list[BatchLine]:
    if not options.job_name:
        lines = _llm_d_jobs(options, tokenizer, saturation_rps)
    else:
        lines = named_job(
            options.job_name,
            tokenizer,
            document_tokens=options.document_tokens,
            document_parts=options.document_parts or WORKLOADS[options.workload].document_parts,
            seed=options.seed,
        )
        lines = shuffled(lines, options.seed)
    return limit_answers(lines, options.max_answer_tokens)


def _llm_d_jobs(
    options: AblationOptions, tokenizer: Tokenizer, saturation_rps: float
) -> list[BatchLine]:
    """Three jobs that came at once, their lines mixed; together more than the server can do."""
    run_s = options.lead_s + options.duration_s
    longest_s = run_s + options.drain_s
    num_lines = min(options.job_lines, math.ceil(saturation_rps * longest_s))
    texts = SyntheticText(tokenizer, options.seed)
    lengths = islice(_llm_d_lengths(options, options.seed + 1), num_lines)
    jobs = random.Random(options.seed).choices(
        range(len(LLM_D_JOBS)), weights=[share for share, _ in LLM_D_JOBS], k=num_lines
    )
    return [
        with_deadline(
            batch_line(
                f"job-{job}/{index}",
                dict(online_body(texts.text(JOB_INDEX + index, prompt), answer)),
            ),
            LLM_D_JOBS[job][1] * run_s,
        )
        for index, (job, (prompt, answer)) in enumerate(zip(jobs, lengths, strict=True))
    ]


def in_flight(options: AblationOptions, mix: Mix) -> AblationOptions:
    """The windows of llm-d's jobs count from the start of the run, so they are sent at once."""
    return options if options.job_name else replace(options, window=len(mix.job))
