"""What a decode instance runs next: all online requests, and offline ones by the fleet's rules."""

from __future__ import annotations

from collections.abc import Callable

from echo_sgl.batch_shape import BatchRow
from echo_sgl.policies.decodes.decode_selections import create_decode_selection
from echo_sgl.sim.fleet.config import FleetConfig
from echo_sgl.sim.fleet.instance import Instance, RunningStep
from echo_sgl.sim.fleet.moves import Moves
from echo_sgl.sim.fleet.results import FleetResults
from echo_sgl.sim.workload import SimRequest

UNLIMITED = 1 << 30


class StrictSteps:
    """Forms the steps of latency-strict instances; `join` lets a request decode."""

    def __init__(
        self,
        config: FleetConfig,
        results: FleetResults,
        moves: Moves,
        join: Callable[[Instance, SimRequest], None],
    ) -> None:
        self._config, self._results, self._moves, self._join = config, results, moves, join
        # OOCO algorithm 2, the same object that a server with `decode_selection = "mix"` runs.
        self._selection = create_decode_selection("mix", seed=config.seed)

    def form(self, place: Instance, now_s: float) -> tuple[RunningStep, BatchRow] | None:
        """The next step, with room for a token more of each; None without decodes."""
        rules = self._config.rules
        for request in place.inbox:
            place.unfix(request)
            self._join(place, request)
        place.inbox.clear()
        self._moves.push_all()
        if rules.splits_by_latency:
            self._select(place, now_s)
        elif rules.caps_decodes:
            self._hold_cap(place, now_s)
        self._make_growth_room(place)
        if rules.splits_by_latency:
            self._moves.pull(place)
        if not place.num_decoding:
            return None
        row = place.decode_row()
        return RunningStep(now_s, self._config.device.predict_s(row), decodes=True), row

    def _select(self, place: Instance, now_s: float) -> None:
        """All online requests decode; offline ones while the step stays within its limit."""
        limit_s, device = self._config.step_limit_s, self._config.device
        if not place.parked and device.predict_s(place.decode_row()) <= limit_s:
            return
        chosen = self._selection.select(
            place.candidates(),
            place.online.shape(),
            device,
            limit_s,
            now_s=now_s,
            max_decodes=UNLIMITED,
        )
        holders = place.offline_holders()
        if not chosen and not place.online and holders:
            # Even one alone takes longer than the limit: nobody waits for it.
            chosen = {min(holders, key=lambda one: one.number).rid}
        for request in holders:
            if (request.rid in place.parked) == (request.rid in chosen):
                self._switch(place, request, now_s)

    def _hold_cap(self, place: Instance, now_s: float) -> None:
        """Offline requests beyond the number that may decode sit out, the newest first."""
        while place.num_decoding > self._moves.cap and place.offline:
            self._switch(place, max(place.offline, key=lambda one: one.number), now_s)
        while place.parked and place.num_decoding < self._moves.cap:
            self._switch(place, min(place.parked.values(), key=lambda one: one.number), now_s)

    def _switch(self, place: Instance, request: SimRequest, now_s: float) -> None:
        """A parked request decodes again, or one that decodes is parked."""
        if request.rid in place.parked:
            place.unpark(request)
            self._join(place, request)
        else:
            place.park(request, now_s)
            self._results.num_parks += 1

    def _make_growth_room(self, place: Instance) -> None:
        """Evict until each decode has room for its next token: offline ones first, if rules say."""
        while place.free_tokens < place.num_decoding:
            if self._config.rules.online_first and self._moves.make_room(place, place.num_decoding):
                continue
            newest = max(
                (*place.online, *place.offline_holders()),
                key=lambda one: (
                    one.is_offline and self._config.rules.online_first,
                    one.arrival_s,
                    one.number,
                ),
            )
            self._moves.evict(place, newest)
