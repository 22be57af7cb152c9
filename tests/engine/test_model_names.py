"""What SGLang itself makes of the names that it lists, and of those that are sent for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers import tokenizer_control_mixin, tokenizer_manager
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoRAUpdateOutput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from echo_sgl.batches.dispatch.line_engine import AsgiEngine
from echo_sgl.batches.lines.model_names import model_names
from echo_sgl.engine.http.batch_routes import evicted_adapters


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


class LoraManager(TokenizerManager):
    """SGLang's, with room for one adapter, and a scheduler that loads and unloads all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        room = SimpleNamespace(enable_lora=True, max_loaded_loras=1, lora_paths=None)
        for module in (http_server, tokenizer_manager, tokenizer_control_mixin):
            monkeypatch.setattr(module, "get_lora", lambda: room)
        parallel = SimpleNamespace(dp_size=1)
        monkeypatch.setattr(tokenizer_control_mixin, "get_parallel", lambda: parallel)
        self.served_model_name = "base"
        self.model_config = SimpleNamespace(context_len=9)
        self.enable_lora = True
        self.init_lora()

    def auto_create_handle_loop(self) -> None:
        pass

    async def update_lora_adapter_communicator(self, obj: Any) -> list[LoRAUpdateOutput]:
        loaded = dict.fromkeys((*self.lora_registry.get_all_adapters(), obj.lora_name), "/")
        return [LoRAUpdateOutput(success=True, loaded_adapters=loaded)]


def test_an_adapter_that_was_unloaded_for_another_one_is_served_nevertheless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang loads it again when it is asked for, but does not list it."""

    async def main() -> None:
        manager = LoraManager(monkeypatch)
        state = SimpleNamespace(tokenizer_manager=manager)
        monkeypatch.setattr(http_server, "_global_state", state)
        app = FastAPI()
        app.get("/v1/models")(http_server.available_models)
        engine = AsgiEngine(
            app,
            endpoints=(),
            api_key=None,
            is_ready=lambda: True,
            abort=lambda rid: None,
            unlisted=lambda: evicted_adapters(manager),
        )
        for name in ("sql", "law"):
            await manager.load_lora_adapter(
                LoadLoRAAdapterReqInput(lora_name=name, lora_path=f"/{name}")
            )
        sent = LoRARef(lora_name="sent", lora_path="__tensor__")  # it cannot be loaded again
        manager.lora_ref_cache["sent"] = sent
        assert "sql" not in manager.lora_registry.get_all_adapters()
        names = {"base": "base", "law": "base:law", "sql": "base:sql"}
        assert await engine.models() == names
        await manager._resolve_lora_path(SimpleNamespace(lora_path="sql"))
        assert "law" not in manager.lora_registry.get_all_adapters()
        assert await engine.models() == names

    asyncio.run(main())
