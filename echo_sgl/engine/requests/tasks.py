"""The class of a request: what its `service_tier` says, as every rank reads it.

Sampling parameters travel with the request through SGLang's tokenizer manager and its
broadcast, so all ranks see the same tag and nothing is guessed (`http/tags.py` puts it there).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import Req

from echo_sgl.engine.requests.terms import TIER_KEY, RequestTerms, custom_params_of
from echo_sgl.types import OFFLINE_SERVICE_TIER, Task, task_of_service_tier


def is_offline_input(obj: Any) -> bool:
    """Whether a request is offline, as the tokenizer manager or the scheduler holds it, whatever
    else it names; embeddings and untagged ones are not.
    """
    params = custom_params_of(getattr(obj, "sampling_params", None))
    return bool(params.get(TIER_KEY) == OFFLINE_SERVICE_TIER)


def task_of(req: Any) -> Task:
    """The class of a scheduler request; embeddings and untagged ones are online."""
    return Task.OFFLINE if is_offline_input(req) else Task.ONLINE


def is_offline(req: Req) -> bool:
    terms: RequestTerms | None = getattr(req, "echo_terms", None)
    return task_of(req) is Task.OFFLINE if terms is None else terms.is_offline


def is_held_back(req: Req) -> bool:
    """Whether limits for offline work hold for a request.

    Not for one that is to end already: it waits in SGLang's queue, before others, for the one
    token with which SGLang ends it.
    """
    return is_offline(req) and req.to_finish is None


def task_of_input(obj: Any) -> Task:
    """The class of a request as the tokenizer manager holds it."""
    return task_of_service_tier(
        custom_params_of(getattr(obj, "sampling_params", None)).get(TIER_KEY)
    )
