"""Which SGLang Echo knows, which config is active, and which server settings Echo refuses."""

from __future__ import annotations

import functools
import os
from typing import Any

from sglang.srt.environ import envs

from echo_sgl.config import CONFIG_ENV, EchoConfig, load_config
from echo_sgl.errors import UnsupportedEngineError

KNOWN_SGLANG_VERSION = "0.5.23"


@functools.cache
def active_config() -> EchoConfig:
    """The config that `ECHO_SGL_CONFIG` names, read once per process."""
    return load_config(os.environ[CONFIG_ENV])


def describe_active() -> str:
    """The one line that a server logs when Echo is on, which it is with every hook verified."""
    offline = active_config().offline
    return (
        f"Echo is on: SGLang {KNOWN_SGLANG_VERSION}, every hook verified, offline order "
        f"{offline.order} (utility ratio {offline.utility_ratio}), pool of up to "
        f"{offline.max_pool_requests} requests"
    )


def refuse_aligned_chunks(align_tokens: int | None) -> None:
    """A step's limit cuts prefills anywhere; some kernels want chunks of so many tokens.

    Errors: `UnsupportedEngineError`.
    """
    if align_tokens is not None:
        raise UnsupportedEngineError(
            f"Echo does not support prefill chunks of a multiple of {align_tokens} tokens, which "
            "--enable-deterministic-inference on FlashInfer and some models ask for. "
            f"Leave it out, or switch Echo off by unsetting {CONFIG_ENV}."
        )


def refuse_foreign_cache(tree_cache: Any) -> None:
    """SGLang keeps the KV of some models, as of those with sliding windows only, in another cache.

    Errors: `UnsupportedEngineError`.
    """
    if not hasattr(tree_cache, "echo_core"):
        raise UnsupportedEngineError(
            f"Echo does not support this model: SGLang keeps its KV in "
            f"{type(tree_cache).__name__}, not in its unified radix cache. "
            f"Switch Echo off by unsetting {CONFIG_ENV}."
        )


def refuse_unsupported(server_args: Any, config: EchoConfig) -> None:
    """Name every server setting that offline scheduling is not built for.

    Errors: `UnsupportedEngineError`.
    """
    refused = {
        "--pp-size > 1": server_args.pp_size > 1,
        "--disaggregation-mode": server_args.disaggregation_mode not in (None, "null"),
        "--enable-dp-attention": bool(server_args.enable_dp_attention),
        "--speculative-algorithm": server_args.speculative_algorithm is not None,
        "--tokenizer-worker-num > 1": server_args.tokenizer_worker_num > 1,
        "--enable-pdmux": bool(server_args.enable_pdmux),
        "--enable-hisparse": bool(server_args.enable_hisparse),
        "--dllm-algorithm": server_args.dllm_algorithm is not None,
        "--enable-session-radix-cache": bool(server_args.enable_session_radix_cache),
        "--enable-lmcache": bool(server_args.enable_lmcache),
        "--enable-flexkv": bool(server_args.enable_flexkv),
        "--enable-unified-cache-external-linker": bool(
            server_args.enable_unified_cache_external_linker
        ),
        "--hicache-host-memory-mode buffer_only": (
            server_args.hicache_host_memory_mode == "buffer_only"
        ),
        "--strip-thinking-cache": bool(server_args.strip_thinking_cache),
        "--scheduler-recv-interval > 1 with --tp-size > 1": (
            server_args.scheduler_recv_interval > 1 and server_args.tp_size > 1
        ),
        "--min-free-slots-delay": bool(server_args.min_free_slots_delay),
        "--radix-cache-backend": server_args.radix_cache_backend is not None,
        # Ray's actors load no plugins, and neither of the others serves our routes.
        "--use-ray": bool(server_args.use_ray),
        "--smg-grpc-mode": bool(server_args.smg_grpc_mode or server_args.grpc_mode),
        "--encoder-only": bool(server_args.encoder_only),
        "SGLANG_RUST_SERVER": bool(envs.SGLANG_RUST_SERVER.get()),
    }
    if config.cache.order != "stock":
        refused["--radix-eviction-policy (set cache.order instead)"] = (
            server_args.radix_eviction_policy != "lru"
        )
    given = [name for name, is_given in refused.items() if is_given]
    if given:
        raise UnsupportedEngineError(
            f"Echo does not support {', '.join(given)}. "
            f"Leave it out, or switch Echo off by unsetting {CONFIG_ENV}."
        )
