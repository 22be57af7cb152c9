"""What an idle server can reach at best: a promise below that is broken by every request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from echo_sgl.batch_shape import BatchShape
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.estimators.host_time import HostTime


class Slo(Protocol):
    """Promised latencies in seconds, 0 for none; see `config.SloConfig`."""

    @property
    def ttft_s(self) -> float: ...
    @property
    def tpot_s(self) -> float: ...
    @property
    def min_ttft_s(self) -> float: ...
    @property
    def min_tpot_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class SloFloor:
    """Time to the first token, and per token after it, of one request alone on the server."""

    prompt_tokens: int
    ttft_s: float
    tpot_s: float


def slo_floor(
    model: StepPredictor,
    *,
    prompt_tokens: int,
    cached_tokens: int = 0,
    chunk_tokens: int = 0,
    host: HostTime | None = None,
) -> SloFloor:
    """The steps of one request alone: its prefill in chunks, then a decode.

    What the model's steps take, and the host between and around them where that is known; queueing
    comes on top, so what is below this floor is out of reach. `chunk_tokens` 0: the prompt is one
    step.

    Units: tokens, seconds. Errors: `ValueError` when the prompt leaves nothing to compute.
    """
    if not 0 <= cached_tokens < prompt_tokens:
        raise ValueError(
            f"prompt of {prompt_tokens} tokens with {cached_tokens} cached; "
            "at least one must be left to compute"
        )
    ttft_s, done = 0.0, cached_tokens
    while done < prompt_tokens:
        new = min(chunk_tokens or prompt_tokens, prompt_tokens - done)
        chunk = BatchShape()
        chunk.add_prefill(new, done)
        ttft_s += model.predict_s(chunk)
        done += new
    decode = BatchShape()
    decode.add_decode(prompt_tokens + 1)
    tpot_s = model.predict_s(decode)
    if host is not None:
        ttft_s, tpot_s = ttft_s + host.intake_s, tpot_s + host.between_s(1)
    return SloFloor(prompt_tokens, ttft_s, tpot_s)


def check_slo(slo: Slo, floor: SloFloor) -> str | None:
    """A sentence about each promise below the floor; None when all can be kept."""
    floors = (("ttft_s", floor.ttft_s), ("tpot_s", floor.tpot_s))
    broken = [
        f"slo.{prefix}{name} promises {promised_s:g} s, but one request of "
        f"{floor.prompt_tokens} tokens alone takes {floor_s:.2g} s"
        for prefix in ("", "min_")
        for name, floor_s in floors
        if 0 < (promised_s := getattr(slo, prefix + name)) < floor_s
    ]
    if not broken:
        return None
    return f"{'; '.join(broken)}. Promise no less than that, or set it to 0 to promise nothing"
