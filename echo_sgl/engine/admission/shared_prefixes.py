"""What requests of one prefill step would compute twice, since it is not in the cache yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang.srt.managers.schedule_batch import Req

from echo_sgl.engine.cache.node_path import namespace_of
from echo_sgl.policies.prefills.first_tokens import MIN_SHARED_TOKENS


def begins_like(req: Req, num_tokens: int, neighbours: Iterable[Req]) -> bool:
    """Whether one of the neighbours has the same first `num_tokens` of a prompt."""
    start = req.origin_input_ids[:num_tokens]
    return any(
        other.origin_input_ids[:num_tokens] == start and _may_share(req, other)
        for other in neighbours
    )


def shared_tokens(req: Req, cached_tokens: int, neighbours: Iterable[Req], page_size: int) -> int:
    """The most tokens behind the cached ones that are in the cache once the neighbours' step ended.

    Whole pages; 0 where it is less than `MIN_SHARED_TOKENS`.
    """
    most_tokens = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
    ids, longest = req.origin_input_ids, 0
    for other in neighbours:
        # Of one between chunks, what it will have computed; of one set aside since, nothing more.
        end = min(most_tokens, other.extend_end or 0, len(ids))
        common = _common_tokens(ids, other.origin_input_ids, cached_tokens, end)
        if common > longest and _may_share(req, other):
            longest = common
    shared = longest // page_size * page_size - cached_tokens
    return shared if shared >= MIN_SHARED_TOKENS else 0


def _may_share(req: Req, other: Req) -> bool:
    return namespace_of(req) == namespace_of(other)


def _common_tokens(ids: Sequence[int], others: Sequence[int], start: int, end: int) -> int:
    """How many tokens both begin with, `end` at most; 0 where it is not `MIN_SHARED_TOKENS` more
    than `start`. Few are compared of prompts that differ.
    """
    end, known = min(end, len(others)), start + MIN_SHARED_TOKENS
    if known > end or ids[start:known] != others[start:known] or ids[:start] != others[:start]:
        return 0
    while known < end:
        middle = (known + end + 1) // 2
        if ids[known:middle] == others[known:middle]:
            known = middle
        else:
            end = middle - 1
    return known
