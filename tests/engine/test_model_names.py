"""What SGLang itself makes of the names that it lists, and of those that are sent for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

from echo_sgl.batches.model_names import model_names


@pytest.mark.parametrize("base", ["m", "org/m:v2", "s3://bucket/m"])
@pytest.mark.parametrize("adapter", ["sql", "s3://bucket/sql"])
def test_the_name_that_is_sent_for_an_adapter_is_taken_for_it(
    base: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = SimpleNamespace(lora_name=adapter, lora_path="/somewhere")
    manager = SimpleNamespace(
        served_model_name=base,
        model_config=SimpleNamespace(context_len=9),
        lora_registry=SimpleNamespace(get_all_adapters=lambda: {adapter: reference}),
    )
    state = SimpleNamespace(tokenizer_manager=manager)
    monkeypatch.setattr(http_server, "_global_state", state)
    monkeypatch.setattr(http_server, "get_lora", lambda: SimpleNamespace(enable_lora=True))
    serving = object.__new__(OpenAIServingCompletion)
    serving.tokenizer_manager = manager
    names = model_names(asyncio.run(http_server.available_models()).model_dump()["data"])
    assert serving._resolve_lora_path(names[adapter], None) == adapter
    assert serving._resolve_lora_path(names[base], None) is None


def test_under_the_name_that_sglang_lists_an_adapter_by_the_base_would_answer() -> None:
    """Else names need not be changed any more."""
    serving = object.__new__(OpenAIServingCompletion)
    serving.tokenizer_manager = SimpleNamespace(served_model_name="m")
    assert serving._resolve_lora_path("sql", None) is None
