"""Who of the online requests has a place, where all that a server runs at once are taken.

    runs:    a  b  c       c is furthest ahead of its due time     a  b  d
    waits:   d (due soon)            ------------->                c (when it is due)

A decode that is ahead of its due time can sit out for as long and be in time nevertheless; a
request that waits for its first token cannot. What the decode computed stays in the tree, but the
step that brings it back stops all others. So it must be ahead by enough:

    place-seconds that another has       places that stop * seconds they do
    due - later of now and the       >=  `gain` * decodes * prefill of one token
    other one's due time

Source: that the least slack decides who runs is BROS's (algorithm 1); that it decides among online
requests, over places and only when one would be late, is ours. Units: seconds on the caller's
clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Placed(NamedTuple):
    """An online request that decodes: when its next token is due."""

    rid: str
    due_s: float


class Queued(NamedTuple):
    """An online request that waits: when its next token is due; whether it has tokens already."""

    due_s: float
    has_started: bool


@dataclass(frozen=True, slots=True)
class Places:
    """Which decode gives its place away, and where it waits meanwhile.

    `gain`: for how many times the place-seconds that its return takes a decode leaves its place;
    0: nobody does.
    """

    gain: float

    def gives_way(
        self, decodes: Iterable[Placed], *, from_s: float, return_place_s: float
    ) -> str | None:
        """The decode furthest ahead, for a request that takes its place until `from_s` at least;
        None: nobody is by enough. `return_place_s`: place-seconds that its return takes.

        One that is never due keeps its place: nothing says for how long it could wait.
        """
        if not self.gain:
            return None
        least_due_s = from_s + self.gain * return_place_s
        ahead = [
            (one.due_s, one.rid)
            for one in decodes
            if math.isfinite(one.due_s) and one.due_s >= least_due_s
        ]
        return max(ahead)[1] if ahead else None

    def num_behind(self, queued_last_first: Iterable[Queued], own: Queued) -> int:
        """How many of those that wait, from the last one on, a request that comes goes before.

        Among requests without a token the server's own order holds. One with tokens waits behind
        nobody that is due later, and one without goes before those with tokens that are.
        """
        num_behind = 0
        queued = queued_last_first if self.gain else ()
        for num_seen, one in enumerate(queued, start=1):
            is_later = one.due_s > own.due_s
            if not own.has_started and not (is_later and one.has_started):
                break
            if is_later:
                num_behind = num_seen
        return num_behind
