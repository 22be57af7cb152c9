"""Run stock SGLang on a machine without accelerator: a platform and an attention backend.

Independent of the Echo plugin: SGLang finds the platform by the entry point
`sglang.srt.platforms`, whether Echo is on or off.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "echo_sgl.cpu.platform.EchoCpuPlatform"
# "1": overlap scheduling as on a GPU, for tests of it where there is none.
OVERLAP_ENV = "ECHO_SGL_CPU_OVERLAP"
_ACCELERATORS = ("cuda", "xpu", "npu", "musa", "mps", "hpu")  # torch.cuda is ROCm too


def activate() -> str | None:
    """Name our platform class, or None where SGLang has a platform of its own.

    It has one when an accelerator is present and when its own CPU engine was asked for.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or _has_accelerator():
        return None
    return PLATFORM_CLASS


def _has_accelerator() -> bool:
    import torch

    devices = (getattr(torch, name, None) for name in _ACCELERATORS)
    return any(device.is_available() for device in devices if device is not None)
