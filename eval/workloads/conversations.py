"""Conversations as a trace: many held at once, each prompt goes on from the one before.

Their files hold texts, and times of servers of their own or none. So lengths are counted in
characters, times are drawn, and what two prompts share is compared exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from eval.workloads.sessions import Call
from eval.workloads.traces import Arrival

CHARS_PER_TOKEN = 4
BLOCK_TOKENS = 128
AT_ONCE = 8  # conversations that are held at the same time, each lane one after the other
_BLOCK_CHARS = CHARS_PER_TOKEN * BLOCK_TOKENS


def conversation_trace(
    sessions: Sequence[Sequence[Call]], *, seed: int, at_once: int = AT_ONCE
) -> list[Arrival]:
    """The calls of all sessions in order of time, the first at 0 s; one a second in each lane.

    Between two calls lies an exponential time, of no server's answers: who replays a trace
    stretches it to a rate. `at_once`: lanes; a session begins where one has ended.
    """
    rng = random.Random(seed)
    blocks = _Blocks()
    free_at_s = [rng.expovariate(1.0) for _ in range(at_once)]
    arrivals: list[Arrival] = []
    for session in rng.sample(sessions, len(sessions)):
        lane = free_at_s.index(min(free_at_s))
        for prompt, answer in session:
            arrivals.append(_arrival(free_at_s[lane], prompt, answer, blocks))
            free_at_s[lane] += rng.expovariate(1.0)
    arrivals.sort(key=lambda one: one.at_s)
    return [replace(one, at_s=one.at_s - arrivals[0].at_s) for one in arrivals]


class _Blocks:
    """Numbers for stretches of text: the same one for the same text behind the same start."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def of(self, text: str) -> tuple[int, ...]:
        return tuple(self._chain(text))

    def _chain(self, text: str) -> Iterator[int]:
        before = -1
        for start in range(0, len(text), _BLOCK_CHARS):
            key = before, text[start : start + _BLOCK_CHARS]
            before = self._numbers.setdefault(key, len(self._numbers))
            yield before


def _arrival(at_s: float, prompt: str, answer: str, blocks: _Blocks) -> Arrival:
    return Arrival(
        at_s,
        prompt_tokens=max(1, round(len(prompt) / CHARS_PER_TOKEN)),
        output_tokens=max(1, round(len(answer) / CHARS_PER_TOKEN)),
        blocks=blocks.of(prompt),
        block_tokens=float(BLOCK_TOKENS),
    )
