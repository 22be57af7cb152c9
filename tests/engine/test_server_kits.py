"""SGLang's own server kits for the radix cache, run on a server with Echo's tree core."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.test.kits import cache_hit_kit, radix_cache_server_kit

from eval.servers.models import SIZES
from tests.engine.traffic import is_idle, metric, wait_until

pytestmark = pytest.mark.server

VOCAB = range(8, SIZES["tiny"].vocab_size)
MAX_DECODE_TOKENS = 40


def test_radix_attention_kit(echo_server, monkeypatch):
    """Random trees of prompts, as the kit grows them, cut to our model's vocabulary and speed."""
    grow = radix_cache_server_kit.gen_radix_tree

    def gen_radix_tree() -> list[dict[str, Any]]:
        random.seed(5)
        return [
            {
                "input_ids": [VOCAB[token % len(VOCAB)] for token in node["input_ids"]],
                "decode_len": node["decode_len"] % MAX_DECODE_TOKENS,
            }
            for node in grow(num_nodes=80, chunk_len=64)
        ]

    monkeypatch.setattr(radix_cache_server_kit, "gen_radix_tree", gen_radix_tree)
    before = metric(echo_server, "echo_sgl_requests_total", outcome="finished")
    radix_cache_server_kit.run_radix_attention_test(echo_server.url)
    wait_until(lambda: is_idle(echo_server), "the server is idle")
    assert metric(echo_server, "echo_sgl_requests_total", outcome="finished") - before >= 80


def test_multi_turn_cache_hit_kit(echo_server, monkeypatch):
    """The kit itself checks every turn's hits; only its prompts come from here."""
    draw = random.Random(6)

    def sample(*, input_len: int, num_prompts: int, **_: Any) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(prompt=draw.choices(VOCAB, k=input_len)) for _ in range(num_prompts)
        ]

    monkeypatch.setattr(cache_hit_kit, "sample_random_requests", sample)
    monkeypatch.setattr(cache_hit_kit, "get_tokenizer", lambda path: None)
    result = cache_hit_kit.run_multiturn_cache_hit_test(
        echo_server.url, "tiny", num_clients=6, num_rounds=3, request_length=100, output_length=16
    )
    assert result["overall"]["cache_hit_rate"] > 0.5
