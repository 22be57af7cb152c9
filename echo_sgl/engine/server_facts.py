"""What a server runs on and what it serves: the provenance of everything measured on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from echo_sgl.engine.settings import KNOWN_SGLANG_VERSION

# What configs have of layers that are no dense transformer's: experts, and latent attention.
OTHER_LAYERS = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")


def server_facts(scheduler: Any) -> dict[str, Any]:
    """Device, model and limits of a scheduler, as plain values.

    `num_ranks` devices share each layer; `weights` names their type and quantization.
    `transformer` holds the sizes of `estimators.roofline_time.Transformer` per rank, or None
    where the model does not have them; `captured_batch_sizes` are those of decode graphs.
    """
    model_config = scheduler.model_config
    return {
        "device": device_name(),
        "model": Path(scheduler.server_args.model_path).name,
        "num_ranks": scheduler.server_args.tp_size,
        "weights": _weights(model_config),
        "sglang_version": KNOWN_SGLANG_VERSION,
        "max_total_tokens": scheduler.max_total_num_tokens,
        "max_context_tokens": model_config.context_len,
        "max_running_requests": scheduler.max_running_requests,
        "chunked_prefill_tokens": scheduler.chunked_prefill_size or 0,
        "is_mixed_chunk": bool(scheduler.is_mixed_chunk),
        "vocab": model_config.vocab_size,
        "transformer": transformer_sizes(model_config, scheduler.server_args.tp_size),
        "captured_batch_sizes": captured_batch_sizes(scheduler.tp_worker.model_runner),
    }


def _weights(model_config: Any) -> str:
    dtype = str(model_config.dtype).removeprefix("torch.")
    return f"{dtype} {model_config.quantization}" if model_config.quantization else dtype


def captured_batch_sizes(model_runner: Any) -> list[int]:
    """Batch sizes that decode graphs were captured for; none where decodes run without."""
    return sorted({int(size) for size in model_runner.decode_cuda_graph_capture_bs})


def device_name() -> str:
    """The accelerator's name, or the processor's with the number of cores."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{_processor_name()}, {os.cpu_count()} cores"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def transformer_sizes(model_config: Any, num_ranks: int) -> dict[str, int] | None:
    hf = model_config.hf_text_config
    intermediate = getattr(hf, "intermediate_size", None)
    is_dense = not any(getattr(hf, name, None) for name in OTHER_LAYERS)
    # Some models have a list of them, layer by layer.
    if not (is_dense and isinstance(intermediate, int) and intermediate):
        return None
    if not model_config.num_attention_heads:
        return None
    return {
        "num_layers": model_config.num_hidden_layers,
        "hidden": model_config.hidden_size,
        "num_heads": max(1, model_config.num_attention_heads // num_ranks),
        "num_kv_heads": max(1, model_config.num_key_value_heads // num_ranks),
        "intermediate": max(1, intermediate // num_ranks),
        "vocab": max(1, model_config.vocab_size // num_ranks),
        "dtype_bytes": model_config.dtype.itemsize,
        "head_dim": model_config.head_dim,
    }
