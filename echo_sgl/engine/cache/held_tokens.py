"""What requests hold of the KV pool together, when some of them share prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.session.streaming_session import is_virtual_node

from echo_sgl.engine.cache.tree_core import EchoTreeCore


def held_tokens(core: EchoTreeCore | None, reqs: Sequence[Any]) -> int:
    """Tokens that would be free or evictable if these requests ended.

    A prefix that several of them share counts once, and not at all if another request holds it.
    Without a tree (`core` is None) each has its own. A turn of a streaming session leaves its own
    to the session.
    """
    reqs = [req for req in reqs if not is_virtual_node(req.last_node)]
    num_tokens = sum(int(req.seqlen) for req in reqs)
    return num_tokens if core is None else num_tokens - _held_by_others(core, reqs)


def _held_by_others(core: EchoTreeCore, reqs: Sequence[Any]) -> int:
    """Of the requests' paths through the tree, added up, what another of them counts or keeps."""
    num_holds: Counter[Any] = Counter()
    for req in reqs:
        node = core.node_by_id(req.last_node)
        while node is not core.root_node:
            num_holds[node] += 1
            node = node.parent
    num_tokens = 0
    for node, num in num_holds.items():
        ends_with_them = node.component_data[ComponentType.FULL].lock_ref <= num
        num_tokens += len(node.key) * (num - ends_with_them)
    return num_tokens
