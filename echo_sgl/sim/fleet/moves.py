"""Who goes where in a fleet: to a queue, to a strict instance, or back to be computed again."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from echo_sgl.sim.fleet.config import FleetConfig
from echo_sgl.sim.fleet.instance import Instance
from echo_sgl.sim.fleet.results import FleetResults
from echo_sgl.sim.fleet.rules import (
    decode_cap,
    eviction_choice,
    length_preference,
    saturated_batch_size,
)
from echo_sgl.sim.workload import SimRequest

# A pull moves no more than this; the next step of the instance that pulls comes soon.
MAX_PULLED = 32
FADE = 0.99


class Moves:
    """Queues, pushes, pulls and evictions of one fleet.

    `on_transfer` starts a transfer, `on_wake` lets an idle instance look for work. The share of
    lost prefills and the mean answer are of what has happened, weighted towards the last ones.
    """

    def __init__(
        self,
        config: FleetConfig,
        results: FleetResults,
        relaxed: list[Instance],
        strict: list[Instance],
    ) -> None:
        self._config, self._results = config, results
        self._relaxed, self._strict = relaxed, strict
        self._outbound: dict[bool, deque[tuple[SimRequest, Instance]]] = {
            True: deque(),
            False: deque(),
        }
        self.saturated = saturated_batch_size(config.device)
        self.cap = decode_cap(config.device, config.typical_tokens, config.step_limit_s)
        self.on_transfer: Callable[[SimRequest, Instance, Instance], None]
        self.on_wake: Callable[[Instance], None]
        self._lost = self._started = 0.0
        self.mean_outputs = float(config.typical_tokens)

    # ---- what happened so far --------------------------------------------------------------

    @property
    def lost_share(self) -> float:
        """Of the offline prefills, those whose KV was lost before the answer was complete."""
        return min(1.0, self._lost / self._started) if self._started else 0.0

    def note_started(self) -> None:
        self._started = FADE * self._started + 1.0
        self._lost *= FADE

    def note_lost(self, request: SimRequest) -> None:
        self._results.recomputed_tokens += request.seq_tokens
        self._lost += request.is_offline

    def note_answer(self, request: SimRequest, num_tokens: int) -> None:
        if request.is_offline:
            self.mean_outputs += (1 - FADE) * (num_tokens - self.mean_outputs)

    # ---- queues and evictions --------------------------------------------------------------

    def enqueue(self, request: SimRequest, *, in_front: bool = False) -> Instance:
        """Let a request wait at the prefill instance with the least to do."""
        place = min(self._relaxed, key=lambda one: (one.queued_tokens, one.place))
        is_urgent = not (self._config.rules.online_first and request.is_offline)
        place.enqueue(request, is_urgent=is_urgent, in_front=in_front)
        return place

    def evict(self, place: Instance, request: SimRequest) -> None:
        """Drop a request's KV: it is computed again, prompt and answer so far."""
        place.take_out(request)
        self._results.num_evictions += 1
        self.note_lost(request)
        self.on_wake(self.enqueue(request, in_front=True))

    def make_room(self, place: Instance, num_tokens: int) -> bool:
        """Evict offline requests until so much is free; nobody when that is not enough.

        OOCO chooses by what binds the step, others take who came last first.
        """
        needed = num_tokens - place.free_tokens
        if needed <= 0:
            return True
        holders = {one.rid: one for one in place.offline_holders()}
        if self._config.rules.splits_by_latency:
            lengths = [(one.seq_tokens, one.rid) for one in holders.values()]
            is_compute_bound = place.num_decoding >= self.saturated
            chosen = eviction_choice(lengths, needed, is_compute_bound=is_compute_bound)
        else:
            newest = sorted(holders.values(), key=lambda one: -one.number)
            places = [(number, one.rid) for number, one in enumerate(newest)]
            chosen = _prefix(places, [one.seq_tokens for one in newest], needed)
        for rid in chosen or ():
            self.evict(place, holders[rid])
        return chosen is not None

    # ---- push ------------------------------------------------------------------------------

    def push(self, request: SimRequest, source: Instance) -> None:
        """Send a prefilled request to decode, at once or as soon as there is room."""
        is_urgent = not (self._config.rules.online_first and request.is_offline)
        self._outbound[is_urgent].append((request, source))

    @property
    def num_waiting_to_push(self) -> int:
        return sum(map(len, self._outbound.values()))

    def push_all(self) -> None:
        """Start the transfers that there is room for, in order."""
        for queue in (self._outbound[True], self._outbound[False]):
            while queue:
                request, source = queue[0]
                if (target := self._target(request)) is None:
                    break
                queue.popleft()
                self._results.num_pushes += 1
                self._transfer(request, source, target)

    def _target(self, request: SimRequest) -> Instance | None:
        """The strict instance with the most room; online requests may make some in an idle one."""
        rules, need = self._config.rules, request.seq_tokens + 1
        for place in sorted(self._strict, key=lambda one: (-one.free_tokens, one.place)):
            num, _ = place.projected()
            if rules.caps_decodes and request.is_offline and num + len(place.parked) >= self.cap:
                continue
            if place.free_tokens >= need:
                return place
        if rules.online_first and not request.is_offline:
            for place in self._strict:
                # In the middle of a step nobody can leave.
                if place.step is None and self.make_room(place, need):
                    return place
        return None

    def _transfer(self, request: SimRequest, source: Instance, target: Instance) -> None:
        target.fix(request, request.seq_tokens)
        target.inbound[request.rid] = request.seq_tokens
        self.on_transfer(request, source, target)

    # ---- pull ------------------------------------------------------------------------------

    def serve_pulls(self) -> None:
        """A relaxed instance is between steps: its decodes may leave now."""
        for target in self._strict:
            if target.wants_pull:
                self.pull(target)

    def pull(self, target: Instance) -> None:
        """Move offline decodes to a strict instance as long as it prefers any.

        Of those that fit in its time and memory the closest to the preferred length.
        Source: OOCO 3.4.3, algorithm 1.
        """
        target.wants_pull = False
        if target.parked:
            return
        offered = sorted(
            (one.seq_tokens, one.rid, place.place)
            for place in self._relaxed
            if place.step is None or not place.step.decodes
            for one in place.offline
        )
        for _ in range(MAX_PULLED):
            length = self._preference(target)
            if length is None:
                return
            if not offered:
                break
            _, rid, number = offered.pop(_closest(offered, length))
            source = self._relaxed[number]
            request = source.offline.members[rid]
            if not self._fits(target, request.seq_tokens):
                break
            source.offline.remove(request)
            source.fix(request, request.seq_tokens)
            self._results.num_pulls += 1
            self._transfer(request, source, target)
        target.wants_pull = True

    def _preference(self, target: Instance) -> int | None:
        num, tokens = target.projected()
        return length_preference(
            self._config.device,
            num,
            tokens,
            limit_s=self._config.step_limit_s,
            free_tokens=target.free_tokens - num,
            saturated=self.saturated,
        )

    def _fits(self, target: Instance, length: int) -> bool:
        """Whether one of that length may be pulled: one that is longer than preferred."""
        num, tokens = target.projected()
        preference = length_preference(
            self._config.device,
            num,
            tokens,
            limit_s=self._config.step_limit_s,
            free_tokens=target.free_tokens - num,
            saturated=1,
        )
        return preference is not None and length <= preference


def _closest(offered: list[tuple[int, str, int]], length: int) -> int:
    """The place of the request whose length is closest; the shorter one of two."""
    place = bisect_left(offered, (length,))
    if place == len(offered):
        return place - 1
    if place and length - offered[place - 1][0] <= offered[place][0] - length:
        return place - 1
    return place


def _prefix(places: list[tuple[int, str]], freed: list[int], needed: int) -> list[str] | None:
    """The ids of the first that free enough together; None when all do not."""
    chosen: list[str] = []
    for number, rid in places:
        if needed <= 0:
            break
        chosen.append(rid)
        needed -= freed[number]
    return chosen if needed <= 0 else None
