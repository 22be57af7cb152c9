"""Requests of a simulation: what the scheduler may see of them, and what only the engine knows.

prompt    |block 17      |block 18      |19  |    one id per block, the last may be short
answer                                       |-1 |-2    |   stretches, closed when it loses its row
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from echo_sgl.types import Task

BLOCK_TOKENS = 64
# SGLang plans no more than this for an answer, however long it may be.
MOST_PLANNED_TOKENS = 4096
# Ids of prompts that nobody shares: other ones in each class, and no file's.
_UNSHARED = {Task.ONLINE: 1 << 62, Task.OFFLINE: 3 << 61}


class SimRequest:
    """A request as the simulated scheduler sees it; its true answer length is not here.

    `blocks` and `sizes`: ids and tokens of what its path through the prefix tree holds.
    `prefix_tokens`: found in the tree when it started. `protected_tokens`: of its KV, what
    the tree holds for it under lock. `computed_tokens`: of its prompt, while it prefills.
    `counted_tokens`: what the rate of offline work knows of.
    `cached_tokens`: found when it started for the first time, as its client is told.
    `max_new_tokens`: what its client allowed; `planned_tokens`: what SGLang plans of that.
    Units: tokens, seconds.
    """

    __slots__ = (
        "arrival_s",
        "blocks",
        "cached_tokens",
        "computed_tokens",
        "counted_tokens",
        "deadline_s",
        "first_token_s",
        "group",
        "is_offline",
        "joined_step",
        "max_new_tokens",
        "needed_tokens",
        "node",
        "num_passed_over",
        "number",
        "outputs_at_join",
        "prefix_tokens",
        "prompt_tokens",
        "protected_tokens",
        "rid",
        "sequence",
        "sizes",
        "ticket",
        "waiting_since_s",
        "was_set_aside",
    )

    def __init__(
        self,
        number: int,
        task: Task,
        arrival_s: float,
        *,
        prompt_tokens: int,
        blocks: array[int],
        sizes: array[int],
        max_new_tokens: int,
        deadline_s: float = math.inf,
    ) -> None:
        self.number, self.is_offline = number, task is Task.OFFLINE
        self.rid = f"{task[1]}{number}"
        self.arrival_s, self.deadline_s = arrival_s, deadline_s
        self.prompt_tokens, self.max_new_tokens = prompt_tokens, max_new_tokens
        self.blocks, self.sizes = blocks, sizes
        self.sequence = -1
        self.first_token_s: float | None = None
        self.cached_tokens: int | None = None
        self.waiting_since_s: float | None = None
        self.was_set_aside = False
        self.group: DecodeClock | None = None
        self.joined_step = self.ticket = self.outputs_at_join = self.num_passed_over = 0
        self.needed_tokens = 0  # when the reserve held it back last; 0 if it started since
        self.node: object | None = None
        self.prefix_tokens = self.protected_tokens = self.computed_tokens = 0
        self.counted_tokens = 0

    @property
    def task(self) -> Task:
        return Task.OFFLINE if self.is_offline else Task.ONLINE

    @property
    def planned_tokens(self) -> int:
        """Tokens yet to come that admission makes room for."""
        return min(self.max_new_tokens - self.num_outputs, MOST_PLANNED_TOKENS)

    @property
    def clipped_tokens(self) -> int:
        """What is left of its answer beyond what SGLang plans."""
        return max(0, self.max_new_tokens - self.num_outputs - MOST_PLANNED_TOKENS)

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        if self.group is None:
            return self.outputs_at_join
        return self.outputs_at_join + self.group.step - self.joined_step

    @property
    def left_tokens(self) -> int:
        """What of it is to be prefilled yet."""
        return self.seq_tokens - self.computed_tokens

    @property
    def seq_tokens(self) -> int:
        """Prompt and generated tokens: what the next token attends to."""
        return self.prompt_tokens + self.num_outputs

    @property
    def uncached_tokens(self) -> int:
        """Tokens whose KV only this request holds: they are computed again if it is lost."""
        return max(0, self.seq_tokens - self.protected_tokens)

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV exists; that of the last generated one is yet to be computed."""
        return self.seq_tokens - 1 if self.group is not None else self.computed_tokens


