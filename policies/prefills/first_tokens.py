"""Which online requests that wait are prefilled in one step, and which in the next.

All whose prefills a step holds have their first tokens when it ends. `a` waited while a step with
offline work ran, and `b` came meanwhile:

    due                  a        b
    together:   [   a and b   ]             a is late
    apart:      [  a  ][   b   ]            nobody is, for the fixed cost of a second prefill
"""

from __future__ import annotations

from typing import NamedTuple

from echo_sgl.batch_shape import BatchShape
from echo_sgl.estimators.batch_time import StepPredictor, prefill_alone_s


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
