"""Steps that end before the next online token is due."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo_sgl.policies.limits.step_limit import OnlineView, StepLimit

# Of the time, for prefills, however much online decodes take.
MIN_PREFILL_SHARE = 0.2
# Online decodes may fall behind for a first token that comes closer than this share of the margin.
LAG_MARGIN_SHARE = 0.5
# From this part of the places that online requests may take, offline work gets less.
PLACES_RAMP_SHARE = 2.0 / 3.0


@dataclass(frozen=True, slots=True)
class SlackUse:
    """How much of the online decodes' slack is used at once; the defaults use all of it (Echo).

    An online prefill stops online decodes or, where a step does both, makes it longer. Decodes
    that were filled up to their due times leave it no time. So a step with offline work takes
    `pace_s` of the slack and `share` of what is beyond that: online decodes get ahead of their
    due times, by as much as makes steps of one TPOT in the end. And for a first token that
    would be late, decodes may fall `lag_s` behind; offline work then waits until they are in
    time again.

    A step that only prefills may take all but `reserve_s` of it. Such steps are rare and have a
    fixed cost: what a decode may take of the slack at once would cut chunks to a fraction of
    what there is, and pay that cost for each.

    Source: ours; the numbers were found in simulation. Units: seconds.
    """

    pace_s: float = math.inf
    share: float = 1.0
    lag_s: float = 0.0
    reserve_s: float = 0.0

    def usable_s(self, slack_s: float) -> float:
        """What a step may take of so much slack."""
        if slack_s <= self.pace_s or math.isinf(slack_s):
            return slack_s
        return self.pace_s + self.share * (slack_s - self.pace_s)


class SlackLimit(StepLimit):
    """Until the earliest due time of any online request at hand.

    Decodes filled up to their due times leave a request that waits no time for its prefill:
    online decodes go on when they are due. So while its first token would come later than
    `margin_s` before it is due, decode steps hold no offline work. Time for its prefill is
    what online decodes leave of `tpot_s`. `use`: how much of the slack of decodes a step uses.
    `cuts_online_chunks`: to that slack. It is kinder to decodes only where first tokens have time
    to spare: several short chunks take longer than one, and prompts that would have shared it wait.

    Decodes that take their time hold their places for longer, and who finds none waits for its
    first token however much slack there is. So the time beside online decodes is less the closer
    online requests come to `place_share` of the places, and none from there on.

    `splits_online`: first tokens that would be late together come apart, and prompts that begin
    alike one after the other, see `first_tokens.py`.

    Source: Echo 5.1; yielding to first tokens (`margin_s` 0 is without, and without splitting) and
    looking at places (`place_share` 0 is without) are ours. Units: seconds.
    """

    keeps_room = True

    def __init__(
        self,
        stall_s: float,
        *,
        margin_s: float = 0.0,
        tpot_s: float = math.inf,
        use: SlackUse | None = None,
        place_share: float = 0.0,
        cuts_online_chunks: bool = False,
        splits_online: bool = False,
    ) -> None:
        super().__init__(stall_s)
        self.cuts_online_chunks = cuts_online_chunks
        self._margin_s, self._tpot_s = margin_s, tpot_s
        self._use = use or SlackUse()
        self._place_share = place_share or math.inf
        self._splits_online = self.shares_online = splits_online and margin_s > 0.0

    def limit_s(self, view: OnlineView) -> float:
        return self._near_full(view, super().limit_s(view))

    def prefill_room_s(self, view: OnlineView, limit_s: float) -> float:
        usable_s = min(self._slack_s(view) - self._use.reserve_s, view.first_due_s - view.now_s)
        bounded_s = min(usable_s, view.alone_s + self.prefill_stall_s)
        return max(limit_s, self._near_full(view, bounded_s)) - view.alone_s

    def _near_full(self, view: OnlineView, limit_s: float) -> float:
        """The limit where few places are left: less of what is beyond online decodes alone."""
        left = 1.0 - view.places_ahead / self._place_share
        if left >= 1.0 - PLACES_RAMP_SHARE or limit_s <= view.alone_s:
            return limit_s
        if left <= 0.0:
            return _nobody_s(view)
        usable = left / (1.0 - PLACES_RAMP_SHARE)
        return view.alone_s + usable * (limit_s - view.alone_s)

    def decode_limit_s(self, view: OnlineView, limit_s: float) -> float:
        return _nobody_s(view) if self.is_pressed(view, view.first_due_s) else limit_s

    def is_pressed(self, view: OnlineView, due_s: float) -> bool:
        return self._margin_s > 0.0 and self._spare_s(view, due_s) < self._margin_s

    def _spare_s(self, view: OnlineView, due_s: float) -> float:
        """How long before its due time the token of a request that waits would come."""
        prefill_share = max(MIN_PREFILL_SHARE, 1.0 - view.alone_s / self._tpot_s)
        return due_s - view.now_s - view.prefill_s / prefill_share

    def lets_end(self, view: OnlineView) -> bool:
        """With few tokens left there is no time to catch up in: so decode goes on to the end of
        who would be late for that prefill, if it can be in time without, and the first tokens too.
        """
        if not self._margin_s or not view.endings:
            return False
        spare_s = self._spare_s(view, view.first_due_s)
        for ending in view.endings:
            left_s = ending.num_left * view.alone_s
            slack_s = ending.due_s - view.now_s - left_s
            if 0.0 <= slack_s < view.chunk_s and left_s < spare_s:
                return True
        return False

    def splits_online(self, view: OnlineView) -> bool:
        # Where there is no offline work for want of places, a second prefill costs too much.
        return self._splits_online and view.places_ahead < self._place_share

    def chunk_limit_s(self, view: OnlineView) -> float:
        spare_s = self._spare_s(view, view.first_due_s)
        is_close = spare_s < LAG_MARGIN_SHARE * self._margin_s
        lag_s = self._use.lag_s if is_close else 0.0
        return view.decode_due_s + lag_s - view.now_s - view.alone_s

    def _limit_s(self, view: OnlineView) -> float:
        return min(self._use.usable_s(self._slack_s(view)), view.first_due_s - view.now_s)

    @staticmethod
    def _slack_s(view: OnlineView) -> float:
        return view.decode_due_s - view.now_s


def _nobody_s(view: OnlineView) -> float:
    """The limit of a step that no offline decode may join, not even one that takes no time: beside
    a longer context, or in a CUDA graph of more requests than decode.
    """
    return math.nextafter(view.alone_s, -math.inf)
