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

# So few tokens before its end, an online decode that a prefill made late may stay late.
ENDING_TOKENS = 16


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

    @property
    def is_any(self) -> bool:
        """Whether anything is promised."""
        return math.isfinite(min(self.ttft_s, self.tpot_s))

    def is_kept(
        self, num_tokens: int, *, arrival_s: float, first_token_s: float, end_s: float
    ) -> bool:
        """Whether an answer of so many tokens came in time."""
        if first_token_s - arrival_s > self.ttft_s:
            return False
        return num_tokens < 2 or (end_s - first_token_s) / (num_tokens - 1) <= self.tpot_s


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
    or wait, as a share of the requests that the server runs at once; `places_ahead`: what that
    comes to, see `PlaceTrend`. A tuple, because one is made each step.
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
    places_ahead: float = 0.0


NOTHING_ONLINE = OnlineView(
    now_s=0.0, decode_due_s=math.inf, first_due_s=math.inf, alone_s=0.0, is_present=False
)


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

    `stall_s`: the longest that offline work may lengthen a step, whatever else allows, and
    `prefill_stall_s` the same of a step that only prefills. They may change from step to step, see
    `ArrivalWait`.
    `cuts_online_chunks`: online prefills are cut to what online decodes leave them.
    `holds_for_each_step`: two prefills in a row would keep online decodes for twice as long as
    they are to wait for a token. `keeps_room`: time that a step leaves is there for the next.
    `shares_online`: online requests that begin alike compute what they share once.
    """

    cuts_online_chunks = False
    holds_for_each_step = False
    keeps_room = False
    shares_online = False

    def __init__(self, stall_s: float) -> None:
        self.stall_s = self.prefill_stall_s = stall_s

    def limit_s(self, view: OnlineView) -> float:
        """What a step that decodes the online requests may take in all; may be negative."""
        return min(self._limit_s(view), view.alone_s + self.stall_s)

    def prefill_room_s(self, view: OnlineView, limit_s: float) -> float:
        """What a step that only prefills offline work may take: online decodes come after it."""
        return limit_s - view.alone_s

    def most_s(self, view: OnlineView, *, decodes: bool) -> float:
        """What a step with offline work may take however much slack there is: who arrives waits
        for no longer. `decodes`: it decodes the online requests at hand as well.
        """
        return view.alone_s + self.stall_s if decodes else max(self.stall_s, self.prefill_stall_s)

    def decode_limit_s(self, view: OnlineView, limit_s: float) -> float:
        """What a step that decodes both classes may take in all, `limit_s` being its limit."""
        return limit_s

    def chunk_limit_s(self, view: OnlineView) -> float:
        """What an online prefill may take before online decodes must go on; may be negative."""
        return math.inf

    def lets_end(self, view: OnlineView) -> bool:
        """Whether online decodes go before online prefill because one ends in time so."""
        return False

    def splits_online(self, view: OnlineView) -> bool:
        """Whether online requests are prefilled in two steps where one would make some late."""
        return False

    def is_pressed(self, view: OnlineView, due_s: float) -> bool:
        """Whether a request that waits, with its next token due then, can do so no longer."""
        return False

    def note_step(self, online: OnlinePart | None, elapsed_s: float) -> None:
        """A step ended, `elapsed_s` after it was planned; None when nobody was online."""

    def note_waiting(self) -> None:
        """Online requests wait for their first tokens when the next step is planned."""

    def note_request(self, is_met: bool) -> None:
        """An online request ended that was promised something, and its promise was kept or not."""

    def forget_requests(self) -> None:
        """The online requests until now were no traffic: what they taught does not count."""

    @abstractmethod
    def _limit_s(self, view: OnlineView) -> float:
        """The limit before it is bounded by the stall."""


class NoLimit(StepLimit):
    """Offline work fills what memory and chunk size leave."""

    def limit_s(self, view: OnlineView) -> float:
        return math.inf

    def most_s(self, view: OnlineView, *, decodes: bool) -> float:
        return math.inf

    def _limit_s(self, view: OnlineView) -> float:
        return math.inf
