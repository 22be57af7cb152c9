"""What the fleet experiment runs on: the assumed device, the online trace, the offline load."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

from echo_sgl.estimators.roofline_time import RooflineBatchTime, Transformer
from echo_sgl.sim.workload import Trace
from echo_sgl.types import Task
from eval.workloads import WorkloadError, find_data, read_lines
from eval.workloads.traces import Arrival

# Qwen2.5-7B's config.json in bfloat16, OOCO's smaller model.
QWEN25_7B = Transformer(
    num_layers=28,
    hidden=3584,
    num_heads=28,
    num_kv_heads=4,
    intermediate=18944,
    vocab=152_064,
    dtype_bytes=2,
)
WEIGHT_BYTES = 15.2e9
# One die of an Ascend 910C, OOCO's device: half of the package's 780 TFLOP/s (bfloat16),
# 3.2 TB/s and 128 GB.
PEAK_FLOP_PER_S, PEAK_BYTES_PER_S, MEMORY_BYTES = 390e12, 1.6e12, 64e9
MEMORY_SHARE = 0.88
# Assumed shares of the peaks, see `PROFILE_NOTE`.
SHARES = {
    "gemm_flop": 0.50,
    "prefill_attention_flop": 0.30,
    "decode_attention_flop": 0.20,
    "gemm_byte": 0.50,
    "attention_byte": 0.50,
}
STEP_S = 0.003
PROFILE_NOTE = (
    "An assumed profile, nothing here was measured: Qwen2.5-7B (its config.json) on one die of an "
    "Ascend 910C (half of the package's published 780 TFLOP/s and 3.2 TB/s), at shares of those "
    "peaks that were chosen so that two figures of the OOCO paper come out: decode GEMMs saturate "
    "at about 300 requests (its 3.3.3), and one instance reaches about 12,083 tokens/s on its "
    "Azure conversation load (its table 6)."
)
# OOCO table 5: means of its own offline requests, which are not published; and of the Azure
# conversation load that its table 6 was measured with.
OOC_PROMPT_TOKENS, OOC_OUTPUT_TOKENS = 1200.52, 671.51
TABLE_6_PROMPT_TOKENS, TABLE_6_OUTPUT_TOKENS, TABLE_6_TOKENS_PER_S = 1512.30, 98.75, 12_083.43
ARXIV = "arxiv_summarization_lengths.csv.gz"
LENGTH_SIGMA = 0.6
MOST_TOKENS = 8192
# Short questions with long answers, as reasoning models give them: made up, decode-heavy.
REASONING_PROMPT_TOKENS, REASONING_OUTPUT_TOKENS = 300.0, 1500.0
# Echo on both instances, and what is set beside `configs/echo.toml`.
ECHO, ECHO_CUT = "echo, co-located", "echo, online chunks cut"
COLOCATED: dict[str, dict[str, Any]] = {ECHO: {}, ECHO_CUT: {"online_chunks": "slack"}}
JOBS = ("ooc", "arxiv", "reasoning")
_DRAWN_MEANS = {
    "ooc": (OOC_PROMPT_TOKENS, OOC_OUTPUT_TOKENS),
    "reasoning": (REASONING_PROMPT_TOKENS, REASONING_OUTPUT_TOKENS),
}
NUM_DRAWN = 20_000
Lengths = Sequence[tuple[int, int]]


def device() -> RooflineBatchTime:
    """The roofline of the assumed device. Units: seconds per FLOP and byte, as its coefficients."""
    peaks = {name: PEAK_FLOP_PER_S if "flop" in name else PEAK_BYTES_PER_S for name in SHARES}
    rates = {name: 1.0 / (SHARES[name] * peaks[name]) for name in SHARES}
    return RooflineBatchTime(QWEN25_7B).with_coefficients({**rates, "step": STEP_S})


def kv_tokens() -> int:
    """What the weights leave of `MEMORY_SHARE` of the memory."""
    sizes = QWEN25_7B
    per_token = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * sizes.dtype_bytes
    return int((MEMORY_SHARE * MEMORY_BYTES - WEIGHT_BYTES) / per_token)


def scaled_online(arrivals: Sequence[Arrival], factor: float, *, seed: int) -> Trace:
    """`factor` times the requests: dropped at random, or repeated at times in between.

    Peaks stay as long as they were. Source: OOCO 5.1.3.
    """
    rng, rows = random.Random(seed), []
    whole = int(factor)
    for place, one in enumerate(arrivals):
        next_s = arrivals[place + 1].at_s if place + 1 < len(arrivals) else one.at_s
        copies = whole + (rng.random() < factor - whole)
        for copy in range(copies):
            at_s = one.at_s + (next_s - one.at_s) * copy / copies
            rows.append((at_s, one.prompt_tokens, one.output_tokens))
    return _trace(Task.ONLINE, rows)


def offline_load(lengths: Lengths, rate_rps: float, duration_s: float) -> Trace:
    """Requests at a uniform rate, of the lengths in turn. Source: OOCO 5.2."""
    num = int(rate_rps * duration_s)
    return _trace(Task.OFFLINE, [(n / rate_rps, *lengths[n % len(lengths)]) for n in range(num)])


def at_once(lengths: Lengths) -> Trace:
    """Online requests that all come at 0 s."""
    return _trace(Task.ONLINE, [(0.0, *pair) for pair in lengths])


def offline_lengths(job: str, *, seed: int) -> Lengths:
    """Prompt and answer lengths of an offline job.

    "ooc": log-normal around OOCO's published means; "arxiv": those of a summarization set;
    "reasoning": log-normal, short prompts and long answers.
    Errors: `WorkloadError` names the job that is not known, or the file that is not there.
    """
    if job == "arxiv":
        rows = [line.split(",") for _, line in read_lines(find_data(ARXIV))]
        pairs = [(int(row[0]), max(1, int(row[1]))) for row in rows[1:]]
        random.Random(seed).shuffle(pairs)
        return pairs
    if job not in _DRAWN_MEANS:
        raise WorkloadError(f"--job is {job!r}; known are {', '.join(JOBS)}")
    rng, (prompt, output) = random.Random(seed), _DRAWN_MEANS[job]
    return [(_drawn(rng, prompt), _drawn(rng, output)) for _ in range(NUM_DRAWN)]


def scaled_lengths(arrivals: Sequence[Arrival]) -> Lengths:
    """The trace's lengths, scaled to the means of the load behind OOCO's table 6."""
    prompt = TABLE_6_PROMPT_TOKENS * len(arrivals) / sum(one.prompt_tokens for one in arrivals)
    output = TABLE_6_OUTPUT_TOKENS * len(arrivals) / sum(one.output_tokens for one in arrivals)
    return [
        (max(1, round(one.prompt_tokens * prompt)), max(1, round(one.output_tokens * output)))
        for one in arrivals
    ]


def mean_context(pairs: Lengths) -> float:
    """Tokens that a decode of such requests attends to on the average."""
    outputs = sum(output for _, output in pairs)
    return sum(output * (prompt + output / 2) for prompt, output in pairs) / max(1, outputs)


def lengths_of(trace: Trace) -> Lengths:
    return list(zip(trace.prompt_tokens, trace.output_tokens, strict=True))


def _drawn(rng: random.Random, mean: float) -> int:
    value = mean * rng.lognormvariate(-(LENGTH_SIGMA**2) / 2, LENGTH_SIGMA)
    return min(MOST_TOKENS, max(1, round(value)))


def _trace(task: Task, rows: Sequence[tuple[Any, ...]]) -> Trace:
    at_s, prompts, outputs = zip(*rows, strict=True) if rows else ((), (), ())
    return Trace(task, array("d", at_s), array("q", prompts), array("q", outputs))
