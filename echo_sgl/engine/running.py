"""The running requests, taken in once at the start of a step and asked for often in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang.srt.managers.schedule_batch import Req

from echo_sgl.batch_shape import BatchShape
from echo_sgl.engine.terms import terms_of
from echo_sgl.policies.step_planner import Contexts


class Running:
    """Who decodes, by class, as it was when this was made.

    `online`: the decodes of online requests; `decode_due_s`: when the first of their next
    tokens is due, infinite without any; `offline`: the requests that may be parked or give up
    their memory, and `offline_contexts` theirs. Units: seconds on the step clock, tokens.
    """

    __slots__ = ("_num_reqs", "_reqs", "decode_due_s", "offline", "offline_contexts", "online")

    def __init__(self, reqs: Sequence[Req], now_s: float) -> None:
        self._reqs, self._num_reqs = reqs, len(reqs)
        self.online, self.decode_due_s = BatchShape(), math.inf
        self.offline: list[Req] = []
        contexts = []
        for req in reqs:
            terms = terms_of(req, now_s)
            if terms.is_offline:
                if may_sit_out(req):
                    self.offline.append(req)
                    contexts.append(req.seqlen)
            elif not req.finished():
                num_tokens = len(req.output_ids)
                if num_tokens and terms.first_token_s is None:
                    terms.first_token_s = now_s
                self.online.add_decode(req.seqlen)
                self.decode_due_s = min(self.decode_due_s, terms.due_s(num_tokens))
        self.offline_contexts = Contexts.of(contexts)

    def offline_of(self, reqs: Sequence[Req]) -> list[Req]:
        """`offline` of these; looked up again if requests came or left since."""
        if reqs is self._reqs and len(reqs) == self._num_reqs:
            return self.offline
        return [req for req in reqs if terms_of(req).is_offline and may_sit_out(req)]

    def contexts_of(self, offline: list[Req]) -> Contexts:
        """The contexts of what `offline_of` returned."""
        if offline is self.offline:
            return self.offline_contexts
        return Contexts.of([req.seqlen for req in offline])


def may_sit_out(req: Req) -> bool:
    """Whether an offline request may be parked or give up its memory: one that ends may not."""
    return not req.finished() and req.to_finish is None and req.beam_group is None
