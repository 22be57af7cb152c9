"""Who of the offline requests decodes in a simulated step, as in `engine/decodes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from echo_sgl.policies.decodes.contexts import Contexts
from echo_sgl.policies.decodes.decode_selection import Decode
from echo_sgl.policies.decodes.replacement import OnlineDecode
from echo_sgl.policies.step_planner import StepPlanner
from echo_sgl.sim.decode_group import DecodeGroup
from echo_sgl.sim.offline_pool import SimOfflinePool
from echo_sgl.sim.online_queue import OnlineQueue
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server_config import ServerConfig
from echo_sgl.sim.workload import SimRequest


class SimDecodeControl:
    """The part of a `SimScheduler` that asks who decodes."""

    config: ServerConfig
    results: SimResults
    planner: StepPlanner
    pool: SimOfflinePool
    online: DecodeGroup
    offline: DecodeGroup
    waiting: OnlineQueue
    parked: dict[str, SimRequest]
    without_turn: list[SimRequest]
    done: list[SimRequest]
    now_s: float
    _steps_left: Callable[[SimRequest], int]

    def join(self, request: SimRequest) -> None:
        """A request decodes from the next step on."""
        group = self.offline if request.is_offline else self.online
        group.add(request, tokens_left=self._steps_left(request))

    def select_decodes(self) -> None:
        """Let as many offline requests decode as fit; the others sit out."""
        offline, planner = self.offline, self.planner
        if self._is_settled():
            return
        if not self.config.echo.steps.park:
            return
        running = self._sitting_out(offline)
        candidates = [
            *(self._decode(one, is_running=True) for one in running),
            *(self._decode(one, is_running=False) for one in self.parked.values()),
        ]
        chosen = planner.choose_decodes(lambda: candidates)
        self._leave_out(self._online_leaving(candidates, chosen))
        for request in [one for one in self.parked.values() if one.rid in chosen]:
            self._resume(request)
        for request in running:
            if request.rid not in chosen:
                offline.remove(request)
                request.waiting_since_s = self.now_s
                self.parked[request.rid] = request
                self.results.num_parks += 1

    def _online_leaving(self, candidates: Sequence[Decode], chosen: set[str]) -> frozenset[str]:
        """The online requests that sit out; who takes a turn of theirs is `chosen` from now on."""
        planner, must_pack, due_s = self.planner, self.planner.must_pack, self.waiting.due_s
        if not (planner.replaces or must_pack):
            return frozenset()
        able = [one for one in self._sitting_out(self.online) if one.num_outputs]
        online = [OnlineDecode(one.rid, due_s(one), one.seq_tokens) for one in able]
        if must_pack:
            return planner.pack_online(online)
        replacement = planner.replace_decodes(candidates, chosen, online)
        chosen |= replacement.joining
        return replacement.leaving

    def _leave_out(self, rids: frozenset[str]) -> None:
        for rid in sorted(rids):
            request = self.online.members[rid]
            self.online.remove(request)
            self.without_turn.append(request)
            self.results.num_given_turns += 1

    def take_back_left_out(self) -> None:
        """Who gave the last step away is among those that decode again."""
        for request in self.without_turn:
            self.join(request)
        self.without_turn.clear()

    def _is_settled(self) -> bool:
        planner, contexts = self.planner, self._contexts()
        if planner.must_pack:
            return False
        if not self.parked:
            return planner.all_decode(contexts)
        if planner.replaces:
            return False
        parked = self.parked.values()
        return not self.pool.is_late and planner.is_settled(
            contexts,
            shortest_parked=min(one.seq_tokens for one in parked),
            parked_since_s=min(one.waiting_since_s or 0.0 for one in parked),
        )

    def _contexts(self) -> Contexts:
        """Of the offline requests that decode."""
        group = self.offline
        return Contexts(len(group), group.seq_tokens, group.longest_tokens, group.shortest_tokens)

    def _resume(self, request: SimRequest) -> None:
        del self.parked[request.rid]
        request.waiting_since_s = None
        self.join(request)
        self.results.num_resumes += 1

    def resume_all(self) -> None:
        """Nobody else decodes: SGLang looks for nobody where nobody runs."""
        for request in list(self.parked.values()):
            self._resume(request)

    def _sitting_out(self, group: Iterable[SimRequest]) -> list[SimRequest]:
        return [one for one in group if one not in self.done] if self.done else list(group)

    def _decode(self, request: SimRequest, *, is_running: bool) -> Decode:
        return Decode(
            rid=request.rid,
            context_tokens=request.seq_tokens,
            uncached_tokens=request.uncached_tokens,
            waiting_since_s=request.waiting_since_s,
            laxity_s=self.pool.laxity_s(request, self.now_s),
            is_running=is_running,
            sequence=request.sequence,
        )
