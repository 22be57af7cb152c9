"""A plan that holds for the next steps, too."""

from __future__ import annotations

import math

# For so long at most: by then the estimator has learned a few times, and contexts are some
# tokens longer. Only if the step took no more than this part of its limit.
HELD_S, HELD_SHARE = 0.1, 0.9


class HeldPlan:
    """That all who run decode, found for one step and true for those that follow it.

    Most steps decode the same requests as the one before and are far from their limit, and to
    plan one takes longer than all else that a scheduler does for it. With as much slack as there
    was, and nobody more, what fitted well a moment ago fits now.

    Source: ours. Units: seconds, requests. Deterministic: every rank asks the same.
    """

    def __init__(self, is_on: bool = True) -> None:
        self._is_on = is_on
        self._until_s = self._slack_s = -math.inf
        self._num_decodes = 0

    def hold(self, now_s: float, slack_s: float, num_decodes: int) -> None:
        """So many may decode, with so much slack; with -inf, however little there is."""
        if self._is_on:
            self._until_s = now_s + HELD_S
            self._slack_s, self._num_decodes = slack_s, num_decodes

    def end(self) -> None:
        """Somebody else comes: the next step is planned anew."""
        self._until_s = -math.inf

    def holds(self, now_s: float, slack_s: float, num_decodes: int) -> bool:
        """Whether what was found goes for so many, with this slack."""
        return (
            now_s <= self._until_s and slack_s >= self._slack_s and num_decodes <= self._num_decodes
        )
