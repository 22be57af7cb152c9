"""The platform that lets stock SGLang 0.5.23 start on a machine without accelerator."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform


class EchoCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's CPU device, declared out of tree so that no compiled kernel is asked for."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"
