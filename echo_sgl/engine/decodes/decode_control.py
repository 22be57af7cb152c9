"""Who of the offline requests decodes in a step of SGLang's, and who sits out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from echo_sgl.engine.decodes.adapters import AdapterRoom
from echo_sgl.engine.decodes.parking import ParkedDecodes
from echo_sgl.engine.decodes.retraction import uncached_tokens
from echo_sgl.engine.decodes.running import Running, offline_of
from echo_sgl.engine.pool.deadlines import DeadlineWatch
from echo_sgl.engine.requests.places import placed
from echo_sgl.engine.requests.terms import RequestTerms, terms_of
from echo_sgl.policies.decodes.contexts import Contexts
from echo_sgl.policies.decodes.decode_selection import Decode
from echo_sgl.policies.decodes.replacement import OnlineDecode
from echo_sgl.policies.step_planner import StepPlanner
from echo_sgl.types import Task

# Until a token that was sampled is seen; overlapped, that is one step later.
UNSTEADY_STEPS = 2


@dataclass(slots=True)
class StepCounts:
    """What happened to requests since the scheduler started; between steps the counts only grow."""

    num_started: int = 0  # for the first time; but for SGLang's health checks
    num_parks: int = 0
    num_resumes: int = 0
    num_prefill_parks: int = 0
    num_given_places: int = 0
    num_given_turns: int = 0
    num_retractions: dict[Task, int] = field(default_factory=lambda: dict.fromkeys(Task, 0))

    @property
    def num_left(self) -> int:
        """How many times a request left memory and place to others."""
        return sum(self.num_retractions.values(), self.num_prefill_parks + self.num_given_places)


class DecodeControl:
    """The part of a `StepControl` that asks who decodes; what it asks about is set by `begin`."""

    planner: StepPlanner
    parked: ParkedDecodes
    without_turn: ParkedDecodes
    counts: StepCounts
    can_park: bool
    adapters: AdapterRoom | None
    _watch: DeadlineWatch
    _running: Running
    _now_s: float
    _is_settled: bool
    # At so many steps from now some will have grown by a token less than the others.
    _num_unsteady: int

    def select_decodes(self, batch: ScheduleBatch, awaited: Iterable[Req] = ()) -> None:
        """Let as many offline requests decode in this step as fit; the others sit out.

        `awaited`: online requests that would start in the same step.
        """
        is_settled = self._is_settled
        if not self._running.are(batch.reqs):
            is_settled = self._stays(Contexts.of([req.seqlen for req in offline_of(batch.reqs)]))
            self._is_settled = is_settled
        if not self.can_park:
            return
        if is_settled and (self.adapters is None or self.adapters.has(batch.reqs, awaited)):
            return
        running = offline_of(batch.reqs)
        candidates = self._candidates(running)
        chosen = self.planner.choose_decodes(lambda: candidates)
        leaving = self._online_leaving(batch.reqs, candidates, chosen)
        if self.adapters is not None:
            in_order = self.planner.in_order_of_claim(candidates, chosen)
            leaving |= self._without_adapters(batch.reqs, in_order, chosen, awaited)
        # First in, then out: an emptied batch cannot take anybody in.
        self._resume(batch, {req.rid for req in self.parked if req.rid in chosen})
        self._park(batch, [req for req in running if req.rid not in chosen])
        self._leave_out(batch, leaving)

    def take_all_parked(self) -> ScheduleBatch | None:
        """End all parking; those that sat out, as a batch of their own."""
        self._num_unsteady = UNSTEADY_STEPS
        self._note_resumed(req.rid for req in self.parked)
        return self.parked.take_all()

    def _stays(self, running: Contexts) -> bool:
        """Whether all that run decode and all that sit out stay there: so it is in most steps."""
        if self.planner.must_pack:
            return False
        if not self.parked:
            return self.planner.all_decode(running)
        if self.planner.replaces:
            return False  # there may be a turn for them
        return self._watch.urgent_deadline_s is None and self.planner.is_settled(
            running,
            shortest_parked=min(req.seqlen for req in self.parked),
            parked_since_s=min(
                (since_s for req in self.parked if (since_s := terms_of(req).waiting_since_s)),
                default=self._now_s,
            ),
        )

    def _online_leaving(
        self, reqs: Sequence[Req], candidates: Sequence[Decode], chosen: set[str]
    ) -> frozenset[str]:
        """The online requests that sit out; who takes a turn of theirs is `chosen` from now on."""
        planner, must_pack = self.planner, self.planner.must_pack
        if not (planner.replaces or must_pack):
            return frozenset()
        contexts = {req.rid: req.seqlen for req in reqs}
        online = [OnlineDecode(one.rid, one.due_s, contexts[one.rid]) for one in placed(reqs)]
        asked = {one.rid for one in online} | {one.rid for one in candidates}
        beside = [tokens for rid, tokens in contexts.items() if rid not in asked]
        # Nobody takes a turn where online decodes are too many for each other.
        if must_pack:
            return planner.pack_online(online, beside=beside)
        replacement = planner.replace_decodes(candidates, chosen, online, beside=beside)
        chosen |= replacement.joining
        return replacement.leaving

    def _without_adapters(
        self,
        reqs: Sequence[Req],
        in_order: Sequence[Decode],
        chosen: set[str],
        awaited: Iterable[Req],
    ) -> set[str]:
        """The online requests that sit out this step; offline ones that do leave `chosen`."""
        assert self.adapters is not None
        offline = {req.rid: req for req in (*reqs, *self.parked)}
        joining = [offline[one.rid] for one in in_order]
        without = self.adapters.without_room(reqs, joining, awaited)
        without_turn = without - chosen
        chosen -= without
        return without_turn

    def _leave_out(self, batch: ScheduleBatch, rids: frozenset[str]) -> None:
        """Keep these online requests out of this step; `take_left_out` ends that."""
        if not rids:
            return
        indices = [index for index, req in enumerate(batch.reqs) if req.rid in rids]
        self.without_turn.park(batch, indices)
        self.counts.num_given_turns += len(indices)
        self._num_unsteady = UNSTEADY_STEPS
        self._running.advance(batch.reqs, self._now_s)

    def take_left_out(self) -> ScheduleBatch | None:
        """Those that gave the last step away, as a batch of their own."""
        return self.without_turn.take_all()

    def take_back_left_out(self, batch: ScheduleBatch) -> None:
        """They decode in this step after all."""
        if (left_out := self.take_left_out()) is not None:
            self.counts.num_given_turns -= len(left_out.reqs)
            batch.merge_batch(left_out)
            self._running.advance(batch.reqs, self._now_s)

    def _candidates(self, running: Sequence[Req]) -> list[Decode]:
        reqs = [*running, *self.parked]
        laxities_s = self._watch.laxities_s(reqs, self._now_s)
        return [
            Decode(
                rid=req.rid,
                context_tokens=req.seqlen,
                uncached_tokens=uncached_tokens(req),
                waiting_since_s=terms_of(req).waiting_since_s,
                laxity_s=laxity_s,
                is_running=index < len(running),
                sequence=req.echo_sequence,
            )
            for index, (req, laxity_s) in enumerate(zip(reqs, laxities_s, strict=True))
        ]

    def _park(self, batch: ScheduleBatch, leaving: Sequence[Req]) -> None:
        if not leaving:
            return
        rids = {req.rid for req in leaving}
        self.parked.park(batch, [i for i, req in enumerate(batch.reqs) if req.rid in rids])
        self.counts.num_parks += len(leaving)
        for req in leaving:
            terms: RequestTerms = terms_of(req)
            terms.waiting_since_s = self._now_s

    def _resume(self, batch: ScheduleBatch, rids: set[str]) -> None:
        if rids:
            self._note_resumed(rids)
            self.parked.resume(batch, rids)

    def _note_resumed(self, rids: Iterable[str]) -> None:
        chosen = set(rids)
        self.counts.num_resumes += len(chosen)
        for req in self.parked:
            if req.rid in chosen:
                terms_of(req).waiting_since_s = None
