"""How many offline requests a prefill pass is offered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

# Enough to fill any prefill step whose prompts are mostly cached, and a constant per step.
MAX_OFFERED = 64
# A pass looks at no more of those that could not start now.
MAX_ASIDE = 64
# A pass that starts none moves what is expected a sixteenth of the way.
PASSES = 16


T = TypeVar("T")


def in_line(line: Iterable[T], limit: int, fits: Callable[[T], bool]) -> list[T]:
    """The first `limit` of those that fit, past `MAX_ASIDE` others at most.

    If nobody fits, the first in line. Source: ours.
    """
    chosen: list[T] = []
    aside: list[T] = []
    for one in islice(line, limit + MAX_ASIDE):
        if len(chosen) == limit:
            break
        (chosen if fits(one) else aside).append(one)
    return chosen or aside[:limit]


class OfferSize:
    """As many as passes start lately, so that a pass costs what it starts, not what waits.

    Each request that is offered is looked up in the order, handed to SGLang and taken back. A
    pass that starts more than was expected is believed at once, and twice as many are expected
    after one that starts all: with many free slots the offers double from pass to pass. One that
    starts fewer lowers what is expected slowly.

    Source: ours. Units: requests. Deterministic: every rank sees the same passes.
    """

    def __init__(self, most: int = MAX_OFFERED) -> None:
        self._most = most
        self._expected = float(most)

    def limit(self, num_free: int, num_candidates: int) -> int:
        """How many to offer with so many free slots, a few more being there to choose from."""
        wanted = math.ceil(max(1.0, self._expected))
        return min(self._most, max(0, min(num_free, wanted)) + num_candidates)

    def note(self, num_started: int, num_offered: int) -> None:
        """A pass with offers started so many of them."""
        reached = 2 * num_started if num_started == num_offered else num_started
        behind = reached - self._expected
        self._expected += behind if behind > 0 else behind / PASSES
