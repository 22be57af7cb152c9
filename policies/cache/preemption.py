"""Which offline request gives its memory first when an online one needs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """A request that holds KV cache.

    `held_tokens`: what becomes free when it gives its memory, without what others share with
    it. `uncached_tokens`: what would be computed again for it then. `started_sequence`: its
    place in the order of start, unique. An online request never gives its memory here.
    """

    rid: str
    is_parked: bool
    uncached_tokens: int
    held_tokens: int
    started_sequence: int
    is_online: bool = False


def preemption_order(holders: Iterable[Holder]) -> list[str]:
    """The ids of the offline requests, first out first.

    Parked ones before running ones, which are in the middle of a step's work; then least work
    that is lost; then last started, for the first one is nearest to its end.

    Source: the order is ours; that offline requests give way at all, and keep what they computed
    where they can, is HyGen's (algorithm 1, line 23, and 4.1). Units: tokens.
    """
    return [holder.rid for holder in _first_out_first(holders)]


def enough(holders: Iterable[Holder], needed_tokens: int) -> list[str] | None:
    """The shortest prefix of `preemption_order` that frees `needed_tokens`.

    Empty when nothing is needed. None when all together would not be enough: then nobody
    should lose work for a request that still could not start. Units: tokens.
    """
    chosen: list[str] = []
    freed_tokens = 0
    for holder in _first_out_first(holders):
        if freed_tokens >= needed_tokens:
            break
        chosen.append(holder.rid)
        freed_tokens += holder.held_tokens
    return chosen if freed_tokens >= needed_tokens else None


def _first_out_first(holders: Iterable[Holder]) -> list[Holder]:
    offline = [holder for holder in holders if not holder.is_online]
    return sorted(
        offline,
        key=lambda one: (not one.is_parked, one.uncached_tokens, -one.started_sequence),
    )
