"""The simulated server: its size, SGLang's settings, and the model of its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from echo_sgl.batch_shape import StepKind
from echo_sgl.config import EchoConfig, parse_config
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.host_time import HostTime

NO_HOST_TIME = HostTime(0.0, 0.0, 0.0)
# Of the pool, what SGLang keeps back from a prompt: `max_req_input_len` in its tp_worker.py.
PROMPT_MARGIN_TOKENS = 6


class SpeedChange(NamedTuple):
    """From `at_s` on, steps of each kind take so many times as long as the device's model says.

    1 where a kind is not named. Units: seconds on the traces' clock.
    """

    at_s: float
    factors: Mapping[StepKind, float]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What is simulated.

    `device` tells how long a step takes; Echo's own estimator starts from the same model and is
    kept true by the simulated steps. `host` comes on top of each step and of each request,
    as it was measured with the profile. `noise` is the standard deviation of a step's time as a
    share of it, drawn from `seed`. `step_factors`: how many times longer steps of a kind take
    than `device` says, in order of time; the estimator has to find out. The rest are SGLang's
    settings of the same name.

    Errors: `ConfigError` names the value that leaves no server.
    """

    device: BatchTimeModel
    kv_tokens: int
    echo: EchoConfig
    page_tokens: int = 1
    max_running_requests: int = 256
    chunked_prefill_tokens: int = 8192
    max_prefill_tokens: int = 16384
    enable_mixed_chunk: bool = False
    overlap: bool = True
    schedule_conservativeness: float = 1.0
    host: HostTime = NO_HOST_TIME
    noise: float = 0.0
    step_factors: Sequence[SpeedChange] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "page_tokens", "max_running_requests", "chunked_prefill_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}; a server needs at least 1")
        if self.page_tokens > min(self.kv_tokens, self.chunked_prefill_tokens):
            raise ConfigError(
                f"page_tokens is {self.page_tokens}; allowed is up to kv_tokens "
                f"({self.kv_tokens}) and chunked_prefill_tokens ({self.chunked_prefill_tokens})"
            )
        for change in self.step_factors:
            if wrong := {kind: value for kind, value in change.factors.items() if not value > 0}:
                raise ConfigError(f"step_factors are {wrong}; a step takes a time above 0")
        if not 0 <= self.noise < 1:
            raise ConfigError(f"noise is {self.noise}; allowed is a share of 0 to 1")

    @property
    def capacity_tokens(self) -> int:
        """The pool in whole pages."""
        return self.kv_tokens // self.page_tokens * self.page_tokens

    def takes_prompt(self, prompt_tokens: int) -> bool:
        """Whether a prompt fits an idle server; what its answer may be does not count.

        Source: SGLang's `validate_input_length`.
        """
        fits = prompt_tokens < self.capacity_tokens - PROMPT_MARGIN_TOKENS
        return fits and self.most_output_tokens(prompt_tokens) > 0

    def most_output_tokens(self, prompt_tokens: int) -> int:
        """What a longer limit of an answer is cut to behind such a prompt.

        Source: SGLang's `init_req_max_new_tokens`, and the page that admission wants beyond.
        """
        return self.capacity_tokens - self.page_tokens - prompt_tokens - 1


def default_echo() -> EchoConfig:
    """The config of a server that was told nothing."""
    return parse_config({})
