"""What a server's models are called: in a line, and in the request that it becomes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_SGLANG = "sglang"  # `owned_by` of the models that SGLang lists


def model_names(listed: Any) -> dict[str, str]:
    """Of each model in `data` of `GET /v1/models`: its name, and the one to send.

    SGLang lists a LoRA adapter by its own name, but under that the base model would answer: it
    takes `base:adapter` (0.5.23, `OpenAIServingBase._resolve_lora_path`). Other servers, such as
    vLLM, want a name as they list it.
    """
    names: dict[str, str] = {}
    for card in listed or []:
        if isinstance(card, dict) and "id" in card:
            name, base = str(card["id"]), card.get("parent")
            is_adapter = base is not None and card.get("owned_by") == _SGLANG
            # An adapter that is called as its base, which stands first, does not hide that.
            names.setdefault(name, f"{base}:{name}" if is_adapter else name)
    return names


def with_adapters(names: Mapping[str, str], adapters: Collection[str]) -> dict[str, str]:
    """The same with adapters that are not listed; the base stands first, if any model is known."""
    base = next(iter(names), None)
    unlisted = [] if base is None else [name for name in adapters if name not in names]
    return {**names, **{name: f"{base}:{name}" for name in unlisted}}


def is_served(model: str, served: Collection[str]) -> bool:
    """Whether a server that lists these models serves this one, `base:adapter` as well."""
    if model in served:
        return True
    base, _, adapter = model.rpartition(":")
    return base in served and adapter in served
