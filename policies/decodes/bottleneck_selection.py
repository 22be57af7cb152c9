"""Who comes back to decode, by what the step is short of: sequences, or tokens in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from echo_sgl.policies.decodes.decode_selection import BY_LENGTH, MixSelection
from echo_sgl.policies.decodes.step_fill import Decode, StepFill


class BottleneckSelection(MixSelection):
    """OOCO's two choices: a mix of those that run, and of the others what the step is short of.

        saturated: more sequences make no more tokens a second      the longest that fits, and on
        not yet, but enough of the others fit to get there          as many as that, the longest
        out of reach                                                the shortest: the most of them

    On OOCO's servers who is pulled comes from another machine; on one server it is who sits out.
    It counts what saturates a batch on its hardware; here the estimator is asked, whichever model
    it has: the gain of twice the batch. Long ones that decode while nothing is lost by it end
    sooner, and their memory is free for more.

    Cost: O(log n) predictions. Source: OOCO algorithms 1 and 2.
    """

    def _extend(self, fill: StepFill, decodes: list[Decode]) -> None:
        if decodes[0].is_running:
            super()._extend(fill, decodes)
            return
        ordered = sorted(decodes, key=BY_LENGTH)
        if fill.is_saturated():
            _take_longest(fill, ordered)
        elif (num := _saturating(fill, ordered)) and fill.fits(ordered[:num]):
            start = _last(len(ordered) - num, lambda at: fill.fits(ordered[at : at + num]))
            fill.take(ordered[start : start + num])
        else:
            fill.take_prefix(ordered)


def _take_longest(fill: StepFill, ordered: list[Decode]) -> None:
    """The longest that fits, and of the shorter ones, from the longest on, as many as then do."""
    last = _last(len(ordered) - 1, lambda at: fill.fits([ordered[at]]))
    fill.take_prefix(ordered[last::-1])


def _saturating(fill: StepFill, ordered: list[Decode]) -> int:
    """The least number of the shortest that saturates the step; 0 when all do not."""
    if not fill.is_saturated(ordered):
        return 0
    return 1 + _last(len(ordered) - 1, lambda num: not fill.is_saturated(ordered[:num]))


def _last(most: int, holds: Callable[[int], bool]) -> int:
    """The last of 0 to `most` for which it holds, as for all before it; 0 where for none."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not holds(number))
