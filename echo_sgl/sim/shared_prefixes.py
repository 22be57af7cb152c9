"""What simulated requests of one prefill step would compute twice, as in `engine/admission`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from echo_sgl.policies.prefills.first_tokens import MIN_SHARED_TOKENS
from echo_sgl.sim.workload import SimRequest


def begins_like(request: SimRequest, num_tokens: int, neighbours: Iterable[SimRequest]) -> bool:
    """Whether one of the neighbours has the same first `num_tokens`."""
    num_blocks = found_tokens = 0
    while found_tokens < num_tokens and num_blocks < len(request.blocks):
        found_tokens += request.sizes[num_blocks]
        num_blocks += 1
    if found_tokens < num_tokens:
        return False
    start = request.blocks[:num_blocks]
    return any(one.blocks[:num_blocks] == start for one in neighbours)


def shared_tokens(
    request: SimRequest, cached_tokens: int, neighbours: Iterable[SimRequest], page_tokens: int
) -> int:
    """The most tokens behind the cached ones that are in the cache once the neighbours' step ended.

    Whole pages; 0 where it is less than `MIN_SHARED_TOKENS`.
    """
    most_tokens = request.seq_tokens - 1
    # Of one between chunks, what it will have computed.
    ends = (min(_common_tokens(request, one), one.computed_tokens) for one in neighbours)
    longest = min(most_tokens, max(ends, default=0))
    shared = longest // page_tokens * page_tokens - cached_tokens
    return shared if shared >= MIN_SHARED_TOKENS else 0


def _common_tokens(request: SimRequest, other: SimRequest) -> int:
    """How many tokens both begin with, in whole blocks."""
    pairs = zip(request.blocks, other.blocks, request.sizes, strict=False)
    return sum(size for _, _, size in takewhile(lambda pair: pair[0] == pair[1], pairs))
