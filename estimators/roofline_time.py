"""OOCO's batch-time model: each operator takes as long as its FLOPs or its bytes need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from echo_sgl.batch_shape import FloatArray, Step
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.samples import fit_nonnegative

GEMM_FLOP, PREFILL_FLOP, DECODE_FLOP, GEMM_BYTE, ATTENTION_BYTE, STEP = range(6)
MAX_FIT_ROWS = 1_000
MAX_FIT_ROUNDS = 20
# A server refits between two steps; the next refit goes on where this one stopped.
MAX_REFIT_ROUNDS = 4
# FLOP per byte: a CPU core has few, an accelerator hundreds.
START_BALANCES = (1.0, 8.0, 64.0, 512.0)


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes of a dense decoder with grouped-query attention and a gated MLP (Llama, Qwen).

    On `n` tensor-parallel ranks give what one rank holds. `head_dim` 0 is `hidden / num_heads`.
    Errors: `ValueError` names the field that is not a positive whole number.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    intermediate: int
    vocab: int
    dtype_bytes: int
    head_dim: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, low = getattr(self, item.name), 0 if item.name == "head_dim" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(
                    f"transformer.{item.name} is {value!r}; it must be a whole number >= {low}"
                )
        if not self.head_dim:
            object.__setattr__(self, "head_dim", max(1, self.hidden // self.num_heads))

    def layer_gemms(self) -> list[tuple[int, int]]:
        """D_in and D_out of one layer's: QKV, output, gate and up, down."""
        query = self.num_heads * self.head_dim
        key_value = 2 * self.num_kv_heads * self.head_dim
        return [
            (self.hidden, query + key_value),
            (query, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        ]


class RooflineBatchTime(BatchTimeModel):
    """Sum over operators of max(FLOPs / achieved FLOP/s, bytes / achieved byte/s), plus overhead.

    The coefficients are seconds per FLOP and per byte (OOCO's 1/F_g, 1/F_ap, 1/F_ad, 1/M_g,
    1/M_a) and the overhead of a step in seconds; 0 for a rate that no sample was limited by.
    FLOPs of prefill attention are the causal half, S_q * (S_kv - S_q / 2). A fit alternates:
    say which limit binds each operator in each sample, solve, until nothing changes. It
    starts from machines of several balances, a refit from what the model says already.

    Source: OOCO 3.3, tables 2-4, without communication; one overhead instead of O_p and O_d,
            which would let a mixed step cost less than its parts.
    Units:  tokens in, seconds out.
    """

    NAME = "roofline"
    COEFFICIENTS = (
        "gemm_flop",
        "prefill_attention_flop",
        "decode_attention_flop",
        "gemm_byte",
        "attention_byte",
        "step",
    )

    def __init__(
        self, transformer: Transformer, *, captured_batch_sizes: Iterable[int] = ()
    ) -> None:
        super().__init__(captured_batch_sizes=captured_batch_sizes)
        self.transformer = transformer
        layers, size = transformer.num_layers, transformer.dtype_bytes
        self._gemms = [_gemm(*one, size, layers) for one in transformer.layer_gemms()]
        self._head = _gemm(transformer.hidden, transformer.vocab, size, 1)
        self._query = layers * transformer.num_heads * transformer.head_dim
        self._query_bytes = 2 * size * self._query
        self._kv_bytes = 2 * size * layers * transformer.num_kv_heads * transformer.head_dim

    def _operators(self, batch: Any, num_decodes: Any) -> list[tuple[Any, Any, int, int]]:
        """Of each operator its FLOPs, bytes, and the coefficients of both."""
        tokens = batch.prefill_tokens + num_decodes
        work = [
            (flops * tokens, row_bytes * tokens + weight_bytes, GEMM_FLOP, GEMM_BYTE)
            for flops, row_bytes, weight_bytes in self._gemms
        ]
        sequences = batch.num_prefills + num_decodes
        flops, row_bytes, weight_bytes = self._head
        head_bytes = row_bytes * sequences + weight_bytes
        work.append((flops * sequences, head_bytes, GEMM_FLOP, GEMM_BYTE))
        context = batch.prefill_tokens + batch.cached_tokens
        prefill_bytes = self._query_bytes * batch.prefill_tokens + self._kv_bytes * context
        prefill_flops = 2 * self._query * batch.prefill_area
        work.append((prefill_flops, prefill_bytes, PREFILL_FLOP, ATTENTION_BYTE))
        decode_bytes = self._query_bytes * num_decodes + self._kv_bytes * batch.decode_tokens
        decode_flops = 4 * self._query * batch.decode_tokens
        work.append((decode_flops, decode_bytes, DECODE_FLOP, ATTENTION_BYTE))
        return work

    def _predict(self, step: Step, num_decodes: int) -> float:
        values = self._values
        total_s = values[STEP]
        for flops, num_bytes, flop, byte in self._operators(step, num_decodes):
            compute_s, memory_s = values[flop] * flops, values[byte] * num_bytes
            total_s += compute_s if compute_s > memory_s else memory_s
        return total_s

    def _predict_columns(self, batch: Any, num_decodes: Any) -> FloatArray:
        values = self._values
        total_s = np.full(len(num_decodes), values[STEP])
        for flops, num_bytes, flop, byte in self._operators(batch, num_decodes):
            total_s += np.maximum(values[flop] * flops, values[byte] * num_bytes)
        return total_s

    def _fit(self, batch: Any, num_decodes: Any, times_s: FloatArray) -> Sequence[float]:
        # The limits are the same in every part of the samples; the search takes an even part.
        part = slice(None, None, -(-len(times_s) // MAX_FIT_ROWS))
        columns = type(batch)._make(column[part] for column in batch)
        work = self._operators(columns, num_decodes[part])
        if self._values:
            start = _limits(work, self._values)
            return _descend(work, times_s[part], start, MAX_REFIT_ROUNDS)[1]
        return min(_descend(work, times_s[part], start, MAX_FIT_ROUNDS) for start in _starts(work))[
            1
        ]


def _gemm(d_in: int, d_out: int, dtype_bytes: int, count: int) -> tuple[int, int, int]:
    """FLOPs and bytes per row, and bytes of the weights (OOCO table 3), of `count` equal ones."""
    flops, row_bytes = 2 * d_in * d_out, dtype_bytes * (d_in + d_out)
    return count * flops, count * row_bytes, count * dtype_bytes * d_in * d_out


def _limits(work: Any, values: Sequence[float]) -> list[Any]:
    """Of each operator, in which samples its FLOPs bind it. Shapes: (steps,) each."""
    return [values[f] * flops > values[b] * num_bytes for flops, num_bytes, f, b in work]


def _starts(work: Any) -> list[list[Any]]:
    """The limits of machines that do more or less FLOPs per byte."""
    return [
        [flops > balance * num_bytes for flops, num_bytes, _, _ in work]
        for balance in START_BALANCES
    ]


def _descend(
    work: Any, times_s: FloatArray, is_compute: list[Any], max_rounds: int
) -> tuple[float, list[float]]:
    """The least mean squared relative error met on the way from these limits.

    Shapes: FLOPs and bytes in `work`, `is_compute` and `times_s` are (steps,).
    """
    best = (np.inf, [0.0] * (STEP + 1))
    for _ in range(max_rounds):
        features = [np.zeros_like(times_s) for _ in range(STEP)] + [np.ones_like(times_s)]
        for (flops, num_bytes, flop, byte), mask in zip(work, is_compute, strict=True):
            features[flop] += np.where(mask, flops, 0.0)
            features[byte] += np.where(mask, 0.0, num_bytes)
        values = fit_nonnegative(features, times_s)
        limits = [(values[f] * flops, values[b] * size) for flops, size, f, b in work]
        predicted_s = values[STEP] + sum(np.maximum(*pair) for pair in limits)
        error = float(np.mean((predicted_s / times_s - 1.0) ** 2))
        best = min(best, (error, values))
        before, is_compute = is_compute, _limits(work, values)
        if all(np.array_equal(*pair) for pair in zip(before, is_compute, strict=True)):
            break
    return best
