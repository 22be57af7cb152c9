"""Greedy answers of a real server with our backend: those of the stock one and of transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from echo_sgl.cpu import OVERLAP_ENV
from eval.servers.models import SIZES, SPECIAL_TOKENS
from eval.servers.server import LOCAL, Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform stands aside there"),
]

ANSWER_TOKENS = 24
# Two backends round differently, so a step whose two best tokens lie closer than this could
# go either way. Logits have a standard deviation of about 2, rounding errors are below 1e-4.
MIN_MARGIN = 1e-3

STOCK = ("--attention-backend", "torch_native")
CHUNKS = ("--chunked-prefill-size", "64", "--enable-mixed-chunk")
# Ranks and replicas are compared in tests/engine/test_scheduler.py, on this backend too.
OURS = {
    "whole prompts, no overlap": ((), "0"),
    "mixed chunks in pages of 16": ((*CHUNKS, "--page-size", "16"), "1"),
}


@dataclass(frozen=True)
class Case:
    """A prompt and the answer that transformers gives."""

    prompt: list[int]
    answer: list[int]


def random_prompts() -> list[list[int]]:
    """Trees of prompts: shared prefixes of several lengths, each with several endings."""
    draw = random.Random(0)
    vocabulary = range(len(SPECIAL_TOKENS), SIZES["tiny"].vocab_size)
    endings = [draw.choices(vocabulary, k=length) for length in (1, 2, 15, 70, 130)]
    prefixes = [draw.choices(vocabulary, k=length) for length in (0, 16, 63, 200, 333)]
    return [prefix + ending for prefix in prefixes for ending in endings]


@pytest.fixture(scope="module")
def cases(tiny_model: Path) -> list[Case]:
    """Prompts whose answer no rounding can change, answered by transformers."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    found = []
    for prompt in random_prompts():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        best = torch.stack(output.scores).topk(2).values
        if float((best[..., 0] - best[..., 1]).min()) > MIN_MARGIN:
            found.append(Case(prompt, output.sequences[0, len(prompt) :].tolist()))
    return found


def answers(server: Server, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Greedy answers to all prompts sent at once."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    response = LOCAL.post(
        f"{server.url}/generate",
        json={"input_ids": list(prompts), "sampling_params": sampling},
        timeout=300,
    )
    assert response.status_code == 200, response.text
    return list(response.json())


def server_info(server: Server) -> dict[str, Any]:
    answer = LOCAL.get(f"{server.url}/server_info", timeout=30).raise_for_status()
    return dict(answer.json())


def test_most_answers_are_decided_by_more_than_rounding(cases: list[Case]) -> None:
    assert len(cases) >= 0.8 * len(random_prompts())


def test_answers_depend_on_the_shared_prefix_and_not_on_the_ending_alone(
    cases: list[Case],
) -> None:
    """Otherwise the comparisons below could not show a wrong attention to the prefix."""
    same_ending = [case for case in cases if case.prompt[-130:] == random_prompts()[4][-130:]]
    assert len({tuple(case.answer) for case in same_ending}) == len(same_ending) >= 3


def test_the_stock_backend_answers_like_transformers(cases: list[Case], server_for: Any) -> None:
    server = server_for(STOCK)
    assert server_info(server)["attention_backend"] == "torch_native"
    got = answers(server, [case.prompt for case in cases])
    assert [answer["output_ids"] for answer in got] == [case.answer for case in cases]


@pytest.mark.parametrize(("args", "overlap"), OURS.values(), ids=OURS)
def test_our_backend_gives_the_same_tokens_cold_and_from_the_cache(
    args: tuple[str, ...], overlap: str, cases: list[Case], server_for: Any
) -> None:
    server = server_for(args, env={OVERLAP_ENV: overlap})
    info = server_info(server)
    assert info["attention_backend"] == "echo_cpu"
    assert info["disable_overlap_schedule"] is (overlap == "0")
    prompts, expected = [case.prompt for case in cases], [case.answer for case in cases]
    for _ in range(2):
        got = answers(server, prompts)
        assert [answer["output_ids"] for answer in got] == expected
    cached = [answer["meta_info"]["cached_tokens"] for answer in got]
    assert sum(cached) > 0.4 * sum(map(len, prompts))
