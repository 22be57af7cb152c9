"""The backend's arithmetic against attention written out per query, without a server."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from echo_sgl.cpu.attention import EchoCpuAttention
from echo_sgl.cpu.plan import MAX_GROUP_TOKENS, build_plan
from echo_sgl.errors import UnsupportedEngineError

MAX_CONTEXT_TOKENS = 512
HEAD_DIM = 16


class KvPool:
    """The three calls that a backend makes on SGLang's KV pool; unwritten slots hold NaN."""

    def __init__(self, num_slots: int, kv_heads: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.k = torch.full((num_slots, kv_heads, HEAD_DIM), math.nan, dtype=dtype)
        self.v = self.k.clone()

    def set_kv_buffer(self, layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[loc.loc], self.v[loc.loc] = k, v

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v


@dataclass
class Scene:
    """A pool with requests of (cached, new) tokens, and the backend that reads it."""

    lengths: list[tuple[int, int]]
    heads: int
    kv_heads: int
    page_size: int
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        num_pages = sum(-(-sum(pair) // self.page_size) for pair in self.lengths) + 1
        self.pool = KvPool(num_pages * self.page_size, self.kv_heads, self.dtype)
        pages = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
        self.req_to_token = torch.zeros(len(self.lengths), MAX_CONTEXT_TOKENS, dtype=torch.int32)
        for row, (cached, new) in enumerate(self.lengths):
            own = [pages.pop() for _ in range(-(-(cached + new) // self.page_size))]
            slots = [page * self.page_size + i for page in own for i in range(self.page_size)]
            self.req_to_token[row, : cached + new] = torch.tensor(slots[: cached + new])
            filled = self.req_to_token[row, :cached].long()
            self.pool.k[filled] = self._random(cached, self.kv_heads, generator)
            self.pool.v[filled] = self._random(cached, self.kv_heads, generator)
        num_new = sum(new for _, new in self.lengths)
        self.q = self._random(num_new, self.heads, generator)
        self.k = self._random(num_new, self.kv_heads, generator)
        self.v = self._random(num_new, self.kv_heads, generator)
        self.layer = RadixAttention(self.heads, HEAD_DIM, 1.7 / HEAD_DIM, self.kv_heads, 0)

    def _random(self, tokens: int, heads: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(self.dtype)

    def backend(self, *layers: RadixAttention) -> EchoCpuAttention:
        return EchoCpuAttention(
            SimpleNamespace(
                model=torch.nn.ModuleList(layers or [self.layer]),
                req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
                token_to_kv_pool=self.pool,
                dtype=self.dtype,
            )
        )

    def batch(self) -> SimpleNamespace:
        decoding = all(new == 1 for _, new in self.lengths)
        new_slots = [
            self.req_to_token[row, cached : cached + new]
            for row, (cached, new) in enumerate(self.lengths)
        ]
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decoding else ForwardMode.MIXED,
            seq_lens=torch.tensor([cached + new for cached, new in self.lengths]),
            extend_seq_lens=torch.tensor([new for _, new in self.lengths]),
            req_pool_indices=torch.arange(len(self.lengths)),
            out_cache_loc=torch.cat(new_slots).long(),
        )

    def attend(self) -> torch.Tensor:
        backend, batch = self.backend(), self.batch()
        backend.init_forward_metadata(batch)
        out = backend.forward(self.q.flatten(1), self.k, self.v, self.layer, batch)
        return out.view_as(self.q)

    def expected(self) -> torch.Tensor:
        """Softmax over each query's own past, one head at a time; call after `attend`."""
        rows = []
        for row, (cached, new) in enumerate(self.lengths):
            for position in range(cached, cached + new):
                past = self.req_to_token[row, : position + 1].long()
                rows.append(self._one_query(len(rows), past))
        return torch.stack(rows)

    def _one_query(self, index: int, past: torch.Tensor) -> torch.Tensor:
        group = self.heads // self.kv_heads
        heads = []
        for head in range(self.heads):
            keys = self.pool.k[past, head // group].double()
            values = self.pool.v[past, head // group].double()
            scores = keys @ self.q[index, head].double() * self.layer.scaling
            heads.append(torch.softmax(scores, 0) @ values)
        return torch.stack(heads)


def random_lengths(seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [
        (draw.choice([0, 1, 15, 16, 17, 100, 300]), draw.choice([1, 1, 1, 2, 16, 33, 90]))
        for _ in range(draw.randint(1, 7))
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_any_mix_of_prefill_and_decode_rows_is_exact(seed: int, heads: int, kv_heads: int) -> None:
    scene = Scene(random_lengths(seed), heads, kv_heads, page_size=(1, 16)[seed % 2], seed=seed)
    torch.testing.assert_close(scene.attend().double(), scene.expected(), atol=2e-6, rtol=2e-5)


def test_a_pure_decode_batch_of_unequal_lengths_is_exact() -> None:
    scene = Scene([(cached, 1) for cached in (0, 3, 200, 200, 411)], 8, 4, page_size=1)
    torch.testing.assert_close(scene.attend().double(), scene.expected(), atol=2e-6, rtol=2e-5)


def test_half_precision_stays_within_its_rounding() -> None:
    scene = Scene([(40, 20), (0, 9), (77, 1)], 4, 2, page_size=16, dtype=torch.bfloat16)
    torch.testing.assert_close(scene.attend().double(), scene.expected(), atol=3e-2, rtol=3e-2)


def test_chunks_give_what_one_prefill_gives() -> None:
    whole = Scene([(0, 90)], 4, 2, page_size=1)
    expected = whole.attend()
    rest = Scene([(0, 90)], 4, 2, page_size=1)
    for start, end in ((0, 30), (30, 31), (31, 90)):
        rest.lengths = [(start, end - start)]
        batch, backend = rest.batch(), rest.backend()
        backend.init_forward_metadata(batch)
        part = backend.forward(
            rest.q[start:end].flatten(1), rest.k[start:end], rest.v[start:end], rest.layer, batch
        )
        torch.testing.assert_close(part.view(-1, 4, HEAD_DIM), expected[start:end])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sliding_window_size": 128}, "sliding window"),
        ({"logit_cap": 30.0}, "soft-capping"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "ENCODER_ONLY"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"v_head_dim": 8}, "values of another size"),
    ],
)
def test_a_model_that_needs_more_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    scene = Scene([(0, 2)], 4, 2, page_size=1)
    with pytest.raises(UnsupportedEngineError, match=f"{named}.*torch_native"):
        scene.backend(scene.layer, RadixAttention(4, HEAD_DIM, 1.0, 2, 1, **change))


def test_an_option_of_one_call_that_would_change_the_result_is_refused() -> None:
    scene = Scene([(0, 2)], 4, 2, page_size=1)
    backend, batch = scene.backend(), scene.batch()
    backend.init_forward_metadata(batch)
    with pytest.raises(UnsupportedEngineError, match="sinks"):
        backend.forward(scene.q, scene.k, scene.v, scene.layer, batch, sinks=torch.zeros(4))


def test_decode_rows_are_grouped_by_length_within_the_limit() -> None:
    lengths = [4000, 10, 4000, 20, 4000, 9000]
    table = torch.arange(6 * 9000).view(6, 9000)
    plan = build_plan(table, range(6), lengths, [1] * 6, torch.float32)
    assert [decode.rows.tolist() for decode in plan.decodes] == [[1, 3], [0, 2], [4], [5]]
    assert all(len(d.slots) <= MAX_GROUP_TOKENS or len(d.rows) == 1 for d in plan.decodes)


def test_a_request_with_several_new_tokens_is_a_prefill_over_its_cached_slots() -> None:
    table = torch.arange(100).view(2, 50)
    plan = build_plan(table, [0, 1], [7, 10], [7, 4], torch.float32)
    assert [(p.start, p.end, p.prefix_slots.tolist()) for p in plan.prefills] == [
        (0, 7, []),
        (7, 11, [50, 51, 52, 53, 54, 55]),
    ]
    assert plan.decodes == ()


def test_decodes_are_padded_with_their_own_last_slot_and_masked_beyond_it() -> None:
    table = torch.arange(4 * 50, dtype=torch.int32).view(4, 50)
    plan = build_plan(table, [3, 0, 2], [2, 5, 3], [1, 1, 1], torch.float32)
    [decode] = plan.decodes
    assert decode.rows.tolist() == [0, 2, 1]
    assert decode.slots.view(3, 5).tolist() == [
        [150, 151, 151, 151, 151],
        [100, 101, 102, 102, 102],
        [0, 1, 2, 3, 4],
    ]
    assert decode.mask is not None and decode.mask.shape == (3, 1, 1, 5)
    assert (decode.mask[:, 0, 0] == 0).tolist() == [
        [True] * n + [False] * (5 - n) for n in (2, 3, 5)
    ]
    [even] = build_plan(table, [3, 0], [2, 2], [1, 1], torch.float32).decodes
    assert even.mask is None and even.slots.tolist() == [150, 151, 0, 1]
