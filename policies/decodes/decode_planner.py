"""Who of the offline requests decodes in the next step, held against the limit of its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from echo_sgl.batch_shape import BatchRow, BatchShape
from echo_sgl.estimators.batch_time import StepEstimator
from echo_sgl.policies.decodes.batch_size import BatchSize
from echo_sgl.policies.decodes.contexts import Contexts
from echo_sgl.policies.decodes.decode_selection import RESUME_SHARE, Decode, DecodeSelection
from echo_sgl.policies.decodes.held_plan import HELD_SHARE, HeldPlan
from echo_sgl.policies.decodes.packing import leaves_for_urgent
from echo_sgl.policies.decodes.replacement import NOBODY, OnlineDecode, Replacement, replace_decodes
from echo_sgl.policies.limits.step_limit import OnlineView


class DecodePlanner:
    """The part of a `StepPlanner` that asks who decodes; what it asks about is set by `begin`."""

    estimator: StepEstimator
    view: OnlineView
    limit_s: float
    is_limited: bool
    packs: bool
    replaces: bool
    held: HeldPlan
    _selection: DecodeSelection
    _batch_size: BatchSize
    _online_decodes: BatchShape
    _decode_limit: float

    def all_decode(self, offline: Contexts) -> bool:
        """Whether offline decodes of these contexts all join the online ones; one prediction."""
        if not self.is_limited:
            return True
        if offline.num > self._most_decodes():
            return False
        num_decodes = len(self._online_decodes) + offline.num
        if not offline.num:
            self.held.hold(self.view.now_s, -math.inf, num_decodes)
            return True
        if not self._is_known:
            return True
        joined_s = self._joined_s(offline)
        if joined_s <= HELD_SHARE * self._decode_limit:
            self.held.hold(self.view.now_s, self.slack_s, num_decodes)
        # The second limit is no less, and takes a prediction.
        return joined_s <= self._decode_limit or joined_s <= self._decode_limit_s(offline.shortest)

    def is_settled(self, running: Contexts, *, shortest_parked: int, parked_since_s: float) -> bool:
        """Whether `choose_decodes` would choose all that run and none that sit out.

        So it is when those that run all fit, and the shortest of the parked does not fit beside
        them, unless the one that was parked first, `parked_since_s`, is overdue or a job is late;
        that the caller knows. Where all sit out, it is when the shortest does not fit beside the
        online decodes. Two predictions at most, however many candidates.
        """
        if not (self.is_limited and self._is_known):
            return False
        joined = running.with_one(shortest_parked)
        limit_s = self._decode_limit_s(joined.shortest)
        if running.num:
            if self._selection.is_overdue(parked_since_s, self.view.now_s):
                return False
            if running.num > self._most_decodes() or self._joined_s(running) > limit_s:
                return False
        elif not len(self._online_decodes):
            return False
        if running.num == self._most_decodes():
            return True
        return self._joined_s(joined) > RESUME_SHARE * limit_s

    def choose_decodes(self, candidates: Callable[[], Sequence[Decode]]) -> set[str]:
        """Who of the offline requests that could decode joins the online ones."""
        if not (choices := candidates()):
            return set()
        most = max(0, self._most_decodes())
        if self.is_limited and self._is_known:
            chosen = self._fitting(choices, max_decodes=most)
        else:
            num_most = most if self.is_limited else len(choices)
            running_first = sorted(choices, key=lambda one: (not one.is_running, one.sequence))
            chosen = {one.rid for one in running_first[:num_most]}
        # A step that decodes nobody ends nothing, and who waits online may need the place.
        if not (chosen or len(self._online_decodes)):
            chosen = {min(choices, key=lambda one: one.sequence).rid}
        return chosen

    def in_order_of_claim(self, candidates: Sequence[Decode], chosen: set[str]) -> list[Decode]:
        """Those of the chosen who take what only some of them can have, first who keeps it: late,
        then overdue, then running ones, then others, each by their start.
        """

        def claim(one: Decode) -> tuple[bool, bool, bool, int]:
            since_s = self.view.now_s if one.waiting_since_s is None else one.waiting_since_s
            is_overdue = self._selection.is_overdue(since_s, self.view.now_s)
            return one.laxity_s >= 0, not is_overdue, not one.is_running, one.sequence

        return sorted((one for one in candidates if one.rid in chosen), key=claim)

    @property
    def must_pack(self) -> bool:
        """Whether not all online decodes may be in this step, see `policies/decodes/packing.py`."""
        if not (self.packs and self._is_known and len(self._online_decodes) > 1):
            return False
        is_late = self.view.now_s + self.view.alone_s > self._online_due_s
        return is_late or len(self._online_decodes) > self._batch_size.limit

    def pack_online(
        self, online: Sequence[OnlineDecode], *, beside: Sequence[int] = ()
    ) -> frozenset[str]:
        """Which online decodes sit out for those that are due first.

        `online` are those that may; `beside`: contexts of all others that decode in any case.
        """
        return leaves_for_urgent(
            online,
            self.estimator.upper,
            now_s=self.view.now_s,
            due_s=self._online_due_s,
            max_decodes=self._batch_size.limit,
            beside=beside,
        )

    def replace_decodes(
        self,
        choices: Sequence[Decode],
        chosen: set[str],
        online: Sequence[OnlineDecode],
        *,
        beside: Sequence[int] = (),
    ) -> Replacement:
        """Which online decodes leave their turn to offline ones that were not chosen.

        `online` are those that may; `beside`: contexts of all others that decode in any case.
        """
        left = [one for one in choices if one.rid not in chosen]
        if not (left and self.replaces and self.is_limited and self._is_known):
            return NOBODY
        contexts = [one.context_tokens for one in choices if one.rid in chosen]
        return replace_decodes(
            online,
            left,
            self.estimator.upper,
            self._decode_limit,
            now_s=self.view.now_s,
            max_decodes=len(self._online_decodes) + self._most_decodes(),
            joined=(*contexts, *beside),
        )

    def _fitting(self, choices: Sequence[Decode], *, max_decodes: int) -> set[str]:
        shortest_tokens = min(one.context_tokens for one in choices)
        return self._selection.select(
            choices,
            self._online_decodes,
            self.estimator.upper,
            self._decode_limit_s(shortest_tokens),
            now_s=self.view.now_s,
            max_decodes=max_decodes,
        )

    def with_decode_s(self, context_tokens: int) -> float:
        """What the online decodes at hand would take with one more of this context."""
        self._online_decodes.add_decode(context_tokens)
        time_s = self.estimator.upper.predict_s(self._online_decodes)
        self._online_decodes.undo()
        return time_s

    def _joined_s(self, offline: Contexts) -> float:
        """What the online decodes would take with these."""
        return self.estimator.upper.predict_s(self._joined(offline))

    def _joined(self, offline: Contexts) -> BatchRow:
        online = self._online_decodes
        num, tokens = online.num_decodes + offline.num, online.decode_tokens + offline.tokens
        longest = max(online.max_decode_tokens, offline.longest)
        return BatchRow(0, 0, 0, 0, num, tokens, longest)

    def _decode_limit_s(self, shortest_tokens: int) -> float:
        """The limit of a decode step. Without online decodes one offline decode is the least
        that a step can be, and the stall comes on top of that."""
        if len(self._online_decodes) or math.isinf(self.limit_s):
            return self._decode_limit
        alone = BatchRow(0, 0, 0, 0, 1, shortest_tokens, shortest_tokens)
        return self.limit_s + self.estimator.upper.predict_s(alone)

    def _most_decodes(self) -> int:
        num_online = len(self._online_decodes)
        if not self._is_known and self.view.is_present:
            return max(1, num_online)
        return self._batch_size.offline_room(num_online)

    @property
    def slack_s(self) -> float:
        """Until the next token of an online decode is due; infinite without any."""
        return self.view.decode_due_s - self.view.now_s

    @property
    def _online_due_s(self) -> float:
        """When the first of any online request's next tokens is due."""
        return min(self.view.decode_due_s, self.view.first_due_s)

    @property
    def _is_known(self) -> bool:
        return self.estimator.is_ready
