"""The class of a request: read from `service_tier`, carried to every rank in custom_params.

Sampling parameters travel with the request through SGLang's tokenizer manager and its
broadcast, so all ranks see the same tag and nothing is guessed.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from echo_sgl.errors import ServiceTierError
from echo_sgl.types import OFFLINE_SERVICE_TIER, Task, task_of_service_tier

TIER_KEY = "service_tier"
TAGGED_PATHS = ("/v1/chat/completions", "/v1/completions")


def task_of(req: Any) -> Task:
    """The class of a scheduler request; embeddings and untagged ones are online."""
    custom_params = getattr(req.sampling_params, "custom_params", None)
    if custom_params and custom_params.get(TIER_KEY) == OFFLINE_SERVICE_TIER:
        return Task.OFFLINE
    return Task.ONLINE


def task_of_input(obj: Any) -> Task:
    """The class of a request as the tokenizer manager holds it."""
    return task_of_service_tier(_tier_of_sampling_params(getattr(obj, "sampling_params", None)))


async def read_service_tier(original: Any, serving: Any, request: Any, raw_request: Any) -> Any:
    """Around `handle_request`: refuse an unknown `service_tier`, remember a known one."""
    if isinstance(raw_request, Request) and raw_request.url.path in TAGGED_PATHS:
        tier = (await raw_request.json()).get(TIER_KEY)
        try:
            task_of_service_tier(tier)
        except ServiceTierError as error:
            return serving.create_error_response(str(error), param=TIER_KEY)
        raw_request.state.service_tier = tier
    return await original(serving, request, raw_request)


def tag_converted_request(
    result: Any, serving: Any, request: Any, raw_request: Any = None
) -> tuple[Any, Any]:
    """After an OpenAI request became SGLang's own: put its tier where the scheduler sees it."""
    adapted, processed = result
    tier = getattr(raw_request.state, TIER_KEY, None) if isinstance(raw_request, Request) else None
    if tier is not None:
        params = adapted.sampling_params
        params["custom_params"] = {**(params.get("custom_params") or {}), TIER_KEY: tier}
    return adapted, processed


def check_native_tier(manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Before tokenisation: the native API's tier is checked here; SGLang answers 400."""
    task_of_input(obj)


def _tier_of_sampling_params(params: Any) -> Any:
    if not isinstance(params, dict):
        return None
    custom_params = params.get("custom_params")
    return custom_params.get(TIER_KEY) if isinstance(custom_params, dict) else None
