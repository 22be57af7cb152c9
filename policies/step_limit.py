"""How long the next step may take when offline work is in it.

token j of an online request:   due = arrival + TTFT + (j - 1) * TPOT
slack:      the least due time of the requests at hand, minus now; a first token that would
            come late leaves offline decodes nothing
budget:     a fixed time for every step with online work
relative:   `max_inflation` times what online work takes alone; what a step leaves is kept
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from echo_sgl.batch_shape import StepKind
from echo_sgl.config import SloConfig, StepsConfig
from echo_sgl.policies.beside_time import BesideTime
from echo_sgl.policies.online_attainment import BudgetController

# Credit of the relative limit, as a multiple of the longest stall allowed.
MAX_CREDIT_STALLS = 4.0
# Of the time, for prefills, however much online decodes take.
MIN_PREFILL_SHARE = 0.2
# So few tokens before its end, an online decode that a prefill made late may stay late.
ENDING_TOKENS = 16
# Online decodes may fall behind for a first token that comes closer than this share of the margin.
LAG_MARGIN_SHARE = 0.5
# From this part of the places that online requests may take, offline work gets less.
PLACES_RAMP_SHARE = 2.0 / 3.0
MIN_BUDGET_SHARE, MAX_BUDGET_SHARE = 0.05, 4.0


@dataclass(frozen=True, slots=True)
class Promise:
    """TTFT and TPOT of one request, seconds; infinite where nothing is promised."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def due_s(self, num_tokens: int, arrival_s: float, first_token_s: float | None) -> float:
        """When the token after `num_tokens` is due.

        Echo's due times let a request that was early with its first token be late with all
        others, and its TPOT is then above what was promised. So later tokens are also due
        `TPOT` apart from the first one.

        Source: Echo 5.1; the second bound is ours. Units: seconds on the caller's clock.
        """
        # Zero tokens at an infinite time each are not a number.
        if not num_tokens:
            return arrival_s + self.ttft_s
        due_s = arrival_s + self.ttft_s + num_tokens * self.tpot_s
        if first_token_s is None:
            return due_s
        return min(due_s, first_token_s + num_tokens * self.tpot_s)


class Ending(NamedTuple):
    """An online decode with few tokens left: how many, and when the last of them is due."""

    due_s: float
    num_left: int


class OnlineView(NamedTuple):
    """What a limit may know of the online work at hand.

    `decode_due_s`: the least due time of requests that decode, infinite without any.
    `first_due_s`: the same of requests that wait, most of them for their first token. `alone_s`:
    predicted time of a step that decodes the online requests alone, 0 without any. `chunk_s`,
    `prefill_s`: to prefill the first chunk of what waits, and all of it. `endings`: decodes with
    at most `ENDING_TOKENS` left of what their clients allowed. `places_taken`: those that decode
    or wait, as a share of the requests that the server runs at once. A tuple, because one is made
    each step.
    """

    now_s: float
    decode_due_s: float
    first_due_s: float
    alone_s: float
    is_present: bool
    chunk_s: float = 0.0
    prefill_s: float = 0.0
    endings: tuple[Ending, ...] = ()
    places_taken: float = 0.0


class OnlinePart(NamedTuple):
    """What a step held of the online requests at hand, with its predicted time alone, in seconds.

    `kind`: of a step with nothing else in it; None when they had to wait for this step.
    `is_alone`: there was no offline work in it.
    """

    predicted_s: float
    kind: StepKind | None
    is_alone: bool


class StepLimit(ABC):
    """Seconds that a step may take; the common part bounds what an arriving request waits.

    `stall_s`: the longest that offline work may lengthen a step, whatever else allows.
    `cuts_online_chunks`: online prefills are cut to what online decodes leave them.
    `holds_for_each_step`: two prefills in a row would keep online decodes for twice as long as
    they are to wait for a token.
    """

    cuts_online_chunks = False
    holds_for_each_step = False

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s

    def limit_s(self, view: OnlineView) -> float:
        """What a step that decodes the online requests may take in all; may be negative."""
        return min(self._limit_s(view), view.alone_s + self.stall_s)

    def decode_limit_s(self, view: OnlineView, limit_s: float) -> float:
        """What a step that decodes both classes may take in all, `limit_s` being its limit."""
        return limit_s

    def chunk_limit_s(self, view: OnlineView) -> float:
        """What an online prefill may take before online decodes must go on; may be negative."""
        return math.inf

    def lets_end(self, view: OnlineView) -> bool:
        """Whether online decodes go before online prefill because one ends in time so."""
        return False

    def is_pressed(self, view: OnlineView, due_s: float) -> bool:
        """Whether a request that waits, with its next token due then, can do so no longer."""
        return False

    def note_step(self, online: OnlinePart | None, elapsed_s: float) -> None:
        """A step ended, `elapsed_s` after it was planned; None when nobody was online."""

    def note_waiting(self) -> None:
        """Online requests wait for their first tokens when the next step is planned."""

    def note_request(self, is_met: bool) -> None:
        """An online request ended, with or without its promise kept."""

    def forget_requests(self) -> None:
        """The online requests until now were no traffic: what they taught does not count."""

    @abstractmethod
    def _limit_s(self, view: OnlineView) -> float:
        """The limit before it is bounded by the stall."""


