"""Who of the online requests goes first, where not all first tokens can be in time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from echo_sgl.policies.prefills.places import Queued


@dataclass(frozen=True, slots=True)
class LateLast:
    """A request whose first token is late lets those go first that can still be in time.

    First come, first served, a queue that was once too long makes everybody late: who comes waits
    behind those for whom nothing can be kept any more, until it is one of them. A few that go on
    waiting, and for long, are all that a short overload costs. After `wait_s` beyond its due time a
    request is put off no longer; 0: nobody is.

    Source: ours; that earliest-deadline orders break down in overload, and that they do not once
    lost work yields, is known of real-time systems (Locke, 1986). Units: seconds on the caller's
    clock. Deterministic: every rank sees the same queue.
    """

    wait_s: float

    def is_put_off(self, one: Queued, now_s: float) -> bool:
        """Whether it lets others go first."""
        return not one.has_started and 0.0 < now_s - one.due_s <= self.wait_s

    def first_due_s(self, queue: Iterable[Queued], now_s: float) -> float:
        """When the first of those is due that go first; infinite without any.

        Where all are put off, of those.
        """
        if not self.wait_s:
            return min((one.due_s for one in queue), default=math.inf)
        due_s = late_s = math.inf
        for one in queue:
            if self.is_put_off(one, now_s):
                late_s = min(late_s, one.due_s)
            else:
                due_s = min(due_s, one.due_s)
        return due_s if due_s < math.inf else late_s
