"""An attention backend for CPUs that computes new tokens only, on torch's flash kernel.

SGLang 0.5.23's own `torch_native` backend recomputes the queries of the whole cached prefix,
so that a prefix hit hardly pays.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from echo_sgl.cpu.plan import AttentionPlan, DecodePlan, PrefillPlan, build_plan
from echo_sgl.errors import UnsupportedEngineError

# The kernel behind torch's scaled_dot_product_attention on CPU. Called directly because it
# also returns the log-sum-exp of the scores, with which partial results can be merged.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class EchoCpuAttention(AttentionBackend):
    """Attention of new tokens against the KV pool of SGLang, for plain causal layers.

    Errors: `UnsupportedEngineError` at start-up for a model that needs more than that.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _refuse_unsupported(model_runner)
        self._req_to_token = model_runner.req_to_token_pool.req_to_token
        self._kv_pool = model_runner.token_to_kv_pool
        self._dtype = model_runner.dtype
        self._plan = AttentionPlan((), ())
        self._scratch: dict[str, torch.Tensor] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the pass. On a CPU all tensors of the batch are host memory: nothing waits."""
        seq_lens = forward_batch.seq_lens.tolist()
        new_tokens = [1] * len(seq_lens)
        if not forward_batch.forward_mode.is_decode_or_idle():
            new_tokens = forward_batch.extend_seq_lens.tolist()
        requests = forward_batch.req_pool_indices.tolist()
        self._plan = build_plan(self._req_to_token, requests, seq_lens, new_tokens, self._dtype)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Attend the batch's new tokens; prefill, decode and mixed batches alike.

        Shapes: q [tokens, heads * dim], k and v [tokens, kv_heads, dim]; returns q's shape.
        Side effect: writes k and v to the KV pool.
        """
        _refuse_options(options)
        if save_kv_cache:
            self._kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = torch.empty_like(queries)
        for prefill in self._plan.prefills:
            rows = slice(prefill.start, prefill.end)
            output[rows] = self._prefill(prefill, queries[rows], k[rows], v[rows], layer)
        for decode in self._plan.decodes:
            output[decode.rows] = self._decode(decode, queries[decode.rows], layer)
        return output.view(q.shape)

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return False

    def _prefill(
        self,
        plan: PrefillPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
    ) -> torch.Tensor:
        """One request's new tokens, [tokens, heads, dim]: among themselves, then the prefix."""
        grouped = q.unflatten(1, (layer.tp_k_head_num, -1)).permute(1, 2, 0, 3)
        output, lse = _flash(
            grouped,
            _per_head(k, grouped),
            _per_head(v, grouped),
            is_causal=True,
            scale=layer.scaling,
        )
        if len(plan.prefix_slots):
            prefix_k, prefix_v = self._gather(plan.prefix_slots, layer)
            prefix, prefix_lse = _flash(
                grouped,
                _per_head(prefix_k, grouped),
                _per_head(prefix_v, grouped),
                scale=layer.scaling,
            )
            # Each part is normalised by its own sum: weigh them by their share of the total.
            share = torch.sigmoid(prefix_lse - lse).unsqueeze(-1).to(output.dtype)
            output = torch.lerp(output, prefix, share)
        return output.permute(2, 0, 1, 3).flatten(1, 2)

    def _decode(self, plan: DecodePlan, q: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        """One new token of each request, [requests, heads, dim], against all of its keys."""
        # The heads that share a KV head stand where the kernel expects query positions.
        grouped = q.unflatten(1, (layer.tp_k_head_num, -1))
        k, v = (
            part.unflatten(0, (len(q), -1)).transpose(1, 2)
            for part in self._gather(plan.slots, layer)
        )
        mask = plan.mask
        if mask is not None:
            mask = mask.expand(-1, *grouped.shape[1:3], -1)
        output, _ = _flash(grouped, k, v, attn_mask=mask, scale=layer.scaling)
        return output.flatten(1, 2)

    def _gather(
        self, slots: torch.Tensor, layer: RadixAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the keys and values of these slots together; valid until the next call."""
        keys = self._kv_pool.get_key_buffer(layer.layer_id)
        values = self._kv_pool.get_value_buffer(layer.layer_id)
        return self._select("k", keys, slots), self._select("v", values, slots)

    def _select(self, name: str, buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        # Reused memory: a fresh block of this size costs more in page faults than the copy.
        scratch = self._scratch.get(name)
        if scratch is None or len(scratch) < len(slots) or scratch.shape[1:] != buffer.shape[1:]:
            scratch = buffer.new_empty((len(slots), *buffer.shape[1:]))
            self._scratch[name] = scratch
        return torch.index_select(buffer, 0, slots, out=scratch[: len(slots)])


def create_attention_backend(model_runner: Any) -> EchoCpuAttention:
    """Factory for SGLang's registry of attention backends."""
    return EchoCpuAttention(model_runner)


def _per_head(kv: torch.Tensor, grouped: torch.Tensor) -> torch.Tensor:
    """View [tokens, kv_heads, dim] as [kv_heads, heads per kv head, tokens, dim]: no copy."""
    return kv.transpose(0, 1).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1)


def _refuse_unsupported(model_runner: Any) -> None:
    """Stop before the first request would get a wrong answer."""
    found = [
        reason
        for layer in model_runner.model.modules()
        if isinstance(layer, RadixAttention)
        for reason in _unsupported_in_layer(layer)
    ]
    if isinstance(model_runner.token_to_kv_pool, SWAKVPool):
        found.append("a KV pool with a sliding window")
    if model_runner.token_to_kv_pool.dtype != model_runner.dtype:
        found.append(f"a KV cache of {model_runner.token_to_kv_pool.dtype}")
    if found:
        reasons = ", ".join(dict.fromkeys(found))
        raise UnsupportedEngineError(
            f"the attention backend echo_cpu does not support what this model needs: {reasons}. "
            "It serves causal attention with one head size, KV cache in the model's type. "
            "Try --attention-backend torch_native."
        )


def _unsupported_in_layer(layer: RadixAttention) -> list[str]:
    wanted = {
        "a sliding window": layer.sliding_window_size > -1,
        "cross attention": layer.is_cross_attention,
        f"attention of type {layer.attn_type}": layer.attn_type != AttentionType.DECODER,
        "logit soft-capping": bool(layer.logit_cap),
        "temperature scaling by length": layer.xai_temperature_len > 0,
        "values of another size than keys": layer.v_head_dim != layer.qk_head_dim,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _refuse_options(options: dict[str, Any]) -> None:
    """Options of one call (attention sinks, split rotary keys, ...) change the result."""
    if given := [name for name, value in options.items() if value is not None]:
        raise UnsupportedEngineError(
            f"the attention backend echo_cpu does not support {', '.join(given)}. "
            "Try --attention-backend torch_native."
        )
