"""How much of what answers are allowed SGLang makes room for before they have taken it."""

from __future__ import annotations

from collections.abc import Sequence

from echo_sgl.sim.workload import SimRequest

# SGLang's defaults: where the ratio starts, its least share of that, how fast it gets there, and
# for how many steps more there is room after somebody had to be retracted.
INIT_RATIO, LEAST_SHARE, DECAY_STEPS, RETRACT_STEPS = 0.7, 0.14, 600, 20


class NewTokenRatio:
    """Shrinks with every decode step, grows by a retraction, starts anew when nobody is left."""

    def __init__(self, conservativeness: float) -> None:
        self._init = min(1.0, INIT_RATIO * conservativeness)
        self.current = self._init

    def decay(self) -> None:
        least = self._init * LEAST_SHARE
        self.current = max(self.current - (self._init - least) / DECAY_STEPS, least)

    def note_retraction(self, left: Sequence[SimRequest]) -> None:
        """`left`: who goes on decoding."""
        made = sum(one.num_outputs + RETRACT_STEPS for one in left)
        allowed = sum(one.max_new_tokens for one in left)
        self.current = min(1.0, made / (allowed + 1))

    def forget(self) -> None:
        self.current = self._init
