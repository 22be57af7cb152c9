"""What a replay sends: the requests of a trace with fresh prompts, and offline work beside them."""

from __future__ import annotations

import codecs
import itertools
import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from echo_sgl.batches.lines.job_line import LineError, is_blank, parse_line
from echo_sgl.errors import EchoError
from echo_sgl.sim.server_config import PROMPT_MARGIN_TOKENS
from echo_sgl.sim.text_files import open_text_file
from echo_sgl.sim.trace_columns import TraceFileError
from echo_sgl.sim.workload import Trace
from echo_sgl.types import OFFLINE_SERVICE_TIER

MAX_JOB_LINES = 50_000
FIRST_TOKEN_ID = 16
ANSWER_MARGIN_TOKENS = 2  # that SGLang keeps free behind an answer
# Of synthetic offline work: documents that several requests in turn ask about.
DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, QUESTIONS = 512, 64, 64, 8


class ReplayError(EchoError, RuntimeError):
    """A replay cannot tell how long requests take; the message says why."""


class OfflineBody(NamedTuple):
    """Where to post, and what; `line`: its number in the job's file, 0 for synthetic work."""

    url: str
    body: dict[str, Any]
    line: int = 0


class ReplayLoad:
    """One trace and one job as often as asked, for the server that these facts are of.

    `num_cut`: requests of the trace that are longer than the server takes, and are sent shorter.
    """

    def __init__(
        self,
        trace: Trace,
        server: Mapping[str, Any],
        *,
        jobs: Path | None,
        speed: float,
        rng: random.Random,
    ) -> None:
        self._vocab, self._random = int(server["vocab"]), rng
        self._most_tokens = min(server["max_context_tokens"], server["max_total_tokens"])
        lengths = list(zip(trace.prompt_tokens, trace.output_tokens, strict=True))
        fitting = [self._fitting(*one) for one in lengths]
        self.num_cut = sum(ours != theirs for ours, theirs in zip(fitting, lengths, strict=True))
        self.arrivals = [
            (at_s / speed, *one) for at_s, one in zip(trace.at_s, fitting, strict=True)
        ]
        self._blocks, self._block_tokens = trace.blocks, trace.block_tokens
        self._lines = read_job(jobs) if jobs else None
        self._refused: dict[int, str] = {}

    def online_bodies(self) -> Iterator[dict[str, Any]]:
        """Requests of a replay: their prompts share what those of the trace do."""
        texts: dict[int, list[int]] = {}
        for place, (_, num_tokens, output_tokens) in enumerate(self.arrivals):
            prompt: list[int] = []
            for block in self._blocks[place] if self._blocks else ():
                if len(prompt) >= num_tokens:
                    break
                if block not in texts:
                    texts[block] = self._tokens(self._block_tokens)
                prompt += texts[block]
            prompt += self._tokens(num_tokens - len(prompt))
            yield _generate_body(prompt[:num_tokens], output_tokens) | {"stream": True}

    def offline_bodies(self) -> Iterator[OfflineBody]:
        """Without end. Errors: `ReplayError` once the server has refused every line of the job."""
        while self._lines is not None:
            if len(self._refused) == len(self._lines):
                raise ReplayError(f"no line of the job is left: {self._refusals()}")
            for number, one in self._lines.items():
                if number not in self._refused:
                    yield one._replace(body=one.body | {"service_tier": OFFLINE_SERVICE_TIER})
        yield from self._synthetic()

    def refuse(self, line: int, reason: str) -> None:
        """Leave out a line of the job that the server does not take."""
        self._refused[line] = reason

    def notes(self) -> Iterator[str]:
        """What was sent otherwise than the trace and the job say."""
        if self.num_cut:
            yield (
                f"{self.num_cut} of {len(self.arrivals)} requests of the trace are longer than "
                f"the server takes, {self._most_tokens:,} tokens of prompt and answer, and were "
                "sent shorter: the SLO is that of these"
            )
        if self._refused:
            yield self._refusals()

    def _refusals(self) -> str:
        line, reason = min(self._refused.items())
        return (
            f"the server refuses {len(self._refused)} of {len(self._lines or ())} lines of the "
            f"job, first line {line}: {reason}"
        )

    def _synthetic(self) -> Iterator[OfflineBody]:
        # Short beside a small pool, where offline work must leave room for others.
        most = min(DOCUMENT_TOKENS + QUESTION_TOKENS, self._most_tokens // 2 - ANSWER_TOKENS)
        tier = {"service_tier": OFFLINE_SERVICE_TIER}
        while True:
            document = self._tokens(DOCUMENT_TOKENS)
            for _ in range(QUESTIONS):
                prompt = (document + self._tokens(QUESTION_TOKENS))[: max(1, most)]
                body = _generate_body(prompt, ANSWER_TOKENS, custom_params=tier)
                yield OfflineBody("/generate", body)

    def _fitting(self, prompt_tokens: int, output_tokens: int) -> tuple[int, int]:
        """Lengths that the server takes: the trace may come from a larger model."""
        prompt_tokens = min(prompt_tokens, self._most_tokens - PROMPT_MARGIN_TOKENS - 1)
        room = self._most_tokens - ANSWER_MARGIN_TOKENS - prompt_tokens
        return prompt_tokens, min(output_tokens, room)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN_ID, self._vocab) for _ in range(count)]


def read_job(path: Path) -> dict[int, OfflineBody]:
    """The lines of a job file by their numbers; a byte order mark and blank lines are skipped.

    It may be gzip'd, as `echo-sgl plan` reads it.

    Errors: `TraceFileError` names the first bad line.
    """
    try:
        with open_text_file(path) as file:
            raw = list(itertools.islice(file, MAX_JOB_LINES))
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceFileError(f"job file {path} cannot be read: {why}") from error
    lines: dict[int, OfflineBody] = {}
    for number, whole in enumerate(raw, 1):
        content = whole.removeprefix(codecs.BOM_UTF8) if number == 1 else whole
        if is_blank(content):
            continue
        try:
            line = parse_line(content.rstrip(b"\r\n"))
        except LineError as error:
            raise TraceFileError(f"job file {path}, line {number}: {error}") from error
        lines[number] = OfflineBody(line.url, dict(line.body), number)
    if not lines:
        raise TraceFileError(f"job file {path} is empty; leave --jobs out for synthetic lines")
    return lines


def _generate_body(prompt: list[int], output_tokens: int, **sampling: Any) -> dict[str, Any]:
    options = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True, **sampling}
    return {"input_ids": prompt, "sampling_params": options}
