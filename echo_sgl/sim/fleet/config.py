"""A simulated fleet: how many instances of which kind, what connects them, and its rules."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo_sgl.errors import ConfigError
from echo_sgl.estimators.roofline_time import RooflineBatchTime


@dataclass(frozen=True, slots=True)
class FleetRules:
    """What a fleet does for its online requests.

    `online_first`: they go ahead of offline ones wherever they meet, and take their memory.
    `caps_decodes`: a fixed number of requests decodes at once; offline ones beyond it sit out.
    `interrupts`: an online arrival stops an offline step after the layer that it computes.
    `keeps_interrupted`: it goes on there later, instead of from the start.
    `splits_by_latency`: OOCO's pools. Offline requests decode where they were prefilled, are
    pulled by latency-strict instances, and join a step there only while it stays within limit.
    """

    online_first: bool = False
    caps_decodes: bool = False
    interrupts: bool = False
    keeps_interrupted: bool = False
    splits_by_latency: bool = False


# Source: OOCO 5.1.4. `online-priority` is what it builds from HyGen's and Echo's rules; to go on
# where a layer ended, `ooco-resume`, is what it names for later (3.4.1).
RULES = {
    "base-pd": FleetRules(),
    "online-priority": FleetRules(online_first=True, caps_decodes=True),
    "ooco": FleetRules(online_first=True, interrupts=True, splits_by_latency=True),
    "ooco-resume": FleetRules(
        online_first=True, interrupts=True, keeps_interrupted=True, splits_by_latency=True
    ),
}


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """What is simulated.

    `num_relaxed` instances prefill (and decode offline requests under OOCO's rules), `num_strict`
    decode. A step on a strict instance may take `step_share` of `tpot_s`: what a request waits
    between its prefill and its first decode step counts for its TPOT, too. `typical_tokens`, the
    context of a request on the average, gives `caps_decodes` its number.

    Errors: `ConfigError` names the value that leaves no fleet.
    """

    device: RooflineBatchTime
    kv_tokens: int
    rules: FleetRules
    ttft_s: float
    tpot_s: float
    typical_tokens: int = 1024
    num_relaxed: int = 1
    num_strict: int = 1
    step_share: float = 0.85
    max_prefill_tokens: int = 8192
    transfer_bytes_per_s: float = 25e9
    transfer_latency_s: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "kv_tokens",
            "num_relaxed",
            "num_strict",
            "max_prefill_tokens",
            "typical_tokens",
        ):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}; a fleet needs at least 1")
        for name in ("ttft_s", "tpot_s", "step_share", "transfer_bytes_per_s"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")
        if not (math.isfinite(self.transfer_latency_s) and self.transfer_latency_s >= 0):
            raise ConfigError(f"transfer_latency_s is {self.transfer_latency_s}; allowed is 0 s up")

    @property
    def step_limit_s(self) -> float:
        return self.step_share * self.tpot_s

    @property
    def kv_bytes_per_token(self) -> int:
        sizes = self.device.transformer
        return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * sizes.dtype_bytes

    def transfer_s(self, num_tokens: int) -> float:
        """How long the KV of so many tokens is on its way, whatever else travels."""
        num_bytes = num_tokens * self.kv_bytes_per_token
        return self.transfer_latency_s + num_bytes / self.transfer_bytes_per_s
