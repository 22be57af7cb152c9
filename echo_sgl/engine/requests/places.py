"""Requests of SGLang's as the rule over places knows them, see `policies/prefills/places.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from sglang.srt.managers.schedule_batch import Req

from echo_sgl.engine.requests.roster import may_sit_out
from echo_sgl.engine.requests.terms import RequestTerms, terms_of
from echo_sgl.policies.prefills.places import Placed, Places, Queued


def placed(reqs: Iterable[Req]) -> Iterator[Placed]:
    """The online requests among these that decode and could wait."""
    for req in reqs:
        terms = terms_of(req)
        if not terms.is_offline and req.output_ids and may_sit_out(req):
            yield Placed(req.rid, terms.due_s(len(req.output_ids)))


def finds_its_kv(req: Req) -> bool:
    """Whether the tree gives back what it computed: with logprobs only up to the prompt's end."""
    is_asked_for_more = req.return_logprob or req.return_hidden_states is True
    return not is_asked_for_more and req.positional_embed_overrides is None


def queued(req: Req) -> Queued:
    """A request that waits; an offline one is due never."""
    terms, num_outputs = terms_of(req), len(req.output_ids)
    due_s = math.inf if terms.is_offline else terms.due_s(num_outputs)
    return Queued(due_s, num_outputs > 0)


def enter(places: Places, queue: list[Req], req: Req) -> None:
    """Let a request wait in the queue, before those that can wait for longer."""
    num_behind = places.num_behind(map(queued, reversed(queue)), queued(req))
    queue.insert(len(queue) - num_behind, req)


def new_tokens(req: Req, terms: RequestTerms) -> int:
    """What an online request that waits, or is between chunks, has to prefill at most.

    One that gave its place away finds in the tree what it computed.
    """
    return 1 if terms.waiting_since_s is not None else int(req.seqlen - (req.extend_end or 0))


def kept_tokens(req: Req, terms: RequestTerms) -> int:
    """What the tree is to keep for an online request that waits, since it gave its place away."""
    return int(req.seqlen) if terms.waiting_since_s is not None else 0
