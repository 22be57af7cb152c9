"""Whether a job's first requests wait for those that come with them."""

from __future__ import annotations

import math

from echo_sgl.config import OfflineConfig

# Of the longest wait: a pause after which nobody else is expected, or a job is a new one.
QUIET_SHARE = 1 / 30


class Gathering:
    """Lets offline work rest while the lines of a new job come in, for `most_s` at most.

    An order by prefix is only as good as what it knows. Who starts the first lines that arrive
    fills the slots with as many documents, and computes them again when their turn has come.
    It begins with a line that comes to a server without offline work, and ends as soon as none
    came for a while; a client that sends the next line when one was answered is not kept waiting.

    Source: ours; HyGen's PSM (4.3) starts from a pool that holds all requests.
    Units: seconds. 0 turns it off. Deterministic: every rank sees the same requests and clock.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s, self._quiet_s = most_s, most_s * QUIET_SHARE
        self._num_waiting, self._is_idle = 0, True
        self._came_s = self._worked_s = self._end_s = -math.inf
        self.holds = False

    def advance(self, now_s: float, num_waiting: int, *, is_running: bool) -> None:
        """Note how many offline requests wait before each step, and whether others run.

        `holds` says from then on whether nothing shall start yet.
        """
        came = num_waiting > self._num_waiting
        if came:
            self._came_s = now_s
            if self._is_idle and now_s - self._worked_s >= self._quiet_s:
                self._end_s = now_s + self._most_s
        end_s = min(self._end_s, self._came_s + self._quiet_s)
        self.holds = num_waiting > 0 and not is_running and now_s < end_s
        if not self.holds:
            self._end_s = -math.inf
        is_idle = not num_waiting and not is_running
        if not (is_idle and self._is_idle):
            self._worked_s = now_s
        self._num_waiting, self._is_idle = num_waiting, is_idle


def create_gathering(config: OfflineConfig) -> Gathering:
    """Only an order by prefix gains by knowing more requests."""
    return Gathering(config.gather_s if config.order == "psm" else 0.0)