class NoLimit(StepLimit):
    """Offline work fills what memory and chunk size leave."""

    def limit_s(self, view: OnlineView) -> float:
        return math.inf

    def _limit_s(self, view: OnlineView) -> float:
        return math.inf


@dataclass(frozen=True, slots=True)
class SlackUse:
    """How much of the online decodes' slack is used at once; the defaults use all of it (Echo).

    An online prefill stops online decodes or, where a step does both, makes it longer. Decodes
    that were filled up to their due times leave it no time. So a step with offline work takes
    `pace_s` of the slack and `share` of what is beyond that: online decodes get ahead of their
    due times, by as much as makes steps of one TPOT in the end. And for a first token that
    would be late, decodes may fall `lag_s` behind; offline work then waits until they are in
    time again.

    Source: ours; the numbers were found in simulation. Units: seconds.
    """

    pace_s: float = math.inf
    share: float = 1.0
    lag_s: float = 0.0

    def usable_s(self, slack_s: float) -> float:
        """What a step may take of so much slack."""
        if slack_s <= self.pace_s:
            return slack_s
        return self.pace_s + self.share * (slack_s - self.pace_s)


class SlackLimit(StepLimit):
    """Until the earliest due time of any online request at hand.

    Decodes filled up to their due times leave a request that waits no time for its prefill:
    online decodes go on when they are due. So while its first token would come later than
    `margin_s` before it is due, decode steps hold no offline work. Time for its prefill is
    what online decodes leave of `tpot_s`. `use`: how much of the slack of decodes a step uses.
    `cuts_online_chunks`: to that slack. It sounds kinder to decodes and is not: several short
    chunks take longer than one, and whose prompts would have shared it wait.

    Decodes that take their time hold their places for longer, and who finds none waits for its
    first token however much slack there is. So the time beside online decodes is less the closer
    online requests are to `place_share` of the places, and none from there on.

    Source: Echo 5.1; yielding to first tokens (`margin_s` 0 is without) and looking at places
    (`place_share` 0 is without) are ours. Units: seconds.
    """

    def __init__(
        self,
        stall_s: float,
        *,
        margin_s: float = 0.0,
        tpot_s: float = math.inf,
        use: SlackUse | None = None,
        place_share: float = 0.0,
        cuts_online_chunks: bool = False,
    ) -> None:
        super().__init__(stall_s)
        self.cuts_online_chunks = cuts_online_chunks
        self._margin_s, self._tpot_s = margin_s, tpot_s
        self._use = use or SlackUse()
        self._place_share = place_share or math.inf

    def limit_s(self, view: OnlineView) -> float:
        limit_s = super().limit_s(view)
        left = 1.0 - view.places_taken / self._place_share
        if left >= 1.0 - PLACES_RAMP_SHARE or limit_s <= view.alone_s:
            return limit_s
        usable = max(0.0, left / (1.0 - PLACES_RAMP_SHARE))
        return view.alone_s + usable * (limit_s - view.alone_s)

    def decode_limit_s(self, view: OnlineView, limit_s: float) -> float:
        return view.alone_s if self.is_pressed(view, view.first_due_s) else limit_s

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

    def chunk_limit_s(self, view: OnlineView) -> float:
        spare_s = self._spare_s(view, view.first_due_s)
        is_close = spare_s < LAG_MARGIN_SHARE * self._margin_s
        lag_s = self._use.lag_s if is_close else 0.0
        return view.decode_due_s + lag_s - view.now_s - view.alone_s

    def _limit_s(self, view: OnlineView) -> float:
        usable_s = self._use.usable_s(view.decode_due_s - view.now_s)
        return min(usable_s, view.first_due_s - view.now_s)