class DecodeClock:
    """Counts decode steps: all its requests have made one token at each."""

    step = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, as columns: half a million of them are some megabytes.

    `blocks`: ids per request, equal where prompts share their KV; None when nothing is known,
    then every prompt is unlike all others. `deadline_s`: when all of it should be done.
    `allowed_tokens`: what each client allowed its answer; None where that is not known, then it is
    `max_new_tokens` for all. `ignores_eos`: answers are as long as allowed, and SGLang knows it.
    """

    task: Task
    at_s: array[float]
    prompt_tokens: array[int]
    output_tokens: array[int]
    blocks: Sequence[array[int]] | None = None
    block_tokens: int = BLOCK_TOKENS
    max_new_tokens: int = MOST_PLANNED_TOKENS
    deadline_s: float = math.inf
    allowed_tokens: array[int] | None = None
    ignores_eos: bool = False

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def duration_s(self) -> float:
        return self.at_s[-1] - self.at_s[0] if len(self) else 0.0

    def request(self, number: int) -> SimRequest:
        """The request of that number, without the length of its answer."""
        prompt_tokens, size = self.prompt_tokens[number], self.block_tokens
        num_blocks = -(-prompt_tokens // size)
        if self.blocks is not None:
            blocks = self.blocks[number]
        else:
            # One id stands for all that nobody shares.
            blocks = array("q", (_UNSHARED[self.task] + number,))
            size, num_blocks = prompt_tokens, 1
        sizes = array("q", (size,)) * num_blocks
        sizes[-1] = prompt_tokens - (num_blocks - 1) * size
        return SimRequest(
            number,
            self.task,
            self.at_s[number],
            prompt_tokens=prompt_tokens,
            blocks=blocks,
            sizes=sizes,
            max_new_tokens=self._allowed_tokens(number),
            deadline_s=self.deadline_s,
        )

    def _allowed_tokens(self, number: int) -> int:
        return self.max_new_tokens if self.allowed_tokens is None else self.allowed_tokens[number]

    def between(self, start_s: float, end_s: float) -> Trace:
        """The requests that arrive in [start_s, end_s), at their own times."""
        chosen = [i for i, at_s in enumerate(self.at_s) if start_s <= at_s < end_s]
        return self.pick(chosen)

    def pick(self, numbers: Sequence[int]) -> Trace:
        """Only these requests, in the order given."""
        return Trace(
            self.task,
            array("d", (self.at_s[i] for i in numbers)),
            array("q", (self.prompt_tokens[i] for i in numbers)),
            array("q", (self.output_tokens[i] for i in numbers)),
            blocks=None if self.blocks is None else [self.blocks[i] for i in numbers],
            block_tokens=self.block_tokens,
            max_new_tokens=self.max_new_tokens,
            deadline_s=self.deadline_s,
            allowed_tokens=None
            if self.allowed_tokens is None
            else array("q", (self.allowed_tokens[i] for i in numbers)),
            ignores_eos=self.ignores_eos,
        )


def empty_trace(task: Task) -> Trace:
    """A trace of nothing."""
    return Trace(task, array("d"), array("q"), array("q"))


class Oracle:
    """The true lengths of answers: only the simulated device asks it, never a policy.

    An answer is never longer than its request allows.
    """

    def __init__(self, online: Trace, offline: Trace) -> None:
        self._online, self._offline = online, offline

    def output_tokens(self, request: SimRequest) -> int:
        trace = self._offline if request.is_offline else self._online
        return max(1, min(trace.output_tokens[request.number], request.max_new_tokens))
