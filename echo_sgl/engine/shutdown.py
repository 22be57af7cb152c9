"""Ending a server that still has offline work: it is handed back, not drained for hours.

On SIGTERM SGLang finishes every request before it exits. Online users want that; a pool of
50,000 offline requests would keep the process alive for hours. They end with 503, which says
"elsewhere or later", and whoever sent them sends them again.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from echo_sgl.engine.batch_routes import begin_stop
from echo_sgl.engine.tasks import task_of_input
from echo_sgl.types import Task

MESSAGE = "The server is shutting down; send this offline request again later or elsewhere."


def end_offline_requests(result: Any, handler: Any, *signal_args: Any, **kwargs: Any) -> None:
    """After SGLang began to drain: abort what is offline, pooled or running."""
    begin_stop()
    manager = handler.tokenizer_manager
    reason = {
        "type": "abort",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "message": MESSAGE,
    }
    for rid, state in list(manager.rid_to_state.items()):
        if task_of_input(state.obj) is Task.OFFLINE:
            abort = AbortReq(rid=rid, abort_message=MESSAGE, finished_reason=reason)
            manager._dispatch_to_scheduler(abort)
