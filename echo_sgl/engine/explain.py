"""What one request is doing or waiting for: looked up when asked, never kept up to date."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

from echo_sgl.engine.requests.places import queued
from echo_sgl.engine.requests.refusals import Facts, Reason, Refusal, limit_facts
from echo_sgl.engine.requests.tasks import is_offline
from echo_sgl.engine.requests.terms import terms_of
from echo_sgl.engine.settings import active_config
from echo_sgl.policies.order.offer_size import MAX_OFFERED

if TYPE_CHECKING:
    from echo_sgl.engine.scheduler import EchoScheduler

# Walking the pool's order takes microseconds for each request, on the scheduler's time.
MAX_WALKED = 256

# Without an id: only offline requests were kept from starting.
_OF_OFFLINE = (Reason.SLOT, Reason.GATHER, Reason.GATE, Reason.UNFINISHED)


class State(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    POOLED = "pooled"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PARKED = "parked"


def explain(scheduler: EchoScheduler, rid: str) -> dict[str, Any] | None:
    """State, terms and place of a request and why it is held back; None if it is not here.

    Units: seconds and tokens, as the names say. None stands for what is infinite or unknown.
    Nothing of other requests is told but how many there are.
    """
    found = _find(scheduler, rid)
    if found is None:
        return None
    state, req = found
    now_s = scheduler.echo_clock.now_s
    terms = terms_of(req, now_s)
    return {
        "id": rid,
        "state": str(state),
        "class": str(terms.task),
        "age_s": max(0.0, now_s - terms.arrival_s),
        "prompt_tokens": len(req.origin_input_ids),
        "generated_tokens": len(req.output_ids),
        "max_new_tokens": req.sampling_params.max_new_tokens,
        "ttft_s": _finite(terms.promise.ttft_s),
        "tpot_s": _finite(terms.promise.tpot_s),
        "deadline_in_s": _finite(terms.deadline_s - now_s),
        **_details(scheduler, state, req),
    }


def held_back(
    rid: str, refusal: Refusal | None, *, num_before: int, is_exact: bool = True
) -> dict[str, Any] | None:
    """Why a request waits that has so many before it, given why the last pass ended.

    None: nothing is known to be in its way, the next pass may take it.
    """
    first = _facts(refusal)
    if refusal is not None:
        own = refusal.rid == rid or (refusal.rid is None and num_before == 0)
        if own or refusal.reason is Reason.PAUSED:
            return first
    if num_before == 0 and first is None:
        return None
    return {
        "reason": str(Reason.ORDER),
        "num_before": num_before,
        "is_exact": is_exact,
        "first": first,
    }


def _find(scheduler: EchoScheduler, rid: str) -> tuple[State, Any] | None:
    if (req := scheduler.offline_pool.find(rid)) is not None:
        return State.POOLED, req
    for state, reqs in _places(scheduler):
        for req in reqs:
            if req.rid == rid and not req.finished():
                return state, req
    return None


def _places(scheduler: EchoScheduler) -> Iterator[tuple[State, Iterable[Any]]]:
    """Everywhere but the pool; what is launched comes last, it may be somewhere else as well."""
    yield State.PARKED, scheduler.step_control.parked
    if scheduler.chunked_req is not None:
        yield State.PREFILLING, [scheduler.chunked_req]
    yield State.DECODING, scheduler.running_batch.reqs
    yield State.WAITING, chain(scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue)
    launched = scheduler.last_batch.reqs if scheduler.last_batch is not None else []
    # A mixed step holds requests that decode, and takes them out of the running batch.
    yield State.DECODING, (req for req in launched if req.output_ids)
    yield State.PREFILLING, launched


def _details(scheduler: EchoScheduler, state: State, req: Any) -> dict[str, Any]:
    if state is State.POOLED:
        return _pooled(scheduler, req)
    if state is State.WAITING:
        return _waiting(scheduler, req)
    if state is State.PARKED:
        return {"held_back": _parked(scheduler, req)}
    if state is State.PREFILLING:
        return {
            "prefilled_tokens": int(req.extend_end or 0),
            "held_back": _facts(_paused(scheduler) or _between_chunks(scheduler, req)),
        }
    return {"held_back": _facts(_paused(scheduler))}


def _pooled(scheduler: EchoScheduler, req: Any) -> dict[str, Any]:
    num_first = len(scheduler.waiting_queue) + _num_between_chunks(scheduler)
    upcoming = scheduler.offline_pool.upcoming(MAX_WALKED, looks_only=True)
    place = next((i for i, other in enumerate(upcoming) if other is req), None)
    num_before = num_first + (MAX_WALKED if place is None else place)
    refusal, limits = _refusal(scheduler), scheduler.kv_limits
    if not (limits.could_start(req) or scheduler._engine_paused):
        # Others are offered in its place.
        refusal = Refusal(Reason.RESERVE, req.rid, limits.facts(req, 0, 1))
    return {
        "position": _position(place, scheduler),
        "num_pooled": len(scheduler.offline_pool),
        "held_back": held_back(req.rid, refusal, num_before=num_before, is_exact=place is not None),
    }


def _position(place: int | None, scheduler: EchoScheduler) -> str:
    """`next`, `offered` (a pass with free slots looks at it now), or `later`."""
    if place == 0:
        return "next"
    most = scheduler.offer_size.limit(MAX_OFFERED, active_config().steps.candidates)
    return "offered" if place is not None and place < most else "later"


def _waiting(scheduler: EchoScheduler, req: Any) -> dict[str, Any]:
    """In SGLang's queue, or on its way there until its grammar is compiled."""
    place = next((i for i, other in enumerate(scheduler.waiting_queue) if other is req), None)
    if place is None:
        return {"position": "grammar", "held_back": _facts(_paused(scheduler))}
    num_before = place + _num_between_chunks(scheduler)
    position = "next" if num_before == 0 else "later"
    if (since_s := terms_of(req).waiting_since_s) is not None and not scheduler._engine_paused:
        now_s = scheduler.echo_clock.now_s
        facts = {"gave_place_for_s": now_s - since_s, "due_in_s": queued(req).due_s - now_s}
        return {"position": position, "held_back": _facts(Refusal(Reason.AHEAD, req.rid, facts))}
    refusal = _put_off(scheduler, req) or _refusal(scheduler)
    if refusal is not None and refusal.rid is None and refusal.reason in _OF_OFFLINE:
        refusal = None
    return {
        "position": position,
        "held_back": held_back(req.rid, refusal, num_before=num_before),
    }


