"""SGLang's host tier (HiCache) on a CPU: its copies in torch, its memory unpinned.

SGLang 0.5.23 copies between the tiers with kernels of an accelerator, from memory pinned for
it. On a CPU both tiers are host memory: the second one holds what the first had to evict.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

IO_BACKEND, LAYOUT = "direct", "layer_first"
# SGLang leaves the machine 10 GiB, which is more than all that a small one has.
RESERVE_SHARE, MOST_RESERVE_BYTES = 0.1, 10 * 2**30


def choose_transfers(server_args: Any) -> None:
    """Have the tiers copied in the one way that needs no accelerator, whatever was asked for."""
    if server_args.enable_hierarchical_cache:
        server_args.hicache_io_backend, server_args.hicache_mem_layout = IO_BACKEND, LAYOUT


def install() -> None:
    """Give SGLang's host pools a copy and an allocation that need no accelerator; per rank."""
    from sglang.srt.mem_cache.pool_host import base, common, mha

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = min(
        MOST_RESERVE_BYTES, int(RESERVE_SHARE * memory_bytes)
    )
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    mha.transfer_kv_direct = copy_tokens


def copy_tokens(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the KV of some tokens, layer by layer.

    Shapes: a layer [tokens, heads, dim]; indices [copied tokens], whatever the page size.
    """
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def _allocate(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, allocator: Any, **_: Any
) -> torch.Tensor:
    """Memory of SGLang's own kind; there is no device to pin it for."""
    buffer: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return buffer
