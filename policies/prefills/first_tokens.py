"""Which online requests that wait are prefilled in one step, and which in the next.

All whose prefills a step holds have their first tokens when it ends. `a` waited while a step with
offline work ran, and `b` came meanwhile:

    due                  a        b
    together:   [   a and b   ]             a is late
    apart:      [  a  ][   b   ]            nobody is, for the fixed cost of a second prefill

And two that begin alike, as the next calls of one conversation, find nothing of each other:

    together:   [   a and b   ]             what they share is computed twice
    apart:      [  a  ][b]                  `b` finds it in the cache, and both are sooner
"""

from __future__ import annotations

from typing import NamedTuple

from echo_sgl.batch_shape import BatchShape
from echo_sgl.estimators.batch_time import StepPredictor, prefill_alone_s

# A neighbour's prefix is worth one step's wait when it saves at least this much prefill.
MIN_SHARED_TOKENS = 32


class Joining(NamedTuple):
    """An online request that could join a prefill step: its chunk there, and when its next token is
    due, in seconds on the caller's clock."""

    new_tokens: int
    cached_tokens: int
    due_s: float


def starts_later(
    predictor: StepPredictor,
    step: BatchShape,
    joining: Joining,
    *,
    now_s: float,
    first_due_s: float,
    between_s: float,
) -> bool:
    """Whether a request is to be prefilled after `step` instead of in it.

    When those that are in `step`, the first of them due at `first_due_s`, are in time without it
    and not with it; and it is in time afterwards, or not in time in any case. `between_s`: for
    online decodes that go between the two.

    Source: ours; that fewest jobs are late when who makes another late goes last is Moore's (1968).
    Units: seconds. `step` is left as it was.
    """
    alone_s = predictor.predict_s(step)
    if now_s + alone_s > first_due_s:
        return False
    step.add_prefill(joining.new_tokens, joining.cached_tokens)
    together_s = predictor.predict_s(step)
    step.undo()
    if now_s + together_s <= first_due_s:
        return False
    own_s = prefill_alone_s(predictor, joining.new_tokens, joining.cached_tokens)
    is_in_time = now_s + alone_s + between_s + own_s <= joining.due_s
    return is_in_time or now_s + together_s > joining.due_s


def waits_for_prefix(
    predictor: StepPredictor,
    step: BatchShape,
    joining: Joining,
    *,
    shared_tokens: int,
    between_s: float,
) -> bool:
    """Whether a request is to be prefilled after `step`, which computes `shared_tokens` of its own.

    When it ends no later than it would in `step`; who is in there ends sooner in any case.
    `between_s`: for online decodes that go between the two.

    Source: ours; SGLang does so by number of tokens where its order knows the cache (lpm).
    Units: seconds, tokens. `step` is left as it was.
    """
    new_tokens, cached_tokens = joining.new_tokens, joining.cached_tokens
    alone_s = predictor.predict_s(step)
    step.add_prefill(new_tokens, cached_tokens)
    together_s = predictor.predict_s(step)
    step.undo()
    own_s = prefill_alone_s(predictor, new_tokens - shared_tokens, cached_tokens + shared_tokens)
    return alone_s + between_s + own_s <= together_s