def _put_off(scheduler: EchoScheduler, req: Any) -> Refusal | None:
    """That it is late and lets those go first who can be in time."""
    planner, first = scheduler.step_control.planner, scheduler.waiting_queue[0]
    if _paused(scheduler) or planner.goes_last(queued(first)) or not planner.goes_last(queued(req)):
        return None
    late_s = scheduler.echo_clock.now_s - queued(req).due_s
    return Refusal(Reason.LATE, req.rid, {"late_s": late_s, "wait_s": planner.late_last.wait_s})


def _parked(scheduler: EchoScheduler, req: Any) -> dict[str, Any] | None:
    """Its decode did not fit into the limit of the step beside the online ones."""
    if (paused := _paused(scheduler)) is not None:
        return _facts(paused)
    planner, since_s = scheduler.step_control.planner, terms_of(req).waiting_since_s
    now_s = scheduler.echo_clock.now_s
    facts = {
        **limit_facts(planner),
        "with_decode_s": planner.with_decode_s(req.seqlen),
        "parked_for_s": now_s - since_s if since_s is not None else math.inf,
    }
    return _facts(Refusal(Reason.LIMIT, req.rid, facts))


def _between_chunks(scheduler: EchoScheduler, req: Any) -> Refusal | None:
    """Why an offline request waits for its next chunk: whatever kept all of them from prefills."""
    refusal = scheduler.step_control.refusal
    if req is not scheduler.chunked_req or not is_offline(req) or refusal is None:
        return None
    return refusal if refusal.rid is None and refusal.reason is Reason.LIMIT else None


def _num_between_chunks(scheduler: EchoScheduler) -> int:
    return int(scheduler.chunked_req is not None)


def _refusal(scheduler: EchoScheduler) -> Refusal | None:
    """Why the last pass ended, as far as it holds now."""
    if (paused := _paused(scheduler)) is not None:
        return paused
    if (refusal := scheduler.step_control.refusal) is not None:
        planner = scheduler.step_control.planner
        facts: dict[Reason, Facts] = {
            Reason.GATHER: planner.gathering.facts,
            Reason.QUEUE: planner.online_lots.facts,
            Reason.GATE: planner.gating.facts,
            Reason.UNFINISHED: {"num_parked": len(scheduler.step_control.parked)},
        }
        return Refusal(refusal.reason, refusal.rid, facts.get(refusal.reason, refusal.facts))
    if scheduler.running_batch.batch_is_full:
        num_running = len(scheduler.running_batch.reqs)
        return Refusal(Reason.SLOT, None, {"num_running": num_running})
    return None


def _paused(scheduler: EchoScheduler) -> Refusal | None:
    return Refusal(Reason.PAUSED) if scheduler._engine_paused else None


def _facts(refusal: Refusal | None) -> dict[str, Any] | None:
    if refusal is None:
        return None
    return {"reason": str(refusal.reason), **_finite_values(refusal.facts)}


def _finite_values(facts: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in facts.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
