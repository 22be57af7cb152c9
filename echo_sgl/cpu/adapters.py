"""SGLang's LoRA adapters on a CPU: its torch kernels, on memory that is not pinned.

SGLang 0.5.23 pins what its LoRA layers read, for an accelerator's copies; without one torch
refuses to.
"""

from __future__ import annotations

from typing import Any

import torch

BACKEND = "torch_native"


def choose_kernels(server_args: Any) -> None:
    """Have adapters computed by the one backend that needs no accelerator, whatever was asked."""
    server_args.lora_backend = BACKEND


def install() -> None:
    """Let SGLang's LoRA modules ask for pinned memory and get any; per rank."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = _Unpinned()
    torch.Tensor.pin_memory = _as_it_is


class _Unpinned:
    """`torch`, whose new tensors are never pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def _as_it_is(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor
