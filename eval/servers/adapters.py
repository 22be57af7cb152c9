"""Build LoRA adapters for a demo model: random weights, in the files that PEFT writes."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8


def build_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write one that changes what a model says; equal seeds, equal weights."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    width, num_heads = config["hidden_size"], config["num_attention_heads"]
    out_width = {
        "q_proj": width,
        "v_proj": width // num_heads * config["num_key_value_heads"],
    }
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, size in out_width.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, width, generator=draw) / 2
            weights[f"{name}.lora_B.weight"] = torch.randn(size, RANK, generator=draw) / 2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(out_width),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
