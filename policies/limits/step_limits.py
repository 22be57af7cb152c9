"""The limits that hold for each step or over time, and which one the config names."""

from __future__ import annotations

import math

from echo_sgl.config import SloConfig, StepsConfig
from echo_sgl.policies.limits.beside_time import BesideTime
from echo_sgl.policies.limits.online_attainment import BudgetController
from echo_sgl.policies.limits.slack_limit import SlackLimit, SlackUse
from echo_sgl.policies.limits.step_limit import NoLimit, OnlinePart, OnlineView, StepLimit

# Credit of the relative limit, as a multiple of the longest stall allowed.
MAX_CREDIT_STALLS = 4.0
MIN_BUDGET_SHARE, MAX_BUDGET_SHARE = 0.05, 4.0


class BudgetLimit(StepLimit):
    """A fixed time for every step with online work in it, moved by the measured attainment.

    HyGen's steps prefill and decode. Where a step does one of the two, decodes go between prefills.

    Source: HyGen 4.1 and 4.2; moving it at run time is ours.
    """

    cuts_online_chunks = True
    holds_for_each_step = True

    def __init__(self, stall_s: float, controller: BudgetController, *, adapts: bool) -> None:
        super().__init__(stall_s)
        self.controller, self._adapts = controller, adapts

    def set_budget(self, budget_s: float) -> None:
        """Take this budget from now on; it stays, whatever the attainment.

        Errors: `ValueError` when it is not above 0.
        """
        self.controller = BudgetController(
            budget_s, target=1.0, minimum_s=budget_s, maximum_s=budget_s
        )
        self._adapts = False

    def limit_s(self, view: OnlineView) -> float:
        # The budget is the whole promise here: it may be longer than the stall.
        return self.controller.budget_s if view.is_present else self.stall_s

    def most_s(self, view: OnlineView, *, decodes: bool) -> float:
        return math.inf  # it is the budget that binds

    def chunk_limit_s(self, view: OnlineView) -> float:
        # Whatever online decodes were promised: without any, `alone_s` is 0.
        return self.controller.budget_s if view.alone_s > 0.0 else math.inf

    def note_request(self, is_met: bool) -> None:
        if self._adapts:
            self.controller.observe(is_met)

    def forget_requests(self) -> None:
        self.controller.restart()

    def _limit_s(self, view: OnlineView) -> float:
        return self.controller.budget_s


class RelativeLimit(StepLimit):
    """Online work takes at most `max_inflation` times what it would alone, over time.

    Each step with online work earns `max_inflation` times what it takes alone and costs what it
    took. What is left is credit for the next ones, up to a few stalls, so that a chunk of
    offline prefill is paid for by the decodes before it. What a step takes alone is its
    prediction and what the host takes beside it (`BesideTime`). Whoever comes did not save any
    of the credit, and all decode together: it ends when somebody waits for a first token.
    Needs no promise: it is for servers whose users only want not to notice.
    """

    def __init__(
        self, stall_s: float, max_inflation: float, *, shares_online: bool = False
    ) -> None:
        super().__init__(stall_s)
        self.shares_online = shares_online
        self._max_inflation = max_inflation
        self._max_credit_s = MAX_CREDIT_STALLS * stall_s
        self._credit_s = 0.0
        self._beside = BesideTime()

    def note_step(self, online: OnlinePart | None, elapsed_s: float) -> None:
        if online is None:
            self._credit_s = 0.0
            self._beside.observe(None, 0.0, is_alone=False)
            return
        alone_s, kind = online.predicted_s, online.kind
        if kind is not None:
            alone_s += self._beside.typical_s(kind)
        credit_s = self._credit_s + self._max_inflation * alone_s - elapsed_s
        # A step that was predicted far too short must not stop offline work for long.
        self._credit_s = min(max(credit_s, -self.stall_s), self._max_credit_s)
        beside_s = elapsed_s - online.predicted_s
        self._beside.observe(kind, beside_s, is_alone=online.is_alone)

    def note_waiting(self) -> None:
        self._credit_s = min(self._credit_s, 0.0)

    def _limit_s(self, view: OnlineView) -> float:
        if not view.is_present:
            return math.inf
        return self._max_inflation * view.alone_s + self._credit_s


def create_step_limit(steps: StepsConfig, slo: SloConfig) -> StepLimit:
    """Build the limit that the config names; "auto" is resolved when the config is read.

    Errors: `ValueError` names the unknown limit and the known ones.
    """
    stall_s = steps.max_stall_s
    if steps.limit == "slack":
        tpot_s = slo.tpot_s or math.inf
        use = SlackUse(
            pace_s=steps.slack_pace * tpot_s,
            share=steps.slack_share,
            lag_s=steps.lag_tokens * slo.tpot_s,
            reserve_s=steps.reserve_tokens * slo.tpot_s,
        )
        return SlackLimit(
            stall_s,
            margin_s=steps.ttft_margin * slo.ttft_s,
            tpot_s=tpot_s,
            use=use,
            place_share=steps.place_share,
            cuts_online_chunks=steps.online_chunks == "slack",
            splits_online=steps.split_online,
        )
    if steps.limit == "relative":
        return RelativeLimit(stall_s, steps.max_inflation, shares_online=steps.split_online)
    if steps.limit == "off":
        return NoLimit(stall_s)
    if steps.limit == "budget":
        controller = BudgetController(
            steps.budget_s,
            target=steps.attainment,
            minimum_s=MIN_BUDGET_SHARE * steps.budget_s,
            maximum_s=MAX_BUDGET_SHARE * steps.budget_s,
        )
        return BudgetLimit(stall_s, controller, adapts=steps.adapt_budget)
    raise ValueError(f"step limit is {steps.limit!r}; known are slack, budget, relative, off")
