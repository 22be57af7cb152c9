"""Loads that nobody chose: lengths, rates, bursts and jobs drawn from one seed."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echo_sgl.sim.workload import Trace
from echo_sgl.types import Task

BLOCK_TOKENS = 16
PHASE_S = 10.0
# Of the pool: no request is larger.
MOST_PROMPT, MOST_ANSWER = 0.25, 0.125
NUM_SYSTEM_PROMPTS, SHARING = 5, 0.8
LINES_PER_DOCUMENT = 8
# Ids of blocks: system prompts, what one online request has alone, documents, the same offline.
_SYSTEM, _ONLINE, _DOCUMENT, _OFFLINE = (number << 50 for number in range(1, 5))
_APART = 1 << 20


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens: their median, and the spread of their logarithms."""

    median: float
    sigma: float

    def draw(self, rng: random.Random, most: float) -> int:
        tokens = round(self.median * math.exp(rng.gauss(0.0, self.sigma)))
        return max(1, min(int(most), tokens))

    def __str__(self) -> str:
        return f"{self.median:,.0f} ({self.sigma:.1f})"


@dataclass(frozen=True, slots=True)
class ChanceLoad:
    """An online load and a job for a server with `pool_tokens` of KV.

    `shared`: how much of a prompt four of five online requests have in common with others. `load`:
    the mean rate as a share of what the server answers alone. `clumps`: standard deviation of the
    gaps between arrivals over their mean; `swing`: how many times as many come in every other
    `PHASE_S`. A line asks one of `LINES_PER_DOCUMENT` questions about a document.
    """

    seed: int
    pool_tokens: int
    prompts: Lengths
    answers: Lengths
    shared: float
    load: float
    clumps: float
    swing: float
    document_tokens: int
    questions: Lengths
    offline_answers: Lengths

    @classmethod
    def draw(cls, seed: int, *, pool_tokens: int, scale: float) -> ChanceLoad:
        """`scale`: of lengths, for servers that are larger; prompts grow with it, answers less."""
        rng = random.Random(seed)

        def tokens(low: float, high: float, times: float, most_sigma: float) -> Lengths:
            median = times * math.exp(rng.uniform(math.log(low), math.log(high)))
            return Lengths(median, rng.uniform(0.0, most_sigma))

        return cls(
            seed,
            pool_tokens,
            prompts=tokens(30, 800, scale, 1.3),
            answers=tokens(3, 120, math.sqrt(scale), 1.2),
            shared=rng.choice((0.0, 0.0, 0.5, 0.9)),
            load=rng.uniform(0.15, 0.75),
            clumps=rng.choice((1.0, 1.0, 2.0, 4.0)),
            swing=rng.choice((1.0, 1.0, 4.0)),
            document_tokens=round(scale * rng.choice((0, 0, 200, 800, 2000))),
            questions=tokens(10, 600, scale, 1.0),
            offline_answers=tokens(1, 150, math.sqrt(scale), 1.0),
        )

    def __str__(self) -> str:
        return (
            f"prompts {self.prompts}, answers {self.answers}, {self.shared:.0%} shared, "
            f"{self.load:.0%} of the rate, clumps {self.clumps:g}, swing {self.swing:g}; documents "
            f"{self.document_tokens:,}, questions {self.questions}, answers {self.offline_answers}"
        )

    def at_once(self, count: int) -> Trace:
        """So many online requests at the same moment, to find out how many a second are answered.

        Others than those of `online`, of the same lengths.
        """
        rng = random.Random(f"{self.seed} at once")
        return self._online(rng, array("d", (0.0,)) * count)

    def online(self, rate_rps: float, *, start_s: float, duration_s: float) -> Trace:
        """Online requests at `rate_rps` times `load` in the mean."""
        rng = random.Random(f"{self.seed} online")
        times = self._times_s(rng, rate_rps * self.load, duration_s)
        return self._online(rng, array("d", (start_s + at_s for at_s in times)))

    def job(self, count: int) -> Trace:
        """The first so many of the job's lines; all are there from the beginning."""
        rng = random.Random(f"{self.seed} job")
        prompts, answers, blocks = array("q"), array("q"), []
        for line in range(count):
            document_tokens = min(self.document_tokens, int(MOST_PROMPT * self.pool_tokens))
            question = self.questions.draw(rng, MOST_PROMPT * self.pool_tokens)
            prompts.append(document_tokens + question)
            answers.append(self.offline_answers.draw(rng, MOST_ANSWER * self.pool_tokens))
            first = _DOCUMENT + line // LINES_PER_DOCUMENT * _APART
            shared = range(first, first + document_tokens // BLOCK_TOKENS)
            blocks.append(_path(prompts[-1], shared, _OFFLINE + line * _APART))
        order = list(range(count))
        rng.shuffle(order)
        return _trace(Task.OFFLINE, array("d", (0.0,)) * count, prompts, answers, blocks).pick(
            order
        )

    def _online(self, rng: random.Random, times: array[float]) -> Trace:
        prompts, answers, blocks = array("q"), array("q"), []
        for number in range(len(times)):
            prompts.append(self.prompts.draw(rng, MOST_PROMPT * self.pool_tokens))
            answers.append(self.answers.draw(rng, MOST_ANSWER * self.pool_tokens))
            first = _SYSTEM + rng.randrange(NUM_SYSTEM_PROMPTS) * _APART
            part = self.shared if rng.random() < SHARING else 0.0
            shared = range(first, first + int(part * prompts[-1]) // BLOCK_TOKENS)
            blocks.append(_path(prompts[-1], shared, _ONLINE + number * _APART))
        return _trace(Task.ONLINE, times, prompts, answers, blocks)

    def _times_s(self, rng: random.Random, mean_rps: float, duration_s: float) -> Iterator[float]:
        """Gamma gaps, as long as the phase at their beginning has them."""
        at_s, shape = 0.0, 1.0 / self.clumps**2
        while True:
            is_high = int(at_s // PHASE_S) % 2 == 0
            rate_rps = mean_rps * (self.swing if is_high else 1.0) / ((self.swing + 1.0) / 2.0)
            at_s += rng.gammavariate(shape, 1.0 / (shape * rate_rps))
            if at_s >= duration_s:
                return
            yield at_s


def _path(prompt_tokens: int, shared: range, own: int) -> array[int]:
    num_own = -(-prompt_tokens // BLOCK_TOKENS) - len(shared)
    return array("q", (*shared, *range(own, own + num_own)))


def _trace(
    task: Task,
    times: array[float],
    prompts: array[int],
    answers: array[int],
    blocks: Sequence[array[int]],
) -> Trace:
    return Trace(
        task,
        times,
        prompts,
        answers,
        blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        max_new_tokens=max(answers, default=1),
        allowed_tokens=answers,
        ignores_eos=True,
    )
