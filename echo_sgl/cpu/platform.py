"""The platform that lets stock SGLang 0.5.23 start on a machine without accelerator."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
)
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

from echo_sgl.cpu import OVERLAP_ENV, adapters, host_tier

ATTENTION_BACKEND = "echo_cpu"
BIND_ENV = "SGLANG_CPU_OMP_THREADS_BIND"


class EchoCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's CPU device, declared out of tree so that no compiled kernel is asked for.

    SGLang makes one in every process before it parses arguments; that is where the name
    of our attention backend becomes a valid choice.
    """

    _enum = PlatformEnum.OOT

    def __init__(self) -> None:
        if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([ATTENTION_BACKEND])

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open; runs in the launcher, before ranks are started.

        Side effect: names each rank's cores in the environment when there are several
        ranks, because SGLang otherwise wants one NUMA node per rank and stops.
        """
        # With --device cpu SGLang has chosen a backend by now; what the user gave is kept apart.
        if server_args._raw_input.get("attention_backend") is None:
            server_args.attention_backend = ATTENTION_BACKEND
        if os.environ.get(OVERLAP_ENV, "0") != "1":
            # A CPU has run a step when its launch returns. Overlapped, the step's tokens would
            # wait until the next one has run, too.
            server_args.disable_overlap_schedule = True
        host_tier.choose_transfers(server_args)
        adapters.choose_kernels(server_args)
        num_ranks = server_args.dp_size * server_args.tp_size * server_args.pp_size
        if num_ranks > 1 and not os.environ.get(BIND_ENV):
            os.environ[BIND_ENV] = cores_by_rank(os.sched_getaffinity(0), num_ranks)

    def init_backend(self) -> None:
        """Register the attention backend, share out the cores; runs once in each rank."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from echo_sgl.cpu.attention import create_attention_backend

        register_attention_backend(ATTENTION_BACKEND)(create_attention_backend)
        host_tier.install()
        adapters.install()
        if "|" in (ranks := os.environ.get(BIND_ENV, "")):
            # SGLang binds threads only where it has AMX or ARM kernels; two ranks that each
            # spin on all cores are many times slower than two that share them.
            num_ranks = len(ranks.split("|"))
            torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))


def cores_by_rank(cores: Collection[int], num_ranks: int) -> str:
    """Cores of each rank as SGLang writes them: "0,1|2,3"; ranks share cores if need be."""
    ordered = sorted(cores)
    per_rank = max(1, len(ordered) // num_ranks)
    shares = (
        [ordered[(rank * per_rank + i) % len(ordered)] for i in range(per_rank)]
        for rank in range(num_ranks)
    )
    return "|".join(",".join(map(str, share)) for share in shares)
