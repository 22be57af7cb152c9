"""Online requests packed by least slack: who has time to spare leaves a step that is too long.

    most urgent first   a   b   c   d      due in 20, 35, 200 and 300 ms
    step of all         30 ms              a is late
    step without c, d   18 ms              nobody is: c and d have their turn in the next one

Who sits out does so for one step: the next one is planned with all online decodes again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from echo_sgl.batch_shape import BatchRow
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.policies.decodes.replacement import SPARE_STEPS, OnlineDecode


def leaves_for_urgent(
    online: Sequence[OnlineDecode],
    predictor: StepPredictor,
    *,
    now_s: float,
    due_s: float,
    max_decodes: int,
    beside: Sequence[int] = (),
) -> frozenset[str]:
    """The ids of the online decodes that sit out so that the step ends by `due_s`.

    As many stay as fit before then, and at most `max_decodes`, the most urgent first; one of them
    always does. `due_s` is when the first token of any online request is due, of those that wait
    for their first one, too. `beside`: contexts of online decodes that stay in any case, in tokens.

    Nobody leaves who would be late for it: it must be due `SPARE_STEPS` such steps from now. And
    nobody does where the step ends too late without them as well: the paper then decodes nobody.
    Source: BROS algorithm 1, lines 3-14; both guards are ours. Units: seconds on the caller's
    clock. Cost: one prediction where all fit, O(log n) otherwise.
    """
    limit_s = due_s - now_s
    ordered = sorted(online, key=lambda one: (one.due_s, one.rid))

    def step_s(num: int) -> float:
        contexts = [*beside, *(one.context_tokens for one in ordered[:num])]
        row = BatchRow(0, 0, 0, 0, len(contexts), sum(contexts), max(contexts, default=0))
        return predictor.predict_s(row)

    most = min(len(ordered), max(0, max_decodes - len(beside)))
    all_s = step_s(len(ordered))
    if most == len(ordered) and all_s <= limit_s:
        return frozenset()
    spare_s = SPARE_STEPS * min(all_s, limit_s)
    least = max(sum(one.due_s - now_s < spare_s for one in ordered), 0 if beside else 1)
    if least >= len(ordered) or step_s(least) > limit_s:
        return frozenset()
    longer = range(least + 1, most + 1)
    num_staying = least + bisect_left(longer, True, key=lambda num: step_s(num) > limit_s)
    return frozenset(one.rid for one in ordered[num_staying:])
