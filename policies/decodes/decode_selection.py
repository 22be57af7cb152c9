"""Which offline requests decode in the next step, and which sit out with their KV kept.

The online decodes are in the step already. What the time limit leaves is given out in turns:

    1. urgent    late; then parked for too long, for a turn as long as that: who came back for a
                 step only would make a token every ten seconds; one that does not fit is passed
                 over
    2. running   in the order of the selection, up to the limit
    3. parked    in the order of the selection, up to `RESUME_SHARE` of the limit

A parked request never takes the place of a running one unless it is urgent, and comes back only
when the limit leaves air above it: a limit or a context that changes a little parks nobody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter

from echo_sgl.batch_shape import BatchShape
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.policies.decodes.step_fill import RESUME_SHARE, Decode, StepFill
from echo_sgl.policies.order.offline_order import uniform_draw

__all__ = ["RESUME_SHARE", "Decode", "DecodeSelection"]

# With so many that do not fit, the step is as good as full; each costs a prediction.
_MAX_URGENT_MISFITS = 8
_MIX_RANDOM_TRIES = 4

_BY_START = attrgetter("sequence")
BY_LENGTH = attrgetter("context_tokens", "sequence")
_BY_UNCACHED = attrgetter("uncached_tokens", "sequence")


class DecodeSelection(ABC):
    """Chooses the offline decodes of a step; a subclass adds its order.

    Needs a predictor that never tells less for more work. Ties end by `sequence`, nothing reads
    a clock, and so the same calls choose the same on every rank.

    Cost: one prediction when all fit; otherwise O(log n) for each turn, and a few for urgent ones
    that are passed over. Units: seconds. Errors: `ValueError` when `max_parked_s` is below 0.
    """

    def __init__(self, *, max_parked_s: float = 10.0) -> None:
        if not max_parked_s >= 0:
            raise ValueError(
                f"max_parked_s is {max_parked_s}; it must be at least 0: "
                "a request parked for longer comes before those that run"
            )
        self._max_parked_s = max_parked_s
        self._turn_ends_s: dict[str, float] = {}

    def is_overdue(self, parked_since_s: float, now_s: float) -> bool:
        """Whether who sits out since then comes before those that run."""
        return parked_since_s < now_s - self._max_parked_s

    def select(
        self,
        candidates: Sequence[Decode],
        shape: BatchShape,
        predictor: StepPredictor,
        limit_s: float,
        *,
        now_s: float,
        max_decodes: int,
    ) -> set[str]:
        """The ids of those that join the step whose online decodes are in `shape`.

        With them the predicted time is at most `limit_s`; nobody joins a step that is above it
        without them. At most `max_decodes` join. `shape` stays as it is.
        """
        if not candidates or max_decodes < 1:
            return set()
        fill = StepFill(shape, predictor, limit_s, max_decodes)
        if not fill.take(candidates):
            self._fill_in_turns(fill, candidates, now_s)
        return {decode.rid for decode in fill.chosen}

    def _fill_in_turns(self, fill: StepFill, candidates: Sequence[Decode], now_s: float) -> None:
        before_s = now_s - self._max_parked_s
        urgent, left = self._urgent(candidates, now_s, before_s), candidates
        if urgent:
            _take_urgent(fill, sorted(urgent, key=lambda one: self._precedence(one, now_s)))
            taken = {decode.rid for decode in fill.chosen}
            for one in urgent:
                if one.rid in taken and _is_overdue(one, before_s):
                    self._turn_ends_s[one.rid] = now_s + self._max_parked_s
            left = [one for one in candidates if one.rid not in taken]
        running = [one for one in left if one.is_running]
        parked = [one for one in left if not one.is_running]
        for group in (running, parked):
            was_tried = len(group) == len(candidates)  # all together, and nobody has joined since
            if group and fill.room and (was_tried or not fill.take(group)):
                self._extend(fill, group)

    def _urgent(self, candidates: Sequence[Decode], now_s: float, before_s: float) -> list[Decode]:
        """Those that are late, sit out since before `before_s`, or have their turn."""
        if turns := self._turn_ends_s:
            turns = {rid: end_s for rid, end_s in turns.items() if end_s > now_s}
            self._turn_ends_s = turns
        return [
            one
            for one in candidates
            if one.laxity_s < 0 or one.rid in turns or _is_overdue(one, before_s)
        ]

    def _precedence(self, urgent: Decode, now_s: float) -> tuple[bool, int, float, int]:
        """Late ones, those whose turn it is, and then who has waited longest.

        Who still waits after a turn of others goes before them: it may only fit without them.
        """
        since_s = now_s if urgent.waiting_since_s is None else urgent.waiting_since_s
        place = 0 if now_s - since_s > 2 * self._max_parked_s else 2
        if place and urgent.rid in self._turn_ends_s:
            place = 1
        return urgent.laxity_s >= 0, place, since_s, urgent.sequence

    @abstractmethod
    def _extend(self, fill: StepFill, decodes: list[Decode]) -> None:
        """Let some of `decodes` join, which do not all fit: all run, or all are parked."""


class InOrderSelection(DecodeSelection):
    """In order of start, up to the first that does not fit.

    HyGen's loop goes on behind the first that does not fit; here nobody is overtaken.
    Source: HyGen algorithm 1, lines 6-12.
    """

    def _extend(self, fill: StepFill, decodes: list[Decode]) -> None:
        fill.take_prefix(sorted(decodes, key=_BY_START))


class ShortestSelection(DecodeSelection):
    """Shortest contexts first: the most tokens per second that the limit allows.

    Every decode makes one token, whatever its context. Of all sets of k decodes the k shortest
    take the least time under any model that grows with lengths, so when the shortest k + 1 do
    not fit, no k + 1 do. Source: ours, on Echo's benefit per second (3.1).
    """

    def _extend(self, fill: StepFill, decodes: list[Decode]) -> None:
        fill.take_prefix(sorted(decodes, key=BY_LENGTH))


class UncachedSelection(DecodeSelection):
    """Those that have the least to lose first; up to the first that does not fit.

    BROS sorts best-effort requests by what must be swapped in for them (its M^cpu); where KV is
    not swapped but computed again, that is what would be computed again. Its replacement of
    real-time requests is in `replacement.py`. Source: BROS algorithm 1, lines 17-23.
    """

    def _extend(self, fill: StepFill, decodes: list[Decode]) -> None:
        fill.take_prefix(sorted(decodes, key=_BY_UNCACHED))


class MixSelection(DecodeSelection):
    """A few at random, so that long ones have a chance; then the shortest, as many as fit.

    The paper does not name its number of tries, K. The n-th draw depends only on `seed` and n.
    Source: OOCO algorithm 2.
    """

    def __init__(self, *, seed: int, max_parked_s: float = 10.0) -> None:
        super().__init__(max_parked_s=max_parked_s)
        self._seed = seed
        self._num_draws = 0

    def _extend(self, fill: StepFill, decodes: list[Decode]) -> None:
        untested = sorted(decodes, key=BY_LENGTH)
        for _ in range(min(_MIX_RANDOM_TRIES, len(untested))):
            draw = uniform_draw(self._seed, self._num_draws)
            self._num_draws += 1
            fill.take([untested.pop(int(draw * len(untested)))])
        fill.take_prefix(untested)


def _is_overdue(decode: Decode, before_s: float) -> bool:
    return decode.waiting_since_s is not None and decode.waiting_since_s < before_s


def _take_urgent(fill: StepFill, in_order: list[Decode]) -> None:
    num_misfits = 0
    for decode in in_order[fill.take_prefix(in_order) :]:
        if not fill.take([decode]):
            num_misfits += 1
        if num_misfits == _MAX_URGENT_MISFITS or not fill.room:
            return
