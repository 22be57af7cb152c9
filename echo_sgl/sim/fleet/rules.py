"""OOCO's decisions that a fleet takes beside its mix of decodes: pure functions of a batch.

Source: OOCO 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo_sgl.batch_shape import BatchRow
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.estimators.roofline_time import RooflineBatchTime

# A strict instance pulls while its step takes less than this share of the limit.
PULL_SHARE = 0.95


def decode_row(num_decodes: int, decode_tokens: int) -> BatchRow:
    """A step that decodes; the roofline asks for sums only."""
    longest = decode_tokens if num_decodes == 1 else 0
    return BatchRow(0, 0, 0, 0, num_decodes, decode_tokens, longest)


def prefill_row(lengths: Sequence[int]) -> BatchRow:
    """A step that prefills whole prompts of these lengths."""
    area = sum(length * length for length in lengths)
    return BatchRow(len(lengths), sum(lengths), 0, area, 0, 0, 0, max(lengths, default=0))


def saturated_batch_size(device: RooflineBatchTime) -> int:
    """The smallest number of decodes at which the layers' GEMMs are bound by compute.

    A GEMM of N rows takes 2 N Din Dout FLOPs and d (N (Din + Dout) + Din Dout) bytes; below the
    number each further row is free. Source: OOCO 3.3.3 and table 3; summed over a layer.
    """
    assert device.coefficients_ is not None
    flop_s, byte_s = device.coefficients_["gemm_flop"], device.coefficients_["gemm_byte"]
    gemms, size = device.transformer.layer_gemms(), device.transformer.dtype_bytes
    weights = sum(d_in * d_out for d_in, d_out in gemms)
    per_row_s = flop_s * 2 * weights - byte_s * size * sum(map(sum, gemms))
    return max(1, round(byte_s * size * weights / per_row_s)) if per_row_s > 0 else 1 << 30


def length_preference(
    predictor: StepPredictor,
    num_decodes: int,
    decode_tokens: int,
    *,
    limit_s: float,
    free_tokens: int,
    saturated: int,
) -> int | None:
    """How long the offline requests should be that a strict instance pulls; None: pull none.

    Saturated, a further request makes no step more efficient: the longest that time and memory
    allow. Otherwise enough requests to saturate the step, each as long as time allows; 0, the
    shortest there are, when that cannot be reached. Source: OOCO algorithm 1.
    """
    if predictor.predict_s(decode_row(num_decodes, decode_tokens)) >= PULL_SHARE * limit_s:
        return None
    missing = max(1, saturated - num_decodes)

    def fits(length: int) -> bool:
        row = decode_row(num_decodes + missing, decode_tokens + missing * length)
        return missing * length <= free_tokens and predictor.predict_s(row) <= limit_s

    fitting, too_long = 0, free_tokens + 1
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        fitting, too_long = (middle, too_long) if fits(middle) else (fitting, middle)
    if not fitting and num_decodes >= saturated:
        return None
    return fitting


def eviction_choice(
    lengths: Sequence[tuple[int, str]], needed_tokens: int, *, is_compute_bound: bool
) -> list[str] | None:
    """The ids of offline requests whose `lengths` free enough; None when all do not.

    Bound by compute, the fewest and longest: the batch stays large. Bound by memory, the
    shortest: little is computed again. Source: OOCO 3.4.1.
    """
    chosen: list[str] = []
    for length, rid in sorted(lengths, reverse=is_compute_bound):
        if needed_tokens <= 0:
            break
        chosen.append(rid)
        needed_tokens -= length
    return chosen if needed_tokens <= 0 else None


def decode_cap(predictor: StepPredictor, typical_tokens: int, limit_s: float) -> int:
    """The most requests of that context that decode within a limit; at least 1."""
    cap, too_many = 1, 2
    while predictor.predict_s(decode_row(too_many, too_many * typical_tokens)) <= limit_s:
        cap, too_many = too_many, 2 * too_many
    while too_many - cap > 1:
        middle = (cap + too_many) // 2
        if predictor.predict_s(decode_row(middle, middle * typical_tokens)) <= limit_s:
            cap = middle
        else:
            too_many = middle
    return cap
