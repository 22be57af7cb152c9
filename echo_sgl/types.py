"""Values that every room shares: task classes and what a policy may know of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from echo_sgl.errors import ServiceTierError


class Task(StrEnum):
    """The two classes of work on one server."""

    ONLINE = "online"
    OFFLINE = "offline"


OFFLINE_SERVICE_TIER = "flex"
ONLINE_SERVICE_TIERS = ("auto", "default", "priority")

# How far back `/echo/trace` looks.
MAX_TRACE_S = 3600.0


def task_of_service_tier(service_tier: object) -> Task:
    """Map OpenAI's `service_tier` to a task class; absent means online.

    Errors: `ServiceTierError` names the given value and the allowed ones.
    """
    if service_tier is None or service_tier in ONLINE_SERVICE_TIERS:
        return Task.ONLINE
    if service_tier == OFFLINE_SERVICE_TIER:
        return Task.OFFLINE
    raise ServiceTierError(service_tier, (*ONLINE_SERVICE_TIERS, OFFLINE_SERVICE_TIER))


class Work(NamedTuple):
    """What a request has to compute: its prompt, and an answer that ends at the latest after so
    many tokens. `counted_tokens` of both are known to be done. Units: tokens.
    """

    prompt_tokens: int = 0
    max_output_tokens: int = 0
    counted_tokens: int = 0

    def expected_tokens(self, answer_tokens: int | None) -> int:
        """In the end, if its answer has so many, or all that it may have; None: all."""
        if answer_tokens is None:
            return self.prompt_tokens + self.max_output_tokens
        return self.prompt_tokens + min(self.max_output_tokens, answer_tokens)

    def left_tokens(self, answer_tokens: int | None) -> int:
        """Of these, what is not done; one longer than expected ends any moment."""
        return max(1, self.expected_tokens(answer_tokens) - self.counted_tokens)


NO_WORK = Work()


@dataclass(frozen=True, slots=True, eq=False)
class PendingRequest:
    """What a policy may know of an offline request that waits.

    `sequence` is the position in the server's order of arrival: unlike a clock it is the
    same on every rank. `namespace` separates prompts that may never share KV cache
    (LoRA adapter, extra key, cache salt). The true output length is not here on purpose.

    `deadline_s`: when the window of its job ends, on the clock that policies are given as
    `now_s`; None without one. `work`: what it may have to compute.
    """

    rid: str
    prompt: Sequence[int]
    sequence: int
    namespace: str = ""
    deadline_s: float | None = None
    work: Work = NO_WORK
