"""Which of the first few offline requests in line is prefilled next.

The offline order is right in the long run: it knows the prefixes of all that wait. Weighing
looks at this step: what is in the cache now, what would be evicted, how long it would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from echo_sgl.batch_shape import BatchShape
from echo_sgl.policies.order.candidates import Candidate, Victims, length_bucket, rank

if TYPE_CHECKING:
    from echo_sgl.engine.cache.tree_core import EchoTreeCore
    from echo_sgl.engine.pool.deadlines import DeadlineWatch
    from echo_sgl.estimators.batch_time import StepPredictor

# Who was passed over so often goes first: what the order picked for its age is never lost.
MAX_PASSED_OVER = 8


class Weighing:
    """Echo's benefit less punishment per second, over the first `num_candidates` in line."""

    def __init__(
        self, core: EchoTreeCore, allocator: Any, watch: DeadlineWatch, num_candidates: int
    ) -> None:
        self._core, self._allocator, self._watch = core, allocator, watch
        self._num_candidates = num_candidates
        self._in_line: Any = None

    def reorder(
        self, offered: Sequence[Any], predictor: StepPredictor, bucket: int | None, now_s: float
    ) -> tuple[Any, ...]:
        """The same requests, the best of the first few first; all else as it was.

        `bucket`: of the mean length of what decodes, see `mean_bucket`.
        """
        self._in_line = offered[0] if offered else None
        head = offered[: self._num_candidates]
        if len(head) < 2:
            return tuple(offered)
        victims = Victims(self._core.next_victims())
        free_tokens = self._allocator.available_size()
        candidates = [self._candidate(req, victims, free_tokens, now_s) for req in head]
        ranked = rank(candidates, BatchShape(), predictor, bucket=bucket)
        places = {rid: place for place, rid in enumerate(ranked)}
        head = sorted(head, key=lambda req: (not _is_due(req), places[req.rid]))
        return (*head, *offered[len(head) :])

    def note_started(self, started: Sequence[Any]) -> None:
        """Who was first in line and did not start while others did was passed over."""
        in_line, self._in_line = self._in_line, None
        if in_line is not None and started and in_line not in started:
            in_line.echo_passed_over = getattr(in_line, "echo_passed_over", 0) + 1

    def _candidate(self, req: Any, victims: Victims, free_tokens: int, now_s: float) -> Candidate:
        prompt = req.origin_input_ids
        if req.output_ids:
            prompt = prompt + req.output_ids
        cached_tokens = min(self._core.cached_tokens(req, prompt), len(prompt) - 1)
        new_tokens = len(prompt) - cached_tokens
        return Candidate(
            rid=req.rid,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            evicted_needed_tokens=victims.needed_tokens(new_tokens - free_tokens),
            laxity_s=self._watch.laxity_s(req, now_s),
            length_bucket=length_bucket(len(prompt)),
        )


def _is_due(req: Any) -> bool:
    return getattr(req, "echo_passed_over", 0) >= MAX_PASSED_OVER
