"""What the cache experiments send, and the pool that it is sent to: the same for every arm."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echo_sgl.types import Task
from eval.arms import Arm
from eval.cache.options import CacheOptions
from eval.load.client import Request, make_request
from eval.load.mix import SERVED_MODEL, offline_requests
from eval.workloads import WorkloadError, find_data
from eval.workloads.bounds import belady_hits, infinite_hits, shared_tokens
from eval.workloads.jobs import (
    COMPLETIONS_URL,
    BatchLine,
    limit_answers,
    shuffled,
    text_set_files,
    text_set_lines,
)
from eval.workloads.patterns import poisson_arrivals
from eval.workloads.prompts import SyntheticText, Tokenizer
from eval.workloads.sessions import Session, SessionLimits, Turn, load_sessions
from eval.workloads.traces import read_trace, scale_lengths

MIN_REQUESTS_IN_POOL = 2
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """Both loads before an arm's request fields are added.

    `prompts` holds the token ids of the job's lines by their ids, in the order of sending.
    """

    job: list[BatchLine]
    prompts: dict[str, list[int]]
    answer_tokens: int
    pool_tokens: int
    pool_note: str
    sessions: list[Session] = field(default_factory=list)
    online: list[tuple[float, Turn]] = field(default_factory=list)

    def lines(self, arm: Arm) -> list[Request]:
        return offline_requests(self.job, arm, stream=False)

    def talks(self, arm: Arm) -> list[list[tuple[float, Request]]]:
        """Per session each turn's wait (s after the answer before) and its request."""
        return [
            [
                (turn.think_s, _online(f"{session.name}/{number}", arm, turn))
                for number, turn in enumerate(session.turns)
            ]
            for session in self.sessions
        ]

    def schedule(self, arm: Arm) -> list[tuple[float, Request]]:
        """The burst experiment's online requests with their times (s from the start)."""
        return [
            (at_s, _online(f"online-{number}", arm, turn))
            for number, (at_s, turn) in enumerate(self.online)
        ]

    def facts(self) -> Tree:
        """Sizes for config.json."""
        prompts = list(self.prompts.values())
        return {
            "lines": len(self.job),
            "prompt_tokens": sum(map(len, prompts)),
            "prefix_working_set_tokens": shared_tokens(prompts),
            "pool_tokens": self.pool_tokens,
            "pool_note": self.pool_note,
            "sessions": len(self.sessions),
            "turns": sum(len(session.turns) for session in self.sessions),
            "online_requests": len(self.online),
        }

    def bounds(self) -> dict[str, int]:
        """Hit tokens of caches that no real one beats, for the orders that the arms use."""
        prompts = list(self.prompts.values())
        pool = {"capacity_tokens": self.pool_tokens, "answer_tokens": self.answer_tokens}
        return {
            "infinite": infinite_hits(prompts),
            "belady, file order": belady_hits(prompts, **pool),
            "belady, prefix order": belady_hits(sorted(prompts), **pool),
        }


def build_load(options: CacheOptions, job_name: str, tokenizer: Tokenizer) -> CacheLoad:
    """Read the job and make the experiment's online load.

    Errors: `WorkloadError` for bad files, and when a request cannot fit into the pool.
    """
    job = _job(options, job_name, tokenizer)
    prompts = {line["custom_id"]: tokenizer.encode(line["body"]["prompt"]) for line in job}
    answer_tokens = max(line["body"]["max_tokens"] for line in job)
    longest = max(map(len, prompts.values())) + answer_tokens
    sessions: list[Session] = []
    online: list[tuple[float, Turn]] = []
    if options.experiment == "overlap":
        sessions = _sessions(options, tokenizer)
        longest = max(longest, options.session_tokens + options.session_answer_tokens)
    if options.experiment == "burst":
        online = _burst(options, tokenizer)
    pool_tokens, note = pool_size(options, list(prompts.values()), longest)
    return CacheLoad(job, prompts, answer_tokens, pool_tokens, note, sessions, online)


def pool_size(
    options: CacheOptions, prompts: Sequence[Sequence[int]], longest_tokens: int
) -> tuple[int, str]:
    """Tokens of the KV pool and the words that say where they come from.

    Errors: `WorkloadError` when a given pool is too small for `MIN_REQUESTS_IN_POOL` requests.
    """
    least = MIN_REQUESTS_IN_POOL * longest_tokens
    if options.pool_tokens:
        if options.pool_tokens < least:
            raise WorkloadError(
                f"--pool-tokens is {options.pool_tokens}; the longest request needs "
                f"{longest_tokens}, and {MIN_REQUESTS_IN_POOL} of them shall fit: {least} or more"
            )
        return options.pool_tokens, "given"
    working_set = shared_tokens(prompts)
    wanted = round(options.pool_share * working_set)
    share = f"{options.pool_share:g} of the prefix working set of {working_set} tokens"
    if wanted >= least:
        return wanted, share
    note = f"{share} would be {wanted}; {MIN_REQUESTS_IN_POOL} longest requests need {least}"
    return least, note


def _job(options: CacheOptions, job_name: str, tokenizer: Tokenizer) -> list[BatchLine]:
    """The set's lines in mixed order, the first `requests` of them."""
    lines = text_set_lines(
        text_set_files(job_name),
        tokenizer,
        model=SERVED_MODEL,
        document_tokens=options.document_tokens,
    )
    mixed = shuffled(lines, options.seed)[: options.requests or None]
    if not mixed:
        raise WorkloadError(f"the text set {job_name} holds no request")
    return limit_answers(mixed, options.max_answer_tokens)


def _sessions(options: CacheOptions, tokenizer: Tokenizer) -> list[Session]:
    limits = SessionLimits(
        options.session_tokens, options.session_answer_tokens, options.think_s, options.seed
    )
    return load_sessions(options.session_sets, tokenizer, limits, options.num_sessions)


def _burst(options: CacheOptions, tokenizer: Tokenizer) -> list[tuple[float, Turn]]:
    """Requests of a trace's lengths, steady and in bursts; no two prompts share a start."""
    trace = read_trace(find_data(options.trace))
    lengths = scale_lengths(
        trace, options.length_scale, max_prompt_tokens=options.max_prompt_tokens
    )
    times_s = list(poisson_arrivals(options.burst_segments, random.Random(options.seed)))
    if len(times_s) > len(lengths):
        raise WorkloadError(f"{len(times_s)} requests are needed, the trace has {len(lengths)}")
    texts = SyntheticText(tokenizer, options.seed)
    return [
        (at_s, Turn(texts.text(index, one.prompt_tokens), one.output_tokens))
        for index, (at_s, one) in enumerate(zip(times_s, lengths, strict=False))
    ]


def _online(name: str, arm: Arm, turn: Turn) -> Request:
    body: Mapping[str, Any] = {
        "model": SERVED_MODEL,
        "prompt": turn.prompt,
        "max_tokens": turn.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **arm.fields(Task.ONLINE),
    }
    return make_request(name, Task.ONLINE, COMPLETIONS_URL, body)
