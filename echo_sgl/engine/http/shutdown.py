"""Ending a server that still has offline work: it is handed back, not drained for hours.

On SIGTERM SGLang finishes every request before it exits. Online users want that; a pool of
50,000 offline requests would keep the process alive for hours. They end with 503, which says
"elsewhere or later", and whoever sent them sends them again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from echo_sgl.engine.http.batch_routes import begin_stop
from echo_sgl.engine.http.hand_back import HandBack
from echo_sgl.engine.http.turns import STOPPING, OfflineTurns


def end_offline_requests(result: Any, handler: Any, *signal_args: Any, **kwargs: Any) -> None:
    """After SGLang began to drain: abort what is offline, pooled or running, let no more in."""
    begin_stop()
    OfflineTurns.is_stopping = True
    manager = handler.tokenizer_manager
    hand_back = HandBack(manager, STOPPING).go_on(while_paused=True)
    manager.echo_hand_back = asyncio.create_task(hand_back)
