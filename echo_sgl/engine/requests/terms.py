"""What a request asks for besides its answer: its class, its promises, its deadline.

All of it travels in `custom_params`, with SGLang's own broadcast, so every rank reads the
same terms. A client names them there, or as headers of an OpenAI request:

    x-echo-ttft-s, x-echo-tpot-s      an online request's own promises, in seconds
    x-echo-deadline-s                 seconds from arrival by which an offline one should end
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from echo_sgl.config import SloConfig
from echo_sgl.engine.settings import active_config
from echo_sgl.errors import TermsError
from echo_sgl.policies.limits.step_limit import Ending, Promise
from echo_sgl.types import OFFLINE_SERVICE_TIER, Task

TIER_KEY = "service_tier"
ARRIVAL_KEY = "echo_arrival_s"
TTFT_KEY, TPOT_KEY, DEADLINE_KEY = "ttft_s", "tpot_s", "deadline_s"
HEADERS = {f"x-echo-{key.replace('_', '-')}": key for key in (TTFT_KEY, TPOT_KEY, DEADLINE_KEY)}
MAX_TERM_S = 30 * 86_400.0


class RequestTerms:
    """A request's terms and where it stands; times in seconds on the step clock.

    `arrival_s` is when the server's HTTP process took it in; `first_token_s` when the
    scheduler first saw a token of it, None before; `waiting_since_s` when it was parked, or gave
    its place away.
    `max_tokens`: of its answer, as the client allowed; known with the first token.
    """

    __slots__ = (
        "arrival_s",
        "deadline_s",
        "first_token_s",
        "is_offline",
        "max_tokens",
        "num_offline_steps_waited",
        "promise",
        "started_s",
        "task",
        "waiting_since_s",
    )

    def __init__(self, task: Task, promise: Promise, arrival_s: float, deadline_s: float) -> None:
        self.task, self.promise = task, promise
        self.is_offline = task is Task.OFFLINE
        self.arrival_s, self.deadline_s = arrival_s, deadline_s
        self.first_token_s: float | None = None
        self.started_s: float | None = None
        self.waiting_since_s: float | None = None
        self.num_offline_steps_waited = self.max_tokens = 0

    def due_s(self, num_tokens: int) -> float:
        """When the token after `num_tokens` is due."""
        return self.promise.due_s(num_tokens, self.arrival_s, self.first_token_s)

    def note_first_token(self, now_s: float, max_tokens: int) -> None:
        """The first token is here; the answer may get so many."""
        self.first_token_s, self.max_tokens = now_s, max_tokens

    def ending(self, num_left: int) -> Ending:
        """Its end with so many tokens left, if the answer is as long as allowed."""
        return Ending(self.due_s(self.max_tokens - 1), num_left)

    def is_met(self, num_tokens: int, end_s: float) -> bool:
        """Whether a request that ended with so many tokens got what it was promised."""
        first_s = end_s if self.first_token_s is None else self.first_token_s
        return self.promise.is_kept(
            num_tokens, arrival_s=self.arrival_s, first_token_s=first_s, end_s=end_s
        )


def terms_of(req: Any, now_s: float = 0.0) -> RequestTerms:
    """The terms of a scheduler request; read once, then kept with it.

    `now_s` stands for the arrival of requests that came by a way that does not note it.
    """
    terms: RequestTerms | None = getattr(req, "echo_terms", None)
    if terms is None:
        params = custom_params_of(req.sampling_params)
        slo = active_config().slo
        task = Task.OFFLINE if params.get(TIER_KEY) == OFFLINE_SERVICE_TIER else Task.ONLINE
        promise = Promise(
            _promised(params.get(TTFT_KEY), slo.ttft_s), _promised(params.get(TPOT_KEY), slo.tpot_s)
        )
        arrival_s = params.get(ARRIVAL_KEY, now_s)
        within_s = params.get(DEADLINE_KEY)
        deadline_s = math.inf if within_s is None else arrival_s + within_s
        terms = req.echo_terms = RequestTerms(task, promise, arrival_s, deadline_s)
    return terms


def custom_params_of(sampling_params: Any) -> Mapping[str, Any]:
    """What a request carries in `custom_params`; empty for embeddings and odd shapes."""
    if isinstance(sampling_params, dict):
        params = sampling_params.get("custom_params")
    else:
        params = getattr(sampling_params, "custom_params", None)
    return params if isinstance(params, dict) else {}


def check_terms(params: Mapping[str, Any], slo: SloConfig) -> None:
    """Refuse terms that are no numbers, or stricter than the config allows.

    Errors: `TermsError` names the term, what was given and what is allowed.
    """
    least = {
        TTFT_KEY: slo.min_ttft_s or slo.ttft_s,
        TPOT_KEY: slo.min_tpot_s or slo.tpot_s,
        DEADLINE_KEY: 0.0,
    }
    for key, least_s in least.items():
        value = params.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least_s <= value <= MAX_TERM_S or value <= 0:
            raise TermsError(key, value, least_s, MAX_TERM_S)


def terms_of_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Terms named as headers. Errors: `TermsError` for one that is not a number."""
    terms: dict[str, Any] = {}
    for header, key in HEADERS.items():
        if (text := headers.get(header)) is not None:
            try:
                terms[key] = float(text)
            except ValueError:
                raise TermsError(header, text, 0.0, MAX_TERM_S) from None
    return terms


def stamped(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters with the time of arrival noted, whatever a client wrote there."""
    params = {**custom_params_of(sampling_params), ARRIVAL_KEY: time.perf_counter()}
    return {**sampling_params, "custom_params": params}


def _promised(own: Any, usual_s: float) -> float:
    return own if own is not None else usual_s or math.inf
