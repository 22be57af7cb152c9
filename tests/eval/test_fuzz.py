"""Servers and requests by chance: what may come does, and the same seed gives the same."""

from __future__ import annotations

import argparse
import random
import tomllib
from pathlib import Path

import pytest

from echo_sgl.config import load_config, parse_config, resolve_config_path
from eval.fuzz.requests import draw_body
from eval.fuzz.run import FLAGS, PRESETS, draw_variant, main
from eval.workloads.prompts import count_tokens, load_tokenizer

VARIANTS = [draw_variant(random.Random(seed)) for seed in range(200)]


def test_every_server_is_one_that_sglang_and_echo_take() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for variant in VARIANTS:
        _, unknown = parser.parse_known_args(["--model-path", "m", *variant.args])
        assert unknown == []
        if variant.is_preset:
            load_config(resolve_config_path(variant.config))
        else:
            assert parse_config(tomllib.loads(variant.config)).slo.ttft_s == 0.3


def test_every_flag_and_preset_comes_and_none_that_exclude_each_other() -> None:
    given = [set(variant.args) for variant in VARIANTS]
    for _, (name, *_) in FLAGS:
        assert any(name in args for args in given)
    assert {variant.config for variant in VARIANTS} >= set(PRESETS)
    assert not any({"--disable-radix-cache", "--enable-hierarchical-cache"} <= one for one in given)


@pytest.mark.parametrize("pool_tokens", [600, 4000])
def test_prompts_of_all_kinds_fit_into_the_pool(tiny_model: Path, pool_tokens: int) -> None:
    tokenizer, rng = load_tokenizer(str(tiny_model)), random.Random(1)
    bodies = [draw_body(rng, pool_tokens) for _ in range(200)]
    again = random.Random(1)
    assert bodies == [draw_body(again, pool_tokens) for _ in range(200)]
    texts = [body["prompt"] for body in bodies if isinstance(body["prompt"], str)]
    lengths = [count_tokens(tokenizer, text) for text in texts]
    assert max(lengths) < pool_tokens - 10
    assert max(lengths) > pool_tokens / 4
    keys = {key for body in bodies for key in body}
    assert keys >= {"echo", "logprobs", "n", "frequency_penalty", "min_tokens", "service_tier"}
    assert 60 < sum("service_tier" in body for body in bodies) < 140


@pytest.mark.slow
@pytest.mark.server
def test_one_round_on_a_real_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1", "--round", "0", "--seconds", "3"]) == 0
    assert "ok: answered 200" in capsys.readouterr().out
