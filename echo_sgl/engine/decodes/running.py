"""The running requests: looked up when they come, counted on from there.

A step that decodes gives each of them one token more, so their sums and the first due time
follow from those before, and are worked out when they are asked for. To look 64 requests up takes
as long as all else that plans a step: what the model ran has left nothing of them in the CPU's
caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from echo_sgl.batch_shape import BatchRow, BatchShape, SummedShape
from echo_sgl.engine.requests.roster import Part, Roster, may_sit_out
from echo_sgl.engine.requests.terms import terms_of
from echo_sgl.policies.decodes.contexts import Contexts
from echo_sgl.policies.limits.step_limit import ENDING_TOKENS, Ending
from echo_sgl.policies.order.candidates import mean_bucket


class Running:
    """Who decodes, by class.

    `online`: the decodes of online requests; `decode_due_s`: when the first of their next
    tokens is due, infinite without any. `offline`: those of offline ones that may sit out, of
    which there are `num_offline`. Units: seconds on the step clock, tokens.
    """

    __slots__ = (
        "_all",
        "_ends",
        "_first_tokens",
        "_is_outdated",
        "_least_left",
        "_num_grown",
        "_num_reqs",
        "_offline",
        "_online",
        "_reqs",
        "_roster",
        "_shape",
        "_tokens_since",
        "_tpot_s",
        "decode_due_s",
        "num_offline",
    )

    def __init__(self, reqs: Sequence[Req], now_s: float) -> None:
        self._roster = Roster()
        self._tpot_s: float | None = None
        self._shape: BatchShape | None = None
        self.decode_due_s, self._num_grown = math.inf, 0
        self._follow(reqs, now_s)
        self._look_up_online(now_s)

    @property
    def online(self) -> BatchShape:
        if self._shape is None:
            online = self._online.longer(self._tokens_since)
            self._shape = SummedShape(online.num, online.tokens, online.longest)
        return self._shape

    @property
    def offline(self) -> Contexts:
        return self._offline.longer(self._tokens_since)

    def _look_up_online(self, now_s: float) -> None:
        due_s, tpots_s, ends = math.inf, set(), []
        for req in self._roster.reqs_of(Part.ONLINE):
            terms, num_outputs = terms_of(req), len(req.output_ids)
            if num_outputs and terms.first_token_s is None:
                terms.note_first_token(now_s, req.sampling_params.max_new_tokens)
            due_s = min(due_s, terms.due_s(num_outputs))
            if num_outputs and terms.promise.tpot_s < math.inf:
                ends.append((terms.max_tokens - num_outputs, terms))
            # What is due after a first token is not known before it.
            tpots_s.add(terms.promise.tpot_s if num_outputs else None)
        self.decode_due_s = due_s
        self._ends, self._num_grown = ends, 0
        self._least_left = min((num_left for num_left, _ in ends), default=math.inf)
        # Of several promises, another may be due first after some steps.
        self._tpot_s = next(iter(tpots_s), math.inf) if len(tpots_s) < 2 else None

    @property
    def endings(self) -> tuple[Ending, ...]:
        """The online decodes with few tokens left of what their clients allowed."""
        if self._least_left - self._num_grown > ENDING_TOKENS:
            return ()
        lefts = ((left - self._num_grown, terms) for left, terms in self._ends)
        return tuple(terms.ending(left) for left, terms in lefts if left <= ENDING_TOKENS)

    def note_end(self, req: Req) -> None:
        """A request ended: it may be one of these, and stay in the batch for a step."""
        self._roster.look_again(req)
        self._is_outdated = True

    def advance(self, reqs: Sequence[Req], now_s: float) -> None:
        """Who decodes now: those that stayed are counted on, the others looked up."""
        is_new = False
        if self._is_outdated or not self.are(reqs):
            is_new = self._follow(reqs, now_s)
        elif self._num_reqs and (grown := reqs[0].seqlen - self._first_tokens):
            self._first_tokens += grown
            self._tokens_since += grown
            self._roster.grow(grown)
            self._grow_online(grown)
        if is_new or self._tpot_s is None:
            self._look_up_online(now_s)

    def _follow(self, reqs: Sequence[Req], now_s: float) -> bool:
        """Somebody came or went; whether the online ones are others now."""
        grown, is_new = self._roster.follow(reqs, now_s)
        self._reqs, self._num_reqs, self._is_outdated = reqs, len(reqs), False
        self._first_tokens = reqs[0].seqlen if reqs else 0
        contexts = self._roster.contexts
        self._online, self._offline = contexts(Part.ONLINE), contexts(Part.OFFLINE)
        self._all = self._offline.joined(self._online, contexts(Part.LEAVING))
        self.num_offline, self._tokens_since = self._offline.num, 0
        self._grow_online(grown)
        return is_new

    def _grow_online(self, tokens: int) -> None:
        self._shape = None
        if tokens and self._online.num and self._tpot_s is not None:
            self._num_grown += tokens
            self.decode_due_s += tokens * self._tpot_s

    def row_of(self, reqs: Sequence[Req]) -> BatchRow | None:
        """The step that decodes these and nothing else; None if one is not known, or none is."""
        if self.are(reqs):
            known: Contexts | None = self._all.longer(self._tokens_since)
        else:
            known = self._roster.contexts_of(reqs)
        if known is None or not known.num:
            return None
        return BatchRow(0, 0, 0, 0, known.num, known.tokens, known.longest)

    @property
    def length_bucket(self) -> int | None:
        """That of the mean context of all that decode; None when nobody does."""
        num, tokens, *_ = self._all
        return mean_bucket(num, tokens + self._tokens_since * num)

    def online_part(self, batch: ScheduleBatch, row: BatchRow) -> tuple[BatchShape, int]:
        """What a batch would be without its offline requests, and how many those are."""
        if not row.num_prefills:
            online = self.online if self.are(batch.reqs) else _online_of(batch.reqs)
            return online, row.num_decodes - len(online)
        online, num_offline = BatchShape(), 0
        for index, (new, cached) in enumerate(
            zip(batch.extend_lens, batch.prefix_lens, strict=True)
        ):
            if terms_of(batch.reqs[index]).is_offline:
                num_offline += 1
            elif index < row.num_prefills:
                online.add_prefill(new, cached)
            else:
                online.add_decode(cached + 1)
        return online, num_offline

    def are(self, reqs: Sequence[Req]) -> bool:
        """Whether it is these that were looked up."""
        return reqs is self._reqs and len(reqs) == self._num_reqs


def _online_of(reqs: Sequence[Req]) -> BatchShape:
    """The decodes of the online ones among these.

    Of either class some may have left since the step began: SGLang has those whose last token is
    on its way sit out.
    """
    online = BatchShape()
    for req in reqs:
        if not terms_of(req).is_offline:
            online.add_decode(req.seqlen)
    return online


def offline_of(reqs: Sequence[Req]) -> list[Req]:
    """The offline requests among these that may be parked or give up their memory."""
    return [req for req in reqs if terms_of(req).is_offline and may_sit_out(req)]
