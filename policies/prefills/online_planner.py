"""Which online prefills join the next step, and when online decodes go before them."""

from __future__ import annotations

import math

from echo_sgl.batch_shape import BatchShape
from echo_sgl.config import StepsConfig
from echo_sgl.estimators.batch_time import StepEstimator, longest_prefill, prefill_alone_s
from echo_sgl.policies.limits.step_limit import OnlineView, StepLimit
from echo_sgl.policies.prefills.chunk_wait import ChunkWait
from echo_sgl.policies.prefills.first_tokens import Joining, starts_later, waits_for_prefix
from echo_sgl.policies.prefills.gathering import Gathering

# Online requests wait for others to start with in a queue that holds so many lots.
QUEUED_LOTS = 2


class OnlinePlanner:
    """The part of a `StepPlanner` about online prefills; what it asks about is set by `begin`."""

    limit: StepLimit
    estimator: StepEstimator
    packs: bool
    view: OnlineView
    chunk_wait: ChunkWait
    online_lots: Gathering
    _config: StepsConfig
    _online_decodes: BatchShape
    _num_waiting: int
    _chunk_tokens: int

    def online_chunk_tokens(
        self, shape: BatchShape, *, cached_tokens: int, max_tokens: int, page_size: int
    ) -> int:
        """New tokens of an online prefill that may join `shape`: never 0.

        What online decodes have left, if the limit cuts it and its own first token is not more
        urgent. A step that only prefills has as much as is worth it where online requests queue:
        a queue that is served in short chunks only grows.
        """
        if not self.limit.cuts_online_chunks or not self._is_known:
            return max_tokens
        limit_s = self.limit.chunk_limit_s(self.view)
        if math.isinf(limit_s):
            return max_tokens
        tokens = longest_prefill(
            self.estimator.upper,
            shape,
            limit_s,
            max_tokens=max_tokens,
            page_size=page_size,
            cached_tokens=cached_tokens,
        )
        is_late = self.view.first_due_s < self.view.decode_due_s
        if tokens == max_tokens or is_late:
            return max_tokens
        smallest = self._config.min_chunk_tokens
        if self._num_waiting > 1 and not shape.num_decodes:
            worth = self.chunk_wait.tokens(
                self.estimator.upper, self.limit.prefill_stall_s, cached_tokens
            )
            smallest = max(smallest, worth - shape.prefill_tokens)
        return max(tokens, page_aligned(min(max_tokens, smallest), max_tokens, page_size))

    def online_starts_later(
        self, shape: BatchShape, joining: Joining, *, first_due_s: float
    ) -> bool:
        """Whether an online request is prefilled after the step that is `shape` so far, and not in
        it, see `starts_later`. `first_due_s`: the least due time of who is in it.
        """
        if not (self._is_known and (self.packs or self.limit.splits_online(self.view))):
            return False
        if self.packs:  # whoever is due first, and be it a decode
            first_due_s = min(first_due_s, self.view.decode_due_s)
        return starts_later(
            self.estimator.upper,
            shape,
            joining,
            now_s=self.view.now_s,
            first_due_s=first_due_s,
            between_s=self.view.alone_s,
        )

    @property
    def shares_online(self) -> bool:
        """Whether it matters what online requests share that begin alike."""
        return self._is_known and self.limit.shares_online

    def online_waits_for_prefix(
        self, shape: BatchShape, joining: Joining, shared_tokens: int
    ) -> bool:
        """Whether an online request is prefilled after the step that is `shape` so far, since that
        computes `shared_tokens` of what it would, see `waits_for_prefix`.
        """
        if not (shared_tokens and self.shares_online):
            return False
        between_s = self.view.alone_s
        return waits_for_prefix(
            self.estimator.upper, shape, joining, shared_tokens=shared_tokens, between_s=between_s
        )

    def _online_gathers(self) -> bool:
        """Whether online requests that found no place wait for others to start with.

        In a long queue, which gets shorter by it, while the first of them is in time after another
        decode step, too.
        """
        lots, view, num_waiting = self.online_lots, self.view, self._num_waiting
        if num_waiting < QUEUED_LOTS * (lots.num_places + 1) or not self.limit.keeps_room:
            return False
        if not lots.waits(len(self._online_decodes), num_waiting):
            return False
        lot_s = lots.lot_s(self.estimator.upper, self._chunk_tokens)
        in_time = view.now_s + view.alone_s + lot_s <= view.first_due_s
        return in_time and math.isfinite(lot_s)

    def _decodes_are_due(self, cached_tokens: int) -> bool:
        """Whether online decodes go before the next chunk of an online prefill."""
        if self.limit.holds_for_each_step:
            return True
        room_s = self.limit.chunk_limit_s(self.view)
        if self.limit.cuts_online_chunks:
            return not self._smallest_chunk_fits(room_s, cached_tokens)
        return room_s <= 0.0

    def _smallest_chunk_fits(self, limit_s: float, cached_tokens: int) -> bool:
        smallest = self._config.min_chunk_tokens
        return prefill_alone_s(self.estimator.upper, smallest, cached_tokens) <= limit_s

    @property
    def _is_known(self) -> bool:
        return self.estimator.is_ready


def page_aligned(tokens: int, max_tokens: int, page_size: int) -> int:
    """At least `tokens`, in whole pages unless it is all there is."""
    return min(max_tokens, -(-tokens // page_size) * page_size)
