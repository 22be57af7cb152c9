"""How long a step may take, learned from whether online requests keep their promises."""

from __future__ import annotations

WINDOW_REQUESTS = 20
_CUT = 0.8
_RAISE = 1.05


class BudgetController:
    """A budget for each step that falls fast when promises are broken and rises slowly.

    After every `WINDOW_REQUESTS` finished online requests: -20 % if fewer than `target` of them
    met their SLO, +5 % otherwise, within `minimum_s` and `maximum_s`. One cut undoes 4.6 raises,
    so the budget rests where 18 % of the windows fall short. With a target of 0.99 one missed
    request lets a window fall short, and 18 % of windows do when 1 % of the requests miss: the
    budget rests at the target. A request that was not promised anything is not to be observed.

    Source: HyGen 4.2 profiles a fixed budget for each workload; that it moves is ours.
    Units: seconds. Errors: `ValueError` when the bounds or the target leave no budget.
    """

    def __init__(
        self, budget_s: float, *, target: float, minimum_s: float, maximum_s: float
    ) -> None:
        if not 0 < minimum_s <= budget_s <= maximum_s:
            raise ValueError(
                f"budget_s is {budget_s}, minimum_s {minimum_s} and maximum_s {maximum_s}; allowed "
                "is 0 < minimum_s <= budget_s <= maximum_s: a budget of 0 could never rise again"
            )
        if not 0.0 <= target <= 1.0:
            raise ValueError(f"target is {target}; it is a share of requests, allowed is 0 to 1")
        self._first_s = self._budget_s = budget_s
        self._target = target
        self._minimum_s, self._maximum_s = minimum_s, maximum_s
        self._num_seen = self._num_met = 0

    @property
    def budget_s(self) -> float:
        """The longest that a step with online work may take now."""
        return self._budget_s

    def restart(self) -> None:
        """Begin again with the first budget, as if no request had ended yet."""
        self._budget_s = self._first_s
        self._num_seen = self._num_met = 0

    def observe(self, met: bool) -> None:
        """Note a finished online request: did it meet its SLO?"""
        self._num_seen += 1
        self._num_met += met
        if self._num_seen == WINDOW_REQUESTS:
            fell_short = self._num_met < self._target * WINDOW_REQUESTS
            budget_s = self._budget_s * (_CUT if fell_short else _RAISE)
            self._budget_s = min(max(budget_s, self._minimum_s), self._maximum_s)
            self._num_seen = self._num_met = 0
