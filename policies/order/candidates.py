"""Which of a few offline candidates is prefilled next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from echo_sgl.batch_shape import BatchShape
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.policies.cache.eviction_order import LeafFacts, Worth, worth_of

MAX_VICTIMS = 16

_NEAR_TIE = 0.05
# A prefill that hides behind decodes may cost nothing; then its tokens alone decide.
_LEAST_S = 1e-6


class Candidate(NamedTuple):
    """An offline request whose prefill, or a chunk of it, could join the step.

    `new_tokens`: what would be computed, at least 1. `cached_tokens`: what of its prompt is in
    the cache. `evicted_needed_tokens`: what would be evicted for it although pending requests
    need it. `laxity_s`: time left until its job would miss its window, infinite without one.
    `length_bucket`: see `length_bucket`. A tuple, because some are made each time one is chosen.
    """

    rid: str
    new_tokens: int
    cached_tokens: int
    evicted_needed_tokens: int
    laxity_s: float
    length_bucket: int


class Victims:
    """The leaves that an eviction would hit next, read no further than somebody asks.

    `leaves`: tokens and facts of each, the first to go first; a step evicts a few, so only
    `MAX_VICTIMS` are ever looked at.
    """

    def __init__(self, leaves: Iterator[tuple[int, LeafFacts]]) -> None:
        self._leaves = islice(leaves, MAX_VICTIMS)
        self._seen: list[tuple[int, bool]] = []

    def needed_tokens(self, missing_tokens: int) -> int:
        """What would go for so many tokens although pending requests wait for it."""
        needed, victims = 0, chain(self._seen, self._unseen())
        while missing_tokens > 0 and (victim := next(victims, None)) is not None:
            num_tokens, is_needed = victim
            needed += min(missing_tokens, num_tokens) if is_needed else 0
            missing_tokens -= num_tokens
        return needed

    def _unseen(self) -> Iterator[tuple[int, bool]]:
        for num_tokens, facts in self._leaves:
            self._seen.append((num_tokens, worth_of(facts) is Worth.PENDING))
            yield self._seen[-1]


def length_bucket(num_tokens: int) -> int:
    """The bucket of a prompt: one for every power of two; 1,024 to 2,047 tokens share one."""
    return num_tokens.bit_length()


def mean_bucket(num_requests: int, num_tokens: int) -> int | None:
    """The bucket of the mean length of so many requests; None without any."""
    return length_bucket(num_tokens // num_requests) if num_requests else None


def rank(
    candidates: Sequence[Candidate],
    shape: BatchShape,
    predictor: StepPredictor,
    *,
    bucket: int | None = None,
) -> list[str]:
    """The ids of all candidates, the one to prefill next first.

    Late ones come first, least laxity before more; then the best score. Among scores within 5 % of
    the best of them, a prompt of `bucket` wins, that of what runs, which keeps batches regular, and
    then the order that was given.

    Cost: one prediction each and one for the step alone. `shape` is left as it was.
    Source: Echo 3.1 and 4.1 (benefit less punishment per second), 6 (length buckets).
    """
    late = [one for one in candidates if one.laxity_s < 0]
    ordinary = [one for one in candidates if one.laxity_s >= 0]
    ranked = sorted(late, key=lambda one: one.laxity_s)
    if len(ordinary) > 1:
        ordinary = _by_score(ordinary, shape, predictor, bucket)
    return [one.rid for one in ranked + ordinary]


def score(
    candidate: Candidate, shape: BatchShape, predictor: StepPredictor, alone_s: float
) -> float:
    """(Benefit - punishment) per second that the candidate adds to a step of `alone_s`.

    Benefit: the prompt tokens that are done with when it was prefilled, computed or found.
    Punishment: the tokens that pending requests would compute again. Units: tokens per second.
    """
    shape.add_prefill(candidate.new_tokens, candidate.cached_tokens)
    try:
        added_s = predictor.predict_s(shape) - alone_s
    finally:
        shape.undo()
    benefit_tokens = candidate.new_tokens + candidate.cached_tokens
    return (benefit_tokens - candidate.evicted_needed_tokens) / max(added_s, _LEAST_S)


def _by_score(
    candidates: list[Candidate], shape: BatchShape, predictor: StepPredictor, bucket: int | None
) -> list[Candidate]:
    alone_s = predictor.predict_s(shape)
    scores = [score(one, shape, predictor, alone_s) for one in candidates]
    ranked: list[Candidate] = []
    tied: list[int] = []
    for number in sorted(range(len(candidates)), key=lambda one: -scores[one]):
        if tied and scores[number] < scores[tied[0]] - _NEAR_TIE * abs(scores[tied[0]]):
            ranked += _regular_first(tied, candidates, bucket)
            tied = []
        tied.append(number)
    return ranked + _regular_first(tied, candidates, bucket)


def _regular_first(
    tied: list[int], candidates: list[Candidate], bucket: int | None
) -> list[Candidate]:
    """Same bucket as what runs first, then in the order that was given."""
    order = sorted(tied, key=lambda one: (candidates[one].length_bucket != bucket, one))
    return [candidates[one] for one in order]
