"""Why the last prefill pass left a request waiting, noted where it was refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from echo_sgl.policies.step_planner import StepPlanner

Facts = Mapping[str, float]


class Reason(StrEnum):
    """What a request waits for."""

    LIMIT = "limit"
    """No time is left in the step."""
    MEMORY = "memory"
    """The KV pool has no room for it."""
    RESERVE = "reserve"
    """What is free of the KV pool is kept for online requests."""
    ORDER = "order"
    """Others are before it."""
    SLOT = "slot"
    """As many requests run as may."""
    ADAPTER = "adapter"
    """Its adapter has no room beside those of requests that run."""
    PREFIX = "prefix"
    """A neighbour computes its prefix right now; one step later it is a hit."""
    AHEAD = "ahead"
    """It has time: it was ahead of its due time, and another request would have been late."""
    LATE = "late"
    """Its first token is late, and others that wait can be in time."""
    STEP = "step"
    """A prefill step of its own: in that of others it would make a first token late."""
    GATHER = "gather"
    """It starts with others in one prefill step, once more have left."""
    QUEUE = "queue"
    """The same of an online request, which waits in a queue of such."""
    GATE = "gate"
    """Its prefill would be lost to an online request more often than it pays."""
    UNFINISHED = "unfinished"
    """Many that have started sit out: they go on first."""
    PAUSED = "paused"
    """Generation is paused."""


NO_ROOM = frozenset((Reason.SLOT, Reason.MEMORY, Reason.RESERVE))


@dataclass(frozen=True, slots=True)
class Refusal:
    """One object per pass: the last one takes the place of the one before.

    `rid` is the request that was refused, None where all were before anybody was asked.
    `facts` are the numbers that decided; their names carry the units.
    """

    reason: Reason
    rid: str | None = None
    facts: Facts = field(default_factory=dict)


def limit_facts(planner: StepPlanner) -> dict[str, float]:
    """What a step may take, and why that much."""
    return {
        "limit_s": planner.limit_s,
        "slack_s": planner.slack_s,
        "places_taken": planner.view.places_taken,
        "places_ahead": planner.view.places_ahead,
    }


# One for all steps, since most of them have it; what decides is asked for when somebody looks.
GATHERING, GATHERING_ONLINE = Refusal(Reason.GATHER), Refusal(Reason.QUEUE)
GATED, UNFINISHED = Refusal(Reason.GATE), Refusal(Reason.UNFINISHED)
