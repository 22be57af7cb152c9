"""What a prefill instance runs next: prompts, and under OOCO's rules offline decodes."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from echo_sgl.batch_shape import BatchRow
from echo_sgl.policies.prefills.gating import gate_opens
from echo_sgl.sim.fleet.config import FleetConfig
from echo_sgl.sim.fleet.instance import Instance, RunningStep
from echo_sgl.sim.fleet.moves import Moves
from echo_sgl.sim.fleet.results import FleetResults
from echo_sgl.sim.fleet.rules import decode_row, prefill_row
from echo_sgl.sim.workload import SimRequest


class RelaxedSteps:
    """Forms the steps of latency-relaxed instances: online prompts, offline ones, decodes."""

    def __init__(self, config: FleetConfig, results: FleetResults, moves: Moves) -> None:
        self._config, self._results, self._moves = config, results, moves

    def form(self, place: Instance, now_s: float) -> tuple[RunningStep, BatchRow] | None:
        """The next step, its memory taken; None when there is nothing to do."""
        if prefills := self._take(place, place.urgent):
            return self._step(now_s, prefills, is_offline=False)
        if (suspended := place.suspended) is not None:
            place.suspended = None
            row = prefill_row([one.seq_tokens for one in suspended.prefills])
            return replace(suspended, start_s=now_s), row
        if prefills := self._take(place, place.rest):
            return self._step(now_s, prefills, is_offline=True)
        if not (self._config.rules.splits_by_latency and self._room_to_decode(place)):
            return None
        step, row = self._step(now_s, [], is_offline=True, row=place.decode_row())
        return replace(step, decodes=True), row

    def _step(
        self,
        now_s: float,
        prefills: list[SimRequest],
        *,
        is_offline: bool,
        row: BatchRow | None = None,
    ) -> tuple[RunningStep, BatchRow]:
        row = row or prefill_row([one.seq_tokens for one in prefills])
        time_s = self._config.device.predict_s(row)
        layer_s = time_s / self._config.device.transformer.num_layers
        return RunningStep(now_s, time_s, prefills, is_offline=is_offline, layer_s=layer_s), row

    def _take(self, place: Instance, queue: deque[SimRequest]) -> list[SimRequest]:
        """Whole prompts from the head of a queue, at least one if there is memory for it."""
        taken: list[SimRequest] = []
        num_tokens = 0
        while queue:
            request = queue[0]
            num_tokens += request.seq_tokens
            if taken and num_tokens > self._most_tokens(request):
                break
            if not (self._has_room(place, request) and self._may_start(place, request, taken)):
                break
            place.dequeue(queue)
            place.fix(request, request.seq_tokens + 1)
            if request.is_offline:
                self._moves.note_started()
            taken.append(request)
        return taken

    def _most_tokens(self, request: SimRequest) -> int:
        """A step that may be interrupted holds one prompt: compute is saturated by it, and a
        larger one loses more."""
        is_alone = request.is_offline and self._config.rules.interrupts
        return 0 if is_alone else self._config.max_prefill_tokens

    def _has_room(self, place: Instance, request: SimRequest) -> bool:
        need = request.seq_tokens + 1
        if self._config.rules.online_first and not request.is_offline:
            return self._moves.make_room(place, need)
        return place.free_tokens >= need

    def _may_start(self, place: Instance, request: SimRequest, taken: list[SimRequest]) -> bool:
        """Whether the fleet's rules let an offline request start on an instance without online."""
        rules = self._config.rules
        if not (request.is_offline and rules.online_first):
            return True
        if rules.caps_decodes:
            # Resources are idle when what was prefilled before found a place to decode.
            return not self._moves.num_waiting_to_push
        new = [one.seq_tokens for one in taken]
        return gate_opens(
            self._config.device,
            decode_row(len(place.offline) + len(new), place.offline.seq_tokens + sum(new)),
            request.seq_tokens,
            prefill_s=self._config.device.predict_s(prefill_row([request.seq_tokens])),
            expected_outputs=self._moves.mean_outputs,
            lost_share=self._moves.lost_share,
        )

    def _room_to_decode(self, place: Instance) -> bool:
        """Whether offline requests are here, with room for a token more of each."""
        while place.offline and place.free_tokens < len(place.offline):
            self._moves.make_room(place, len(place.offline))
        return bool(place.offline)
