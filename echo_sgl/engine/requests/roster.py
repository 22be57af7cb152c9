"""Who decodes and with how long a context; of those that stayed nothing is read again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from sglang.srt.managers.schedule_batch import Req

from echo_sgl.engine.requests.terms import terms_of
from echo_sgl.policies.decodes.contexts import NOBODY, Contexts


class Part(IntEnum):
    """What a running request counts as."""

    ONLINE = 0
    OFFLINE = 1
    # It is still there, but has ended, or is offline and may not sit out.
    LEAVING = 2


class Roster:
    """The requests of a batch by part, with their contexts in tokens.

    Each step that decodes gives all of them one token more, so that one of those that stayed
    tells of the others. The first token may come apart from theirs: who has none yet is looked up
    again, as is who is about to leave. An offline one that is aborted counts until it ends.
    """

    __slots__ = ("_again", "_contexts", "_held", "_num_grown", "_reqs", "_sums")

    def __init__(self) -> None:
        # By identity, with the requests themselves, so that no other one takes it over.
        self._held: dict[int, tuple[Req, Part]] = {}
        # Those of each part, as they were before all grew by `_num_grown` tokens; and their sums,
        # None where somebody left who was the longest or the shortest.
        self._contexts: tuple[dict[int, int], ...] = tuple({} for _ in Part)
        self._sums: list[Contexts | None] = [NOBODY for _ in Part]
        self._num_grown = 0
        self._again: set[int] = set()
        self._reqs: list[Req] = []

    def grow(self, num_tokens: int) -> None:
        """Each of them has so many tokens more."""
        self._num_grown += num_tokens

    def look_again(self, req: Req) -> None:
        """Something happened to a request; it may be one of these."""
        self._again.add(id(req))

    def follow(self, reqs: Sequence[Req], now_s: float) -> tuple[int, bool]:
        """It is these now; by how many tokens those that stayed have grown since this was told
        last, and whether other online ones are here.
        """
        online = self._contexts[Part.ONLINE]
        had_online = set(online)
        again, self._again = self._again, set()
        stayed = [req for req in self._reqs if id(req) not in again]
        self._reqs = list(reqs)
        # Mostly some have ended, and nobody came.
        here = None if stayed == self._reqs else set(map(id, reqs))
        self._drop(again if here is None else again.union(self._held.keys() - here))
        grown = self._growth()
        self._num_grown += grown
        came = here - self._held.keys() if here is not None else set()
        if came:
            self._look_up([req for req in reqs if id(req) in came], now_s)
        return grown, online.keys() != had_online or not came.isdisjoint(had_online)

    def contexts(self, part: Part) -> Contexts:
        """Of those that count as this."""
        sums = self._sums[part]
        if sums is None:
            sums = self._sums[part] = Contexts.of(list(self._contexts[part].values()))
        return sums.longer(self._num_grown)

    def contexts_of(self, reqs: Iterable[Req]) -> Contexts | None:
        """Of these; None if one of them is not here."""
        known = self._contexts[Part.ONLINE] | self._contexts[Part.OFFLINE]
        known |= self._contexts[Part.LEAVING]
        tokens = [known.get(id(req)) for req in reqs]
        found = [num for num in tokens if num is not None]
        return Contexts.of(found).longer(self._num_grown) if len(found) == len(tokens) else None

    def reqs_of(self, part: Part) -> list[Req]:
        """In the order in which they came."""
        return [self._held[key][0] for key in self._contexts[part]]

    def _drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            if (gone := self._held.pop(key, None)) is not None:
                part = gone[1]
                tokens = self._contexts[part].pop(key)
                if (sums := self._sums[part]) is not None:
                    self._sums[part] = sums.without(tokens)

    def _growth(self) -> int:
        for key, (req, part) in self._held.items():
            return int(req.seqlen - self._contexts[part][key] - self._num_grown)
        return 0

    def _look_up(self, reqs: Iterable[Req], now_s: float) -> None:
        for req in reqs:
            key, part = id(req), _part_of(req, now_s)
            tokens = req.seqlen - self._num_grown
            self._held[key] = req, part
            self._contexts[part][key] = tokens
            if (sums := self._sums[part]) is not None:
                self._sums[part] = sums.with_one(tokens)
            if part is Part.LEAVING or not req.output_ids:
                self._again.add(key)


def may_sit_out(req: Req) -> bool:
    """Whether a request may be parked or give up its memory: one that ends may not, nor a turn of
    a streaming session, which keeps what it gives up.
    """
    is_turn = req.session is not None and req.session.streaming
    return not (
        req.finished() or req.to_finish is not None or req.beam_group is not None or is_turn
    )


def _part_of(req: Req, now_s: float) -> Part:
    if terms_of(req, now_s).is_offline:
        return Part.OFFLINE if may_sit_out(req) else Part.LEAVING
    return Part.LEAVING if req.finished() else Part.ONLINE
