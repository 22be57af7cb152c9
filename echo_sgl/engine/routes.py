"""Echo's own HTTP routes on SGLang's server; its API key guards them like every other route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput

from echo_sgl.batch_shape import BatchRow

if TYPE_CHECKING:
    from echo_sgl.engine.step_timing import StepTimer

# Rides SGLang's own request for a scheduler's state, which every rank's leader answers.
STEPS_REQUEST_ID = "echo-sgl-steps"


def add_routes(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang starts to listen: put our routes beside its own."""
    from sglang.srt.entrypoints import http_server

    http_server.app.include_router(_router(tokenizer_manager))


def _router(tokenizer_manager: Any) -> APIRouter:
    router = APIRouter(prefix="/echo")

    @router.get("/steps")
    async def steps() -> dict[str, Any]:
        """The last steps of each replica: what they ran and how long it took."""
        tokenizer_manager.auto_create_handle_loop()
        request = GetInternalStateReq(rid=STEPS_REQUEST_ID)
        answers = await tokenizer_manager.get_internal_state_communicator(request)
        return {"replicas": [answer.internal_state for answer in answers]}

    return router


def steps_state(
    timer: StepTimer, server: dict[str, Any], *, num_running: int, num_waiting: int
) -> GetInternalStateReqOutput:
    """A scheduler's answer: what it runs on, columns, then one row per step, oldest first."""
    rows = [[*row, time_s] for row, time_s in timer.records()]
    columns = [*BatchRow._fields, "time_s"]
    state = {
        "server": server,
        "num_running": num_running,
        "num_waiting": num_waiting,
        "columns": columns,
        "rows": rows,
        "num_steps": timer.num_steps,
    }
    return GetInternalStateReqOutput(internal_state=state)
