"""Requests as they come in over HTTP are tagged with their class, their promises and their arrival.

The tag goes into the sampling parameters' `custom_params`, which travel to every rank.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.requests import Request

from echo_sgl.batches.http.api_errors import route_path
from echo_sgl.engine.http.turns import pass_turn_on
from echo_sgl.engine.requests.tasks import task_of_input
from echo_sgl.engine.requests.terms import (
    TIER_KEY,
    check_terms,
    custom_params_of,
    stamped,
    terms_of_headers,
)
from echo_sgl.engine.settings import active_config
from echo_sgl.errors import ServiceTierError, TermsError
from echo_sgl.types import task_of_service_tier

# SGLang 0.5.23 refuses the opposite; this ends its scheduler.
NO_TEXT = "This server's model gives embeddings, and no text; send this to /v1/embeddings."
TAGGED_PATHS = ("/v1/chat/completions", "/v1/completions", "/invocations")


async def read_service_tier(original: Any, serving: Any, request: Any, raw_request: Any) -> Any:
    """Around `handle_request`: refuse a tier or terms that are not known, remember others."""
    if isinstance(raw_request, Request) and route_path(raw_request.scope) in TAGGED_PATHS:
        tier = (await raw_request.json()).get(TIER_KEY)
        try:
            task_of_service_tier(tier)
            terms = terms_of_headers(raw_request.headers)
        except ServiceTierError as error:
            return serving.create_error_response(str(error), param=TIER_KEY)
        except TermsError as error:
            return serving.create_error_response(str(error), param=error.term)
        raw_request.state.echo_terms = terms | ({TIER_KEY: tier} if tier is not None else {})
    return await original(serving, request, raw_request)


def tag_converted_request(
    result: Any, serving: Any, request: Any, raw_request: Any = None
) -> tuple[Any, Any]:
    """After an OpenAI request became SGLang's own: put its terms where the scheduler sees them."""
    adapted, processed = result
    has_state = isinstance(raw_request, Request)
    if terms := getattr(raw_request.state, "echo_terms", None) if has_state else None:
        params = adapted.sampling_params
        params["custom_params"] = {**(params.get("custom_params") or {}), **terms}
    return adapted, processed


def check_and_stamp(manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Between tokenisation and scheduler: check tier and terms, whose errors SGLang answers
    with 400, note the time of arrival, and let the next offline request in."""
    if isinstance(obj, GenerateReqInput) and not manager.is_generation:
        raise ValueError(NO_TEXT)
    _check_ids(manager, obj)
    params = getattr(obj, "sampling_params", None)
    if isinstance(params, dict):
        # SGLang's --preferred-sampling-params hold where a request names none of its own.
        preferred = (manager.preferred_sampling_params or {}).get("custom_params")
        obj.sampling_params = params = {"custom_params": preferred, **params}
    task_of_input(obj)
    check_terms(custom_params_of(params), active_config().slo)
    if isinstance(params, dict):
        obj.sampling_params = stamped(params)
    pass_turn_on()


def _check_ids(manager: Any, obj: Any) -> None:
    """Tokens that the model has none of: on a CPU one ends SGLang 0.5.23's scheduler.

    Images and adapters may bring some of their own. Errors: `ValueError` names the token.
    """
    ids = getattr(obj, "input_ids", None)
    if not ids or manager.enable_lora or obj.contains_mm_input():
        return
    num_tokens = manager.model_config.vocab_size
    for wrong in (min(ids), max(ids)):
        if not 0 <= wrong < num_tokens:
            raise ValueError(
                f"The prompt holds token {wrong}; those of this model are 0 to {num_tokens - 1}."
            )
