"""Which of the first few offline requests in line is prefilled next.

The offline order is right in the long run: it knows the prefixes of all that wait. Weighing
looks at this step: what is in the cache now, what would be evicted, how long it would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from echo_sgl.batch_shape import BatchShape
from echo_sgl.policies.candidates import Candidate, length_bucket, rank
from echo_sgl.policies.eviction_order import Worth, worth_of

if TYPE_CHECKING:
    from echo_sgl.engine.deadlines import DeadlineWatch
    from echo_sgl.engine.tree_core import EchoTreeCore
    from echo_sgl.policies.step_planner import StepPlanner

# Leaves that are looked at to tell what an eviction would hit; a step evicts a few.
MAX_VICTIMS = 16
# Who was passed over so often goes first: what the order picked for its age is never lost.
MAX_PASSED_OVER = 8


class Weighing:
    """Echo's benefit less punishment per second, over the first `num_candidates` in line."""

    def __init__(
        self, core: EchoTreeCore, allocator: Any, watch: DeadlineWatch, num_candidates: int
    ) -> None:
        self._core, self._allocator, self._watch = core, allocator, watch
        self._num_candidates = num_candidates

    def reorder(
        self, offered: Sequence[Any], planner: StepPlanner, now_s: float
    ) -> tuple[Any, ...]:
        """The same requests, the best of the first few first; all else as it was."""
        head = offered[: self._num_candidates]
        if len(head) < 2 or not planner.estimator.is_ready:
            return tuple(offered)
        victims = self._next_victims()
        candidates = [self._candidate(req, victims, now_s) for req in head]
        ranked = rank(candidates, BatchShape(), planner.estimator.upper)
        places = {rid: place for place, rid in enumerate(ranked)}
        head = sorted(head, key=lambda req: (not _is_due(req), places[req.rid]))
        self._note_passed_over(offered[0], head[0])
        return (*head, *offered[len(head) :])

    def _note_passed_over(self, in_line: Any, preferred: Any) -> None:
        if preferred is not in_line:
            in_line.echo_passed_over = getattr(in_line, "echo_passed_over", 0) + 1

    def _candidate(self, req: Any, victims: list[tuple[int, bool]], now_s: float) -> Candidate:
        prompt = req.origin_input_ids + req.output_ids
        cached_tokens = min(self._core.cached_tokens(req, prompt), len(prompt) - 1)
        new_tokens = len(prompt) - cached_tokens
        return Candidate(
            rid=req.rid,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            evicted_needed_tokens=self._needed_among(victims, new_tokens),
            age_s=0.0,
            laxity_s=self._watch.laxity_s(req, now_s),
            length_bucket=length_bucket(len(prompt)),
        )

    def _next_victims(self) -> list[tuple[int, bool]]:
        """Tokens of the leaves that go first, and whether pending requests need them."""
        return [
            (num_tokens, worth_of(facts) is Worth.PENDING)
            for num_tokens, facts in islice(self._core.next_victims(), MAX_VICTIMS)
        ]

    def _needed_among(self, victims: list[tuple[int, bool]], new_tokens: int) -> int:
        """What would be evicted for so many new tokens although requests wait for it."""
        missing, needed = new_tokens - self._allocator.available_size(), 0
        for num_tokens, is_needed in victims:
            if missing <= 0:
                break
            needed += min(missing, num_tokens) if is_needed else 0
            missing -= num_tokens
        return needed


def _is_due(req: Any) -> bool:
    return getattr(req, "echo_passed_over", 0) >= MAX_PASSED_OVER
