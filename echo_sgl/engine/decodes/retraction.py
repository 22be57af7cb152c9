"""Whose memory goes first when an online request needs it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sglang.srt.managers.schedule_batch import Req

from echo_sgl.engine.requests.roster import may_sit_out
from echo_sgl.engine.requests.terms import terms_of
from echo_sgl.policies.cache.preemption import Holder, preemption_order


def first_out(
    parked: Iterable[Req], running: Iterable[Req], launched: Collection[Req] = ()
) -> str | None:
    """The offline request that loses the least: parked before running. None without any.

    Nobody whose prefill is `launched` and is to say logprobs: when its result comes, SGLang passes
    over who was retracted, and gives the next one of its batch the logprobs that are his.
    """
    holders = [
        _holder(req, is_parked=is_parked)
        for is_parked, reqs in ((True, parked), (False, running))
        for req in reqs
        if terms_of(req).is_offline and gives_up_memory(req)
        if not (req.return_logprob and req in launched)
    ]
    return next(iter(preemption_order(holders)), None)


def gives_up_memory(req: Req) -> bool:
    """Whether a request may lose its memory and go on later.

    Not one that asked for all its hidden states: SGLang would put those of the prefill that brings
    it back, of one token or of all, among those of its answer.
    """
    return may_sit_out(req) and req.return_hidden_states is not True


def uncached_tokens(req: Req) -> int:
    """Tokens whose KV only this request holds: they are computed again if it is lost."""
    return int(max(0, req.seqlen - req.kv.cache_protected_len))


def _holder(req: Req, *, is_parked: bool) -> Holder:
    tokens = uncached_tokens(req)
    return Holder(
        rid=req.rid,
        is_parked=is_parked,
        uncached_tokens=tokens,
        held_tokens=tokens,
        started_sequence=req.echo_sequence,
    )
