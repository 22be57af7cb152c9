"""What one simulated step runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from echo_sgl.batch_shape import BatchRow
from echo_sgl.sim.workload import SimRequest


@dataclass(slots=True)
class StepPlan:
    """A step that is about to run. `prefills`: request, new tokens, cached tokens before them.

    `device_s`: what it takes there, which is what the estimator learns from.
    """

    row: BatchRow
    prefills: list[tuple[SimRequest, int, int]] = field(default_factory=list)
    decodes: bool = False
    device_s: float = 0.0
