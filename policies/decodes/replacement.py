"""Offline decodes that take the turn of online ones with time to spare.

    online, most urgent first    a  b  c  d         step without   a b c d E     F, G sit out
    offline, least to lose first    E  F  G         step with      a b c   E F   d, G sit out

Who sits out does so for one step: the next one is planned with all online decodes again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from echo_sgl.batch_shape import BatchRow
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.policies.decodes.step_fill import Decode

# A turn that is given away takes a step, and the decode after it another.
SPARE_STEPS = 2.0


class OnlineDecode(NamedTuple):
    """An online request that decodes: when its next token is due, and what that attends to."""

    rid: str
    due_s: float
    context_tokens: int


class Replacement(NamedTuple):
    """Online requests that sit out for a step, and offline ones that decode in their turn."""

    leaving: frozenset[str]
    joining: frozenset[str]


NOBODY = Replacement(frozenset(), frozenset())


def replace_decodes(
    online: Sequence[OnlineDecode],
    left: Sequence[Decode],
    predictor: StepPredictor,
    limit_s: float,
    *,
    now_s: float,
    max_decodes: int,
    joined: Sequence[int] = (),
) -> Replacement:
    """Give offline decodes that do not fit the turn of the online ones due last.

    One for one, or more where that makes room for more, while the step then takes at most
    `limit_s` and has at most `max_decodes`. `left` are the offline decodes that found no room,
    `joined` the contexts of those that did, in tokens.

    The most urgent one always decodes, and nobody leaves who would be late for it: it must be due
    `SPARE_STEPS` such steps from now. The paper looks at the most urgent one only. One that is
    never due stays: nothing says for how long it could wait.
    Source: BROS algorithm 1, lines 18-32; the guard is ours.
    """
    staying = sorted(
        (one for one in online if math.isfinite(one.due_s)), key=lambda one: (one.due_s, one.rid)
    )
    fixed = [one.context_tokens for one in online if math.isinf(one.due_s)]
    contexts = [*joined, *fixed]
    leaving, joining = set[str](), set[str]()

    def fits(staying: Sequence[OnlineDecode], decode: Decode) -> bool:
        tokens = [*(one.context_tokens for one in staying), *contexts, decode.context_tokens]
        row = BatchRow(0, 0, 0, 0, len(tokens), sum(tokens), max(tokens))
        return len(tokens) <= max_decodes and predictor.predict_s(row) <= limit_s

    for decode in sorted(left, key=lambda one: (one.uncached_tokens, one.sequence)):
        # Where somebody has left who was longer, there may be room for one more.
        if not (leaving and fits(staying, decode)):
            if len(staying) < 2 or staying[-1].due_s - now_s < SPARE_STEPS * limit_s:
                break
            if not fits(staying[:-1], decode):
                break
            leaving.add(staying.pop().rid)
        contexts.append(decode.context_tokens)
        joining.add(decode.rid)
    return Replacement(frozenset(leaving), frozenset(joining))
