"""SGLang's unified radix cache on Echo's tree core, told on whose behalf it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    get_tree_core_factory,
    register_tree_core_backend,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from echo_sgl.engine.cache.tree_core import EchoTreeCore
from echo_sgl.engine.requests.tasks import task_of
from echo_sgl.engine.settings import active_config
from echo_sgl.types import Task

TREE_CORE_NAME = "echo"


class EchoRadixCache(UnifiedRadixCache):
    """The cache that every server with `cache.order` other than "stock" runs on.

    `on_end` is called with each request whose KV is released, or kept by its session, because it
    ended, and how many of its tokens the tree took in just then.
    """

    on_end: Callable[[Any, int], None] | None = None

    def __init__(self, params: Any) -> None:
        if active_config().cache.order != "stock" and not params.disable:
            if get_tree_core_factory(TREE_CORE_NAME) is None:
                register_tree_core_backend(TREE_CORE_NAME, _create_tree_core)
            params = replace(params, tree_core_backend=TREE_CORE_NAME)
        super().__init__(params)

    @property
    def echo_core(self) -> EchoTreeCore | None:
        """Echo's tree core, or None where SGLang's own is in charge."""
        return self.tree_core if isinstance(self.tree_core, EchoTreeCore) else None

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        if (core := self.echo_core) is not None:
            core.user = task_of(req)
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)

    def touch_prefix(self, key: Any) -> None:
        if (core := self.echo_core) is not None:
            core.user = Task.ONLINE  # SGLang touches what its queue waits for
        super().touch_prefix(key)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        if self.on_end is not None and req.finished():
            self.on_end(req, req.owned_kv_len() if checkpointed else 0)

    def claim_kv_row(self, req: Any) -> bool:
        is_claimed: bool = super().claim_kv_row(req)
        # A streaming session keeps the KV of a turn that ended: nothing is released then.
        if is_claimed and self.on_end is not None and req.finished():
            self.on_end(req, 0)
        return is_claimed


def _create_tree_core(params: Any, components: Any) -> EchoTreeCore:
    return EchoTreeCore(params, components, active_config().cache)


def keep_retracted_prefix(batch: Any, idx: int, *args: Any, **kwargs: Any) -> None:
    """Before a running request is retracted: put what it computed into the tree.

    SGLang frees the KV of retracted requests at once. In the tree it is evictable, so the
    memory is there for whoever needs it, and resuming is free where nobody did. Of an online one
    it goes last. The last token's KV may still be computed by a step in flight; it stays out.
    """
    req, cache = batch.reqs[idx], batch.tree_cache
    computed = len(req.origin_input_ids) + len(req.output_ids) - 1
    if cache.disable or cache.supports_mamba() or req.finished() or req.skip_radix_cache_insert:
        return
    req.echo_computed_tokens = computed
    if computed > req.kv.cache_protected_len:
        req.refresh_fill_ids()
        cache.checkpoint(req, up_to=computed)
    core = cache.echo_core
    if core is not None and task_of(req) is Task.ONLINE:
        core.await_return(req, computed)
