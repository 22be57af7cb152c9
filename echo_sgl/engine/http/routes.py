"""Echo's own HTTP routes on SGLang's server; its API key guards them like every other route."""

from __future__ import annotations

import json
import sys
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.routing import APIRoute
from sglang.srt.managers.io_struct import GetInternalStateReq, SetInternalStateReq
from sglang.srt.utils.auth import AuthLevel, auth_level

from echo_sgl.engine.http.batch_routes import add_to_server
from echo_sgl.engine.http.calibrate_at_start import start_calibration
from echo_sgl.engine.http.envelope import refusal
from echo_sgl.engine.http.turns import OfflineTurns
from echo_sgl.engine.questions import (
    BUDGET_KEY,
    FORGET_TRAFFIC_KEY,
    RECORDING_QUESTION,
    REQUEST_QUESTION,
    STEPS_QUESTION,
    TRACE_QUESTION,
    budget_problem,
)
from echo_sgl.engine.settings import active_config
from echo_sgl.errors import EchoError
from echo_sgl.types import MAX_TRACE_S

MAX_ID_CHARS = 512
AFTER_PATTERN = r"^([0-9]{1,6}:[0-9]{1,15}(,[0-9]{1,6}:[0-9]{1,15})*)?$"


def add_routes(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang starts to listen: put our routes beside its own, calibrate if asked to."""
    from sglang.srt.entrypoints import http_server

    http_server.app.add_middleware(OfflineTurns)
    put_routes(http_server.app, Replicas(tokenizer_manager))
    try:
        add_to_server(http_server.app, server_args, tokenizer_manager)
    except EchoError as error:
        sys.exit(f"echo-sgl: {error}")
    start_calibration(server_args)


def put_routes(app: FastAPI, replicas: Replicas) -> None:
    """One by one: where a whole router is included, SGLang's check of keys does not find what key a
    route asks for, and takes the usual one.
    """
    for route in _router(replicas).routes:
        assert isinstance(route, APIRoute)
        app.add_api_route(route.path, route.endpoint, methods=sorted(route.methods or ()))


class Replicas:
    """Asks and tells the schedulers of all replicas, through SGLang's internal state."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager = tokenizer_manager

    async def ask(self, question: str) -> list[dict[str, Any]]:
        """All replicas' answers, by number."""
        self._manager.auto_create_handle_loop()
        request = GetInternalStateReq(rid=question)
        answers = await self._manager.get_internal_state_communicator(request)
        states = [answer.internal_state for answer in answers]
        return sorted(states, key=lambda state: int(state["replica"]))

    async def tell(self, key: str, value: float) -> list[bool]:
        """Whether each replica did as told."""
        self._manager.auto_create_handle_loop()
        order = SetInternalStateReq(server_args={key: value})
        answers = await self._manager.set_internal_state_communicator(order)
        return [answer.updated for answer in answers]


def _router(replicas: Replicas) -> APIRouter:
    router = APIRouter(prefix="/echo")
    _add_reports(router, replicas)
    _add_explanation(router, replicas)
    _add_orders(router, replicas)
    return router


def _add_reports(router: APIRouter, replicas: Replicas) -> None:
    @router.get("/steps")
    async def steps() -> dict[str, Any]:
        """The last steps of each replica: what they ran and how long it took."""
        return {"replicas": await replicas.ask(STEPS_QUESTION)}

    @router.get("/trace")
    async def trace(
        seconds: Annotated[float, Query(gt=0, le=MAX_TRACE_S)] = 10.0,
    ) -> dict[str, Any]:
        """The steps of the last seconds: what was planned, what came of it, who sat out."""
        return {"replicas": await replicas.ask(f"{TRACE_QUESTION}{seconds!r}")}

    @router.get("/recording")
    async def recording(
        recording: Annotated[str, Query(pattern=r"^[0-9a-f]{32}$")],
        after: Annotated[str, Query(max_length=4096, pattern=AFTER_PATTERN)] = "",
    ) -> dict[str, Any]:
        """Requests that ended since: times and lengths, and salted hashes instead of prompts."""
        return {"replicas": await replicas.ask(f"{RECORDING_QUESTION}{recording}/{after}")}


def _add_explanation(router: APIRouter, replicas: Replicas) -> None:
    @router.get("/requests/{rid:path}")
    async def request(rid: str) -> Any:
        """What a request is doing or waiting for."""
        states = await replicas.ask(f"{REQUEST_QUESTION}{rid}") if len(rid) <= MAX_ID_CHARS else []
        for state in states:
            if state["request"] is not None:
                return {"replica": state["replica"], **state["request"]}
        message = (
            f"no request {rid[:MAX_ID_CHARS]!r} is here: it has ended, or never came. A request's "
            "id is the `rid` in its body, else the `id` of its answer."
        )
        return refusal(HTTPStatus.NOT_FOUND, message, "id")


def _add_orders(router: APIRouter, replicas: Replicas) -> None:
    @router.post("/budget")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def budget(request: Request) -> Any:
        """Set what each step with online work may take; it stays until it is set again."""
        budget_s = _budget_of(await request.body())
        if problem := budget_problem(active_config().steps.limit, budget_s):
            return refusal(HTTPStatus.BAD_REQUEST, problem, "budget_s")
        updated = await replicas.tell(BUDGET_KEY, float(budget_s))
        if not all(updated):
            return refusal(HTTPStatus.CONFLICT, "a replica refused the budget; see its log")
        return {"budget_s": float(budget_s), "num_replicas": len(updated)}

    @router.post("/forget-traffic")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def forget_traffic() -> dict[str, int]:
        """Start the reserve and a moving budget anew: what ran until now was no traffic."""
        return {"num_replicas": len(await replicas.tell(FORGET_TRAFFIC_KEY, 1))}


def _budget_of(body: bytes) -> Any:
    """What the body names, None for one that names nothing."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return fields.get("budget_s") if isinstance(fields, dict) else None
