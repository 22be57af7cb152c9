"""Names of models, as servers list them and as they want to hear them."""

from __future__ import annotations

from typing import Any

import pytest

from echo_sgl.batches.lines.model_names import is_served, model_names


def card(name: str, parent: str | None = None, owner: str = "sglang") -> dict[str, Any]:
    return {"id": name, "parent": parent, "owned_by": owner}


def test_sglang_takes_an_adapter_that_it_lists_behind_the_name_of_its_base() -> None:
    listed = [card("org/m:v2"), card("sql", "org/m:v2")]
    assert model_names(listed) == {"org/m:v2": "org/m:v2", "sql": "org/m:v2:sql"}


def test_an_adapter_that_is_called_as_its_base_does_not_hide_it() -> None:
    assert model_names([card("m"), card("m", "m")]) == {"m": "m"}


def test_other_servers_take_an_adapter_as_they_list_it() -> None:
    listed = [card("m", owner="vllm"), card("sql", "m", owner="vllm"), {"id": 7}, {}, None]
    assert model_names(listed) == {"m": "m", "sql": "sql", "7": "7"}
    assert model_names(None) == {}


@pytest.mark.parametrize(
    ("model", "served"),
    [("m", True), ("org/m:v2", True), ("m:adapter", True), ("m:other", False), ("", False)],
)
def test_a_model_is_served_by_its_name_or_as_base_and_adapter(model: str, served: bool) -> None:
    assert is_served(model, ["m", "adapter", "org/m:v2"]) is served
