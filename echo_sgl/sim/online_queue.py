"""The online requests that wait on a simulated server, and when their next tokens are due."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

from echo_sgl.policies.limits.step_limit import Promise
from echo_sgl.policies.prefills.late_last import LateLast
from echo_sgl.policies.prefills.places import Placed, Places, Queued
from echo_sgl.sim.workload import SimRequest

MAX_SUMMED = 64


class OnlineQueue(deque[SimRequest]):
    """SGLang's queue, first come first served, those that gave a place away by due time, and the
    late ones last.

    Units: seconds on the simulation's clock, tokens.
    """

    def __init__(self, promise: Promise, places: Places, late_last: LateLast) -> None:
        super().__init__()
        self._promise, self._places, self._late_last = promise, places, late_last

    def add(self, request: SimRequest) -> None:
        """A request waits, behind all that are to be before it."""
        queued = map(self.queued, reversed(self))
        num_behind = self._places.num_behind(queued, self.queued(request))
        self.insert(len(self) - num_behind, request)

    def put_off_late(self, now_s: float) -> None:
        """Those that can still be in time go before those that are late.

        Who came first is late first: nothing is to be done while the first one is not.
        """
        if self and self._is_put_off(self[0], now_s):
            ordered = sorted(self, key=lambda one: self._is_put_off(one, now_s))
            self.clear()
            self.extend(ordered)

    def _is_put_off(self, request: SimRequest, now_s: float) -> bool:
        return self._late_last.is_put_off(self.queued(request), now_s)

    @property
    def first_due_s(self) -> float:
        """When the next token of the first one is due; infinite without any."""
        return self.due_s(self[0]) if self else math.inf

    @property
    def new_tokens(self) -> int:
        """What they have to prefill; those far back in a long queue change nothing."""
        # One that gave its place away finds in the tree what it computed.
        return sum(
            1 if one.waiting_since_s is not None else one.seq_tokens
            for one in islice(self, MAX_SUMMED)
        )

    def kept_tokens(self, request: SimRequest) -> int:
        """What the tree keeps for those that gave their places away, but for this one."""
        return sum(
            one.seq_tokens
            for one in islice(self, MAX_SUMMED)
            if one.waiting_since_s is not None and one is not request
        )

    def due_s(self, request: SimRequest) -> float:
        """When a request's next token is due."""
        return self._promise.due_s(request.num_outputs, request.arrival_s, request.first_token_s)

    def placed(self, request: SimRequest) -> Placed:
        """A request that decodes, as the rule over places knows it."""
        return Placed(request.rid, self.due_s(request))

    def queued(self, request: SimRequest) -> Queued:
        """The same of one that waits."""
        return Queued(self.due_s(request), request.num_outputs > 0)
