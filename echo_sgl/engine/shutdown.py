"""Ending a server that still has offline work: it is handed back, not drained for hours.

On SIGTERM SGLang finishes every request before it exits. Online users want that; a pool of
50,000 offline requests would keep the process alive for hours. They end with 503, which says
"elsewhere or later", and whoever sent them sends them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from echo_sgl.engine.batch_routes import begin_stop
from echo_sgl.engine.turns import STOPPING, OfflineTurns, is_offline_input

# The scheduler ends what it has: the prompts of a request may still be on their way to it.
AGAIN_S = 0.5


def end_offline_requests(result: Any, handler: Any, *signal_args: Any, **kwargs: Any) -> None:
    """After SGLang began to drain: abort what is offline, pooled or running, let no more in."""
    begin_stop()
    OfflineTurns.is_stopping = True
    manager = handler.tokenizer_manager
    abort_offline(manager, STOPPING)
    # SGLang ends its tasks when all requests have ended.
    ending = keep_ending_offline(manager, STOPPING, lambda: True)
    manager.asyncio_tasks.add(asyncio.get_running_loop().create_task(ending))


async def keep_ending_offline(manager: Any, message: str, is_wanted: Callable[[], bool]) -> None:
    """End the offline requests that the scheduler has, again and again until cancelled."""
    while is_wanted():
        abort_offline(manager, message)
        await asyncio.sleep(AGAIN_S)


def abort_offline(manager: Any, message: str) -> None:
    """End all offline requests that the scheduler has, with 503 and this message."""
    reason = {
        "type": "abort",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "message": message,
    }
    for rid, state in list(manager.rid_to_state.items()):
        if is_offline_input(state.obj):
            abort = AbortReq(rid=rid, abort_message=message, finished_reason=reason)
            manager._dispatch_to_scheduler(abort)
