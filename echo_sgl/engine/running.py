"""The running requests: looked up when they come, counted on from then.

A step that decodes gives each of them one token more, so their sums and the first due time
follow from those before. To look 64 requests up takes as long as all else that plans a step:
what the model ran has left nothing of them in the CPU's caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sglang.srt.managers.schedule_batch import Req

from echo_sgl.batch_shape import BatchRow, BatchShape, SummedShape
from echo_sgl.engine.terms import RequestTerms, terms_of
from echo_sgl.policies.step_planner import Contexts


class _Member(NamedTuple):
    """A running request, its length and due time less what all have grown since the first.

    `is_online`: None for one that ends and counts for neither class. `tpot_s`: None before its
    first token, when nobody knows what is due after it; it comes without a step of its own.
    """

    tokens: int
    is_online: bool | None
    due_s: float = math.inf
    tpot_s: float | None = math.inf

    @property
    def grows(self) -> bool:
        """Whether each step from here on gives it one token, and nothing else changes."""
        return self.is_online is not None and self.tpot_s is not None


class Running:
    """Who decodes, by class.

    `online`: the decodes of online requests; `decode_due_s`: when the first of their next
    tokens is due, infinite without any. Units: seconds on the step clock, tokens.
    """

    __slots__ = (
        "_all",
        "_grown_tokens",
        "_is_outdated",
        "_members",
        "_num_reqs",
        "_offline",
        "_online",
        "_reqs",
        "_tpot_s",
        "decode_due_s",
        "online",
    )

    def __init__(
        self,
        reqs: Sequence[Req],
        now_s: float,
        known: dict[Req, _Member] | None = None,
        grown_tokens: int = 0,
    ) -> None:
        self._reqs, self._num_reqs, self._grown_tokens = reqs, len(reqs), grown_tokens
        known = known or {}
        members = [known.get(req) or _look_up(req, now_s, grown_tokens) for req in reqs]
        self._members = {
            req: member for req, member in zip(reqs, members, strict=True) if member.grows
        }
        self._is_outdated = len(self._members) < len(reqs)
        online = [one for one in members if one.is_online]
        self._all = _contexts(members, grown_tokens)
        self._online = _contexts(online, grown_tokens)
        self._offline = _contexts([one for one in members if one.is_online is False], grown_tokens)
        self.online = _shape(self._online)
        due_s = (_later_s(one.due_s, grown_tokens, one.tpot_s) for one in online)
        self.decode_due_s = min(due_s, default=math.inf)
        # Of several promises, another may be due first after some steps.
        tpots_s = {one.tpot_s for one in online}
        self._tpot_s = next(iter(tpots_s), math.inf) if len(tpots_s) < 2 else None

    def outdate(self, req: Req) -> None:
        """It ended, or may have, or sat out: what is known of it no longer holds."""
        self._members.pop(req, None)
        self._is_outdated = True

    def at(self, reqs: Sequence[Req], now_s: float) -> Running:
        """Who decodes now: these counted on, and whoever else is there looked up."""
        stayed = next((req for req in reqs if req in self._members), None)
        if stayed is None:
            return Running(reqs, now_s)
        grown = stayed.seqlen - self._members[stayed].tokens - self._grown_tokens
        if self._tpot_s is None or self._is_outdated or not self._are(reqs):
            return Running(reqs, now_s, self._members, self._grown_tokens + grown)
        if grown:
            self._grow(grown, self._tpot_s)
        return self

    def _grow(self, tokens: int, tpot_s: float) -> None:
        """Each of them has so many tokens more."""
        self._grown_tokens += tokens
        self._all, self._offline = self._all.longer(tokens), self._offline.longer(tokens)
        if self._online.num:
            self._online = self._online.longer(tokens)
            self.online = _shape(self._online)
            self.decode_due_s += tokens * tpot_s

    def offline_contexts(self, reqs: Sequence[Req]) -> Contexts:
        """Of the offline requests among these that may sit out; looked up if others came."""
        if self._are(reqs):
            return self._offline
        return Contexts.of([req.seqlen for req in offline_of(reqs)])

    def row_of(self, reqs: Sequence[Req]) -> BatchRow | None:
        """The step that decodes these and nothing else; None if they are others by now."""
        if not self._are(reqs) or not self._num_reqs:
            return None
        return BatchRow(0, 0, 0, 0, self._all.num, self._all.tokens, self._all.longest)

    def _are(self, reqs: Sequence[Req]) -> bool:
        return reqs is self._reqs and len(reqs) == self._num_reqs


def _look_up(req: Req, now_s: float, grown_tokens: int) -> _Member:
    terms: RequestTerms = terms_of(req, now_s)
    tokens = req.seqlen - grown_tokens
    num_outputs = len(req.output_ids)
    if terms.is_offline:
        is_online = False if may_sit_out(req) else None
        return _Member(tokens, is_online, tpot_s=math.inf if num_outputs else None)
    if req.finished():
        return _Member(tokens, None)
    if num_outputs and terms.first_token_s is None:
        terms.first_token_s = now_s
    tpot_s = terms.promise.tpot_s if num_outputs else None
    due_s = _later_s(terms.due_s(num_outputs), -grown_tokens, tpot_s)
    return _Member(tokens, True, due_s, tpot_s)


def _later_s(due_s: float, tokens: int, tpot_s: float | None) -> float:
    """So many tokens on; no tokens of infinite time each would not be a number."""
    return due_s if tpot_s is None or math.isinf(tpot_s) else due_s + tokens * tpot_s


def _contexts(members: Sequence[_Member], grown_tokens: int) -> Contexts:
    return Contexts.of([member.tokens for member in members]).longer(grown_tokens)


def _shape(contexts: Contexts) -> BatchShape:
    return SummedShape(contexts.num, contexts.tokens, contexts.longest)


def offline_of(reqs: Sequence[Req]) -> list[Req]:
    """The offline requests among these that may be parked or give up their memory."""
    return [req for req in reqs if terms_of(req).is_offline and may_sit_out(req)]


def may_sit_out(req: Req) -> bool:
    """Whether an offline request may be parked or give up its memory: one that ends may not."""
    return not req.finished() and req.to_finish is None and req.beam_group is None
