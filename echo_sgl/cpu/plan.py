"""What one forward pass attends to: built once per pass, used by every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Decode rows are padded to one length and attended in groups of at most this many keys.
# Measured on 2 cores, one layer: one call per request is 3x slower at 16 x 500 tokens and equal
# at 16 x 4,000; groups of 65,536 are 1.5x slower at 16 x 2,000 (they fall out of the cache).
MAX_GROUP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One request with several new tokens: rows `start:end` of the batch's queries.

    `prefix_slots` are the KV slots of its cached tokens, shape [prefix_tokens].
    """

    start: int
    end: int
    prefix_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Requests with one new token each, padded to the longest of them.

    Shapes: `rows` [requests]; `slots` [requests * max_tokens], the new token's slot
    included; `mask` [requests, 1, 1, max_tokens], 0 or -inf, None when all are equally long.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All requests of a forward pass, each in exactly one of the two lists."""

    prefills: tuple[PrefillPlan, ...]
    decodes: tuple[DecodePlan, ...]


class _Single(NamedTuple):
    """A request with one new token; sorted by length."""

    num_tokens: int
    row: int
    request: int


def build_plan(
    req_to_token: torch.Tensor,
    requests: Sequence[int],
    num_tokens: Sequence[int],
    new_tokens: Sequence[int],
    dtype: torch.dtype,
) -> AttentionPlan:
    """Sort a batch into prefills and decode groups.

    `requests` are rows of `req_to_token`, shape [requests, tokens], which holds the KV slots of
    each one's tokens: the first `num_tokens` are there, cached and new, and `new_tokens` how many
    of them are new. Queries stand in the same order.
    """
    prefills: list[PrefillPlan] = []
    singles: list[_Single] = []
    start = 0
    for request, num, num_new in zip(requests, num_tokens, new_tokens, strict=True):
        if num_new == 1:
            singles.append(_Single(num, start, request))
        elif num_new > 1:
            prefix_slots = req_to_token[request, : num - num_new]
            prefills.append(PrefillPlan(start, start + num_new, prefix_slots))
        start += num_new
    decodes = (_pad(group, req_to_token, dtype) for group in _groups(sorted(singles)))
    return AttentionPlan(tuple(prefills), tuple(decodes))


def _groups(singles: Sequence[_Single]) -> Iterator[Sequence[_Single]]:
    """Cut requests, sorted by length, so that a padded group has at most MAX_GROUP_TOKENS."""
    first = 0
    for i, single in enumerate(singles):
        if i > first and (i + 1 - first) * single.num_tokens > MAX_GROUP_TOKENS:
            yield singles[first:i]
            first = i
    if first < len(singles):
        yield singles[first:]


def _pad(group: Sequence[_Single], req_to_token: torch.Tensor, dtype: torch.dtype) -> DecodePlan:
    """Pad a group, sorted by length, to its last request."""
    lengths, rows, requests = torch.tensor(group).T
    slots = req_to_token[:, : group[-1].num_tokens].index_select(0, requests)
    if group[0].num_tokens == group[-1].num_tokens:
        return DecodePlan(rows, slots.flatten(), None)
    # Padding repeats a slot of the request itself: one that was never written may hold NaN,
    # which no mask removes.
    beyond = torch.arange(slots.shape[1]) >= lengths[:, None]
    slots = torch.where(beyond, slots.gather(1, lengths[:, None] - 1), slots)
    mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))
    return DecodePlan(rows, slots.flatten(), mask[:, None, None])
