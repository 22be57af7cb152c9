"""Updating a server's weights while offline work waits: it is handed back, not waited for.

SGLang updates weights once every request that came before has its answer, and lets none begin
meanwhile. A pool of 50,000 offline requests would keep online users waiting for hours. They end
with 503, which says "elsewhere or later", and whoever sent them sends them again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from echo_sgl.engine.hand_back import HandBack

UPDATING = "The server's weights are being updated; send this again."


async def hand_back_offline(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around each of SGLang's updates of weights; who paused the engine waits for nobody."""
    ending = asyncio.create_task(HandBack(manager, UPDATING).go_on(while_paused=False))
    try:
        return await original(manager, *args, **kwargs)
    finally:
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ending
