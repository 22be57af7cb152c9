"""One instance of a fleet: its memory, its queues, and the step that runs.

capacity = free + decodes of both classes + parked + fixed (prefills, and KV that travels or waits)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_sgl.batch_shape import BatchRow
from echo_sgl.policies.decodes.decode_selection import Decode
from echo_sgl.sim.decode_group import DecodeGroup
from echo_sgl.sim.fleet.rules import decode_row
from echo_sgl.sim.workload import SimRequest


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step on its way; one without prefills and decodes only waits for a layer's end.

    `layer_s`: how long a layer of it takes. Units: seconds.
    """

    start_s: float
    time_s: float
    prefills: list[SimRequest] = field(default_factory=list)
    decodes: bool = False
    is_offline: bool = False
    layer_s: float = 0.0


class Instance:
    """A request is in one place here at a time: a group, `parked`, or fixed.

    `inbox` holds requests whose KV has arrived; they join at the next step. Units: tokens.
    """

    def __init__(self, place: int, kv_tokens: int, *, is_strict: bool) -> None:
        self.place, self.kv_tokens, self.is_strict = place, kv_tokens, is_strict
        self.online, self.offline = DecodeGroup(1), DecodeGroup(1)
        self.parked: dict[str, SimRequest] = {}
        self.inbox: list[SimRequest] = []
        self.inbound: dict[str, int] = {}
        self.urgent: deque[SimRequest] = deque()
        self.rest: deque[SimRequest] = deque()
        self.queued_tokens = 0
        self.step: RunningStep | None = None
        self.suspended: RunningStep | None = None
        self.wants_pull = is_strict
        self._fixed: dict[str, int] = {}
        self._fixed_tokens = self._parked_tokens = 0

    # ---- memory ----------------------------------------------------------------------------

    @property
    def used_tokens(self) -> int:
        decoding = self.online.seq_tokens + self.offline.seq_tokens
        return decoding + self._parked_tokens + self._fixed_tokens

    @property
    def free_tokens(self) -> int:
        """Without the tokens that the step on its way will add."""
        is_growing = self.step is not None and self.step.decodes
        return self.kv_tokens - self.used_tokens - (self.num_decoding if is_growing else 0)

    def fix(self, request: SimRequest, num_tokens: int) -> None:
        """Hold room for a request that is not decoding here."""
        assert num_tokens <= self.free_tokens, f"{request.rid} needs {num_tokens} tokens"
        self._fixed[request.rid] = num_tokens
        self._fixed_tokens += num_tokens

    def unfix(self, request: SimRequest) -> None:
        self._fixed_tokens -= self._fixed.pop(request.rid)

    def take_out(self, request: SimRequest) -> None:
        """Let go of a request that decodes or is parked here, with its memory."""
        if request.rid in self.parked:
            self.unpark(request)
        else:
            self.group_of(request).remove(request)

    def park(self, request: SimRequest, now_s: float) -> None:
        """An offline request sits out, its KV kept."""
        self.offline.remove(request)
        request.waiting_since_s = now_s
        self.parked[request.rid] = request
        self._parked_tokens += request.seq_tokens

    def unpark(self, request: SimRequest) -> None:
        del self.parked[request.rid]
        self._parked_tokens -= request.seq_tokens
        request.waiting_since_s = None

    # ---- who is here -----------------------------------------------------------------------

    def enqueue(self, request: SimRequest, *, is_urgent: bool, in_front: bool = False) -> None:
        """Let a request wait here for its prefill."""
        queue = self.urgent if is_urgent else self.rest
        (queue.appendleft if in_front else queue.append)(request)
        self.queued_tokens += request.seq_tokens

    def dequeue(self, queue: deque[SimRequest]) -> SimRequest:
        request = queue.popleft()
        self.queued_tokens -= request.seq_tokens
        return request

    @property
    def num_decoding(self) -> int:
        return len(self.online) + len(self.offline)

    @property
    def fixed(self) -> Mapping[str, int]:
        """Tokens of the requests that hold room here and do not decode."""
        return self._fixed

    def group_of(self, request: SimRequest) -> DecodeGroup:
        return self.offline if request.is_offline else self.online

    def offline_holders(self) -> list[SimRequest]:
        """Offline requests that decode or are parked here."""
        return [*self.offline, *self.parked.values()]

    def decode_row(self) -> BatchRow:
        """The step that decodes all that run here."""
        tokens = self.online.seq_tokens + self.offline.seq_tokens
        return decode_row(self.num_decoding, tokens)

    def projected(self) -> tuple[int, int]:
        """Requests and tokens of its step once all that is on its way has come."""
        travelling = sum(self.inbound.values()) + sum(one.seq_tokens for one in self.inbox)
        num = self.num_decoding + len(self.inbound) + len(self.inbox)
        return num, self.online.seq_tokens + self.offline.seq_tokens + travelling

    def candidates(self) -> list[Decode]:
        """The offline requests that could decode, as the selection sees them."""
        return [
            *(_decode(one, is_running=True) for one in self.offline),
            *(_decode(one, is_running=False) for one in self.parked.values()),
        ]


def _decode(request: SimRequest, *, is_running: bool) -> Decode:
    return Decode(
        rid=request.rid,
        context_tokens=request.seq_tokens,
        uncached_tokens=request.seq_tokens,
        waiting_since_s=request.waiting_since_s,
        laxity_s=math.inf,  # no fleet knows windows
        is_running=is_running,
        sequence=request.number,
    )