class BudgetLimit(StepLimit):
    """A fixed time for every step with online work in it, moved by the measured attainment.

    HyGen's steps prefill and decode. Where a step does one of the two, decodes go between prefills.

    Source: HyGen 4.1 and 4.2; moving it at run time is ours.
    """

    cuts_online_chunks = True
    holds_for_each_step = True

    def __init__(self, stall_s: float, controller: BudgetController, *, adapts: bool) -> None:
        super().__init__(stall_s)
        self.controller, self._adapts = controller, adapts

    def set_budget(self, budget_s: float) -> None:
        """Take this budget from now on; it stays, whatever the attainment.

        Errors: `ValueError` when it is not above 0.
        """
        self.controller = BudgetController(
            budget_s, target=1.0, minimum_s=budget_s, maximum_s=budget_s
        )
        self._adapts = False

    def limit_s(self, view: OnlineView) -> float:
        # The budget is the whole promise here: it may be longer than the stall.
        return self.controller.budget_s if view.is_present else self.stall_s

    def chunk_limit_s(self, view: OnlineView) -> float:
        return self.controller.budget_s if math.isfinite(view.decode_due_s) else math.inf

    def note_request(self, is_met: bool) -> None:
        if self._adapts:
            self.controller.observe(is_met)

    def forget_requests(self) -> None:
        self.controller.restart()

    def _limit_s(self, view: OnlineView) -> float:
        return self.controller.budget_s


class RelativeLimit(StepLimit):
    """Online work takes at most `max_inflation` times what it would alone, over time.

    Each step with online work earns `max_inflation` times what it takes alone and costs what it
    took. What is left is credit for the next ones, up to a few stalls, so that a chunk of
    offline prefill is paid for by the decodes before it. What a step takes alone is its
    prediction and what the host takes beside it (`BesideTime`). Whoever comes did not save any
    of the credit, and all decode together: it ends when somebody waits for a first token.
    Needs no promise: it is for servers whose users only want not to notice.
    """

    def __init__(self, stall_s: float, max_inflation: float) -> None:
        super().__init__(stall_s)
        self._max_inflation = max_inflation
        self._max_credit_s = MAX_CREDIT_STALLS * stall_s
        self._credit_s = 0.0
        self._beside = BesideTime(stall_s)

    def note_step(self, online: OnlinePart | None, elapsed_s: float) -> None:
        if online is None:
            self._credit_s = 0.0
            self._beside.observe(None, 0.0, is_alone=False)
            return
        alone_s, kind = online.predicted_s, online.kind
        if kind is not None:
            alone_s += self._beside.mean_s(kind)
        credit_s = self._credit_s + self._max_inflation * alone_s - elapsed_s
        # A step that was predicted far too short must not stop offline work for long.
        self._credit_s = min(max(credit_s, -self.stall_s), self._max_credit_s)
        beside_s = elapsed_s - online.predicted_s
        self._beside.observe(kind, beside_s, is_alone=online.is_alone)

    def note_waiting(self) -> None:
        self._credit_s = min(self._credit_s, 0.0)

    def _limit_s(self, view: OnlineView) -> float:
        if not view.is_present:
            return math.inf
        return self._max_inflation * view.alone_s + self._credit_s


def create_step_limit(steps: StepsConfig, slo: SloConfig) -> StepLimit:
    """Build the limit that the config names; "auto" is resolved when the config is read.

    Errors: `ValueError` names the unknown limit and the known ones.
    """
    stall_s = steps.max_stall_s
    if slo.ttft_s:
        stall_s = min(stall_s, steps.stall_share * slo.ttft_s)
    if steps.limit == "slack":
        tpot_s = slo.tpot_s or math.inf
        use = SlackUse(steps.slack_pace * tpot_s, steps.slack_share, steps.lag_tokens * slo.tpot_s)
        return SlackLimit(
            stall_s,
            margin_s=steps.ttft_margin * slo.ttft_s,
            tpot_s=tpot_s,
            use=use,
            place_share=steps.place_share,
            cuts_online_chunks=steps.online_chunks == "slack",
        )
    if steps.limit == "relative":
        return RelativeLimit(stall_s, steps.max_inflation)
    if steps.limit == "off":
        return NoLimit(stall_s)
    if steps.limit == "budget":
        controller = BudgetController(
            steps.budget_s,
            target=steps.attainment,
            minimum_s=MIN_BUDGET_SHARE * steps.budget_s,
            maximum_s=MAX_BUDGET_SHARE * steps.budget_s,
        )
        return BudgetLimit(stall_s, controller, adapts=steps.adapt_budget)
    raise ValueError(f"step limit is {steps.limit!r}; known are slack, budget, relative, off")
