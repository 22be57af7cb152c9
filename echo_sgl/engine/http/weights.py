"""Updating a server's weights while offline work waits: it is handed back, not waited for.

SGLang updates weights once every request that came before has its answer, and lets none begin
meanwhile. A pool of 50,000 offline requests would keep online users waiting for hours. They end
with 503, which says "elsewhere or later", and whoever sent them sends them again. So do those of
an adapter that SGLang unloads: it waits for the last of them, and whoever asks for another adapter
that is to be loaded waits with it.
"""

from __future__ import annotations

from typing import Any

from echo_sgl.engine.http.hand_back import HandBack

UPDATING = "The server's weights are being updated; send this again."
UNLOADING = "The adapter of this request is unloaded, perhaps for another one; send it again."


async def hand_back_offline(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around each of SGLang's updates of weights; who paused the engine waits for nobody."""
    async with HandBack(manager, UPDATING).meanwhile(while_paused=False):
        return await original(manager, *args, **kwargs)


async def hand_back_adapter(original: Any, manager: Any, obj: Any) -> Any:
    """Around the unloading of an adapter: by order, or of the one that was used least recently."""

    def needs_it(request: Any) -> bool:
        path = request.lora_path
        return obj.lora_name in (path if isinstance(path, list) else [path])

    async with HandBack(manager, UNLOADING, needs_it).meanwhile(while_paused=True):
        return await original(manager, obj)
