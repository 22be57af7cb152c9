"""Updating a server's weights while offline work waits: it is handed back, not waited for.

SGLang updates weights once every request that came before has its answer, and lets none begin
meanwhile. A pool of 50,000 offline requests would keep online users waiting for hours. They end
with 503, which says "elsewhere or later", and whoever sent them sends them again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from echo_sgl.engine.shutdown import abort_offline

UPDATING = "The server's weights are being updated; send this again."
# A request that came just before may not be at the scheduler yet, which ends those that it has.
AGAIN_S = 0.5


async def hand_back_offline(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around each of SGLang's updates of weights; who paused the engine waits for nobody."""
    ending = asyncio.create_task(_end_offline(manager))
    try:
        return await original(manager, *args, **kwargs)
    finally:
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ending


async def _end_offline(manager: Any) -> None:
    while not manager.is_pause:
        abort_offline(manager, UPDATING)
        await asyncio.sleep(AGAIN_S)
