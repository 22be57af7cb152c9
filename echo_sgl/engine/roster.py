"""Who decodes and with how long a context; of those that stayed nothing is read again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum

from sglang.srt.managers.schedule_batch import Req

from echo_sgl.engine.terms import terms_of
from echo_sgl.policies.contexts import Contexts


class Part(IntEnum):
    """What a running request counts as."""

    ONLINE = 0
    OFFLINE = 1
    # It is still there, but has ended, or is offline and may not sit out.
    LEAVING = 2
    # It is about to be looked up.
    UNKNOWN = 3


class Roster:
    """The requests of a batch by part, with their contexts in tokens.

    Each step that decodes gives all of them one token more, so that one of those that stayed
    tells of the others. The first token may come apart from theirs: who has none yet is looked up
    again, as is who is about to leave. An offline one that is aborted counts until it ends.
    Those that stay keep their order, as in SGLang's batches; who does not is looked up.
    """

    __slots__ = ("_again", "_num_grown", "_parts", "_reqs", "_tokens")

    def __init__(self) -> None:
        # All in the batch's order, and close together in memory.
        self._reqs: list[Req] = []
        self._parts = bytearray()
        # Contexts as they were, before all grew by `_num_grown` tokens.
        self._tokens = array("q")
        self._num_grown = 0
        self._again: set[int] = set()

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
        num_before = self._parts.count(Part.ONLINE)
        came = self._keep(reqs)
        num_stayed = self._parts.count(Part.ONLINE)
        grown = self._growth()
        self._num_grown += grown
        for place in came:
            self._look_up(place, now_s)
        return grown, not num_before == num_stayed == self._parts.count(Part.ONLINE)

    def contexts(self, part: Part) -> Contexts:
        """Of those that count as this."""
        each = zip(self._parts, self._tokens, strict=True)
        return Contexts.of([tokens for one, tokens in each if one == part]).longer(self._num_grown)

    def reqs_of(self, part: Part) -> list[Req]:
        """In the batch's order."""
        return [req for one, req in zip(self._parts, self._reqs, strict=True) if one == part]

    def _keep(self, reqs: Sequence[Req]) -> list[int]:
        """Go over to these requests; the places of those that are to be looked up."""
        held, again, number = self._reqs, self._again, 0
        parts, tokens, came = bytearray(), array("q"), []
        for place, req in enumerate(reqs):
            while number < len(held) and held[number] is not req:
                number += 1
            if number < len(held) and id(req) not in again:
                parts.append(self._parts[number])
                tokens.append(self._tokens[number])
            else:
                parts.append(Part.UNKNOWN)
                tokens.append(0)
                came.append(place)
        self._reqs, self._parts, self._tokens, self._again = list(reqs), parts, tokens, set()
        return came

    def _growth(self) -> int:
        for req, part, tokens in zip(self._reqs, self._parts, self._tokens, strict=True):
            if part != Part.UNKNOWN:
                return int(req.seqlen - tokens - self._num_grown)
        return 0

    def _look_up(self, place: int, now_s: float) -> None:
        req = self._reqs[place]
        part = self._parts[place] = _part_of(req, now_s)
        self._tokens[place] = req.seqlen - self._num_grown
        if part is Part.LEAVING or not req.output_ids:
            self._again.add(id(req))


def may_sit_out(req: Req) -> bool:
    """Whether an offline request may be parked or give up its memory: one that ends may not."""
    return not req.finished() and req.to_finish is None and req.beam_group is None


def _part_of(req: Req, now_s: float) -> Part:
    if terms_of(req, now_s).is_offline:
        return Part.OFFLINE if may_sit_out(req) else Part.LEAVING
    return Part.LEAVING if req.finished() else Part.ONLINE
