"""Whether an offline prefill waits for room in which its step's fixed cost weighs less."""

from __future__ import annotations

import math

from echo_sgl.estimators.batch_time import StepPredictor, prefill_alone_s

# Lengths that are tried, each so many times the one before.
GROWTH = 1.25
# A length is looked for again after so many uses: the estimator learns.
USES = 256
# Cached tokens that count as one length.
CACHED_TOKENS = 512
# And stalls.
STALL_S = 0.005
# A wait takes no more steps than this, and the room grows fast enough for that.
MOST_STEPS = 48
# What it costs a wait that an online prefill came between: after a few, it ends.
STEPS_PER_INTERRUPTION = 16


class ChunkWait:
    """Prefills that wait while the room for them grows, up to the length that is worth a step.

    Where a step prefills or decodes, a prefill step costs a fixed part however little is in it:
    on a GPU the weights are read for one token as for hundreds. Whoever fills what little room
    each decode leaves pays that part for each few tokens. Slack that is not used is kept, so a
    little later there is room for more. A chunk is worth its step when a token of it takes at
    most `1 + overhead` times what one takes in the best chunk that no stall forbids.

    Nothing waits for room that does not grow from step to step by its part of what is missing:
    then decodes use up what there is, and waiting brings little. Nor after `MOST_STEPS`, each
    online prefill in between counting as several: who comes often leaves no room to grow.

    Source: ours; the numbers were found in simulation. Units: tokens, seconds. Deterministic:
    every rank asks the same.
    """

    def __init__(self, overhead: float, shortest_tokens: int, longest_tokens: float) -> None:
        self._overhead = overhead
        self._shortest, self._longest = shortest_tokens, longest_tokens
        self.awaited_s = 0.0
        """What the chunk takes that is waited for, 0 when none is."""
        self._num_steps = 0
        # The room to be had at least, in the next step of this wait, to wait on.
        self._next_room_s = -math.inf
        # By cached tokens and stall: the length, and how often it may be used yet.
        self._worth: dict[tuple[int, int], tuple[int, int]] = {}

    def waits(
        self,
        room_s: float,
        predictor: StepPredictor,
        *,
        stall_s: float,
        cached_tokens: int,
        left_tokens: float,
    ) -> bool:
        """Whether a prefill that has `room_s` waits; no chunk of it may take above `stall_s`.

        `left_tokens`: what there is to prefill; it needs no room for more.
        """
        if left_tokens < 1 or not self._overhead:
            return False
        if self._num_steps < MOST_STEPS and room_s >= self._next_room_s:
            tokens = min(left_tokens, self.tokens(predictor, stall_s, cached_tokens))
            worth_s = prefill_alone_s(predictor, int(tokens), cached_tokens)
            if worth_s > room_s:
                self._num_steps += 1
                self._next_room_s = room_s + (worth_s - room_s) / MOST_STEPS
                self.awaited_s = worth_s
                return True
        self._num_steps, self._next_room_s = 0, -math.inf
        return False

    def interrupt(self) -> None:
        """An online prefill takes its turn: what it leaves of the room says nothing of growth."""
        if self._num_steps:
            self._num_steps += STEPS_PER_INTERRUPTION
            self._next_room_s = -math.inf

    @property
    def facts(self) -> dict[str, float]:
        """What is waited for, for people who ask; nothing where that is not why one waits."""
        return {"worth_chunk_s": self.awaited_s} if self.awaited_s else {}

    def tokens(self, predictor: StepPredictor, stall_s: float, cached_tokens: int) -> int:
        """The length of the shortest chunk that is worth a step, behind so many cached tokens."""
        if not self._overhead:
            return self._shortest
        key = cached_tokens // CACHED_TOKENS, int(stall_s / STALL_S)
        tokens, num_uses = self._worth.get(key, (0, 0))
        if not num_uses:
            if len(self._worth) > USES:
                self._worth.clear()
            tokens, num_uses = self._look(predictor, stall_s, cached_tokens), USES
        self._worth[key] = tokens, num_uses - 1
        return tokens

    def _look(self, predictor: StepPredictor, stall_s: float, cached_tokens: int) -> int:
        times: list[tuple[int, float]] = []
        tokens = self._shortest
        while tokens <= self._longest:
            time_s = prefill_alone_s(predictor, tokens, cached_tokens)
            if times and time_s > stall_s:
                break
            times.append((tokens, time_s / tokens))
            tokens = math.ceil(tokens * GROWTH)
        if not times:
            return self._shortest
        bound_s = (1.0 + self._overhead) * min(token_s for _, token_s in times)
        return next(tokens for tokens, token_s in times if token_s <= bound_s)
