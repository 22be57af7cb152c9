"""Online patterns and their jobs on a simulated server, for evaluations that need many of them."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo_sgl.batch_shape import StepKind
from echo_sgl.config import EchoConfig, SloConfig, load_config
from echo_sgl.estimators.profile import load_profile
from echo_sgl.sim.server_config import NO_HOST_TIME, ServerConfig, SpeedChange
from echo_sgl.types import Task
from eval.ablation.load import build_mix
from eval.ablation.options import AblationOptions
from eval.cache.arms import Sections
from eval.fidelity.replay import Prompts, bodies_of, noise_of, replay
from eval.figures.slo import parse_factors
from eval.load.records import Record
from eval.paths import CONFIGS_DIR, PROFILES_DIR
from eval.servers.models import demo_model
from eval.workloads.prompts import load_tokenizer

LEAD_S, DRAIN_S = 5.0, 20.0
NO_PROMISE = SloConfig()
# Steps scatter in another way than when the promises were measured.
PROMISE_SEED, SEED = 0, 1


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedServer:
    """Steps as in a profile of `echo-sgl calibrate`; `sizes`: what `AblationOptions` has."""

    profile: Path
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overlap: bool = False  # as our platform starts CPU servers


CPU_SERVER = SimulatedServer(PROFILES_DIR / "base-cpu.json")


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """An online load: where it starts in its trace (s), its size, its rate over the asked one."""

    workload: str
    seed: int = 0
    start_s: float = 0.0
    rate_factor: float = 1.0
    length_scale: float = 0.25
    max_prompt_tokens: int = 1000

    def __str__(self) -> str:
        return (
            f"{self.workload} (seed {self.seed}, from {self.start_s:g} s, {self.rate_factor:g} x "
            f"the rate, prompts up to {self.max_prompt_tokens:,} tokens)"
        )


class CopiedPrompts(Prompts):
    """Prompts of lines that come several times, as texts that share nothing with each other."""

    def copy(self, line_id: str, number: int) -> str:
        """The id of a line's copy, whose first token no other has; number 0: the line's own."""
        if not number:
            return line_id
        copy_id = f"copy-{number}/{line_id}"
        if copy_id not in self._ids:
            ids = array("q", self.ids(_sent(line_id, Task.OFFLINE, 0.0)))
            ids[0] = -number
            self._ids[copy_id], self._bodies[copy_id] = ids, self._bodies[line_id]
        return copy_id


class Load:
    """An online pattern and its job on a simulated server, with what is promised beside it.

    The job's lines come again, as other texts, until they would keep the server busy for the
    whole time were it alone with them: what is done of a job that runs dry says nothing.
    """

    def __init__(
        self,
        rate_rps: float,
        pattern: Pattern,
        *,
        duration_s: float,
        server: SimulatedServer = CPU_SERVER,
    ) -> None:
        ablation = AblationOptions(
            workload=pattern.workload,
            seed=pattern.seed,
            trace_start_s=pattern.start_s,
            length_scale=pattern.length_scale,
            max_prompt_tokens=pattern.max_prompt_tokens,
            online_rps=rate_rps * pattern.rate_factor,
            duration_s=duration_s,
            **server.sizes,
        )
        tokenizer = load_tokenizer(str(demo_model("tiny")))  # all sizes have it
        mix = build_mix(ablation, tokenizer, ablation.online_rps / ablation.online_load)
        self._prompts = CopiedPrompts(bodies_of(mix), tokenizer)
        self._profile = load_profile(server.profile, device="", model="", force=True)
        self._ablation, self._overlap = ablation, server.overlap
        self.online = [
            _sent(f"online-{place}", Task.ONLINE, LEAD_S + arrival.at_s)
            for place, arrival in enumerate(mix.arrivals)
        ]
        self._line_ids = [line["custom_id"] for line in mix.job[: ablation.window]]

    def run(
        self,
        echo: EchoConfig,
        records: Sequence[Record],
        *,
        slowness: float = 1.0,
        seed: int = SEED,
    ) -> list[Record]:
        """The same requests as the simulated server answers them."""
        options = self._ablation
        config = ServerConfig(
            device=self._profile.estimator,
            kv_tokens=options.pool_tokens,
            echo=echo,
            max_running_requests=options.max_running_requests,
            chunked_prefill_tokens=options.chunked_prefill_size,
            overlap=self._overlap,
            host=self._profile.host or NO_HOST_TIME,
            noise=noise_of(self._profile),
            step_factors=[SpeedChange(0.0, dict.fromkeys(StepKind, slowness))],
            seed=seed,
        )
        end_s = LEAD_S + options.duration_s + DRAIN_S
        return replay(config, records, self._prompts, end_s=end_s)[0]

    @functools.cached_property
    def offline(self) -> list[Record]:
        """All lines are there from the beginning."""
        num_copies = 1
        while self._runs_dry(lines := self._copies(num_copies)):
            num_copies *= 2
        return lines

    def _copies(self, count: int) -> list[Record]:
        ids = (self._prompts.copy(one, number) for number in range(count) for one in self._line_ids)
        return [_sent(one, Task.OFFLINE, 0.0) for one in ids]

    def _runs_dry(self, lines: Sequence[Record]) -> bool:
        """Whether a server without online requests is through before these would end."""
        end_s = LEAD_S + self._ablation.duration_s
        done = self.run(unpromised_echo(), lines)
        return all((one.end_s or end_s) < end_s for one in done)

    @functools.cached_property
    def alone_p99_s(self) -> tuple[float, float]:
        """TTFT and TPOT of the online requests without a job and without promises."""
        ttft_s, tpot_s = latencies(self.run(unpromised_echo(), self.online, seed=PROMISE_SEED))
        return float(np.percentile(ttft_s, 99)), float(np.percentile(tpot_s, 99))

    def promise(self, slo_factor: str) -> SloConfig:
        """So many times the p99 of the online requests alone."""
        factors, p99_s = parse_factors(slo_factor), self.alone_p99_s
        return SloConfig(ttft_s=factors[0] * p99_s[0], tpot_s=factors[1] * p99_s[1])


def unpromised_echo() -> EchoConfig:
    """The preset `echo`, which promises nothing."""
    return with_slo(load_config(CONFIGS_DIR / "echo.toml"), NO_PROMISE)


def with_sections(echo: EchoConfig, sections: Sections) -> EchoConfig:
    """The preset with these changes, section by section."""
    changed = {
        name: dataclasses.replace(getattr(echo, name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(echo, **changed)


def with_slo(echo: EchoConfig, slo: SloConfig) -> EchoConfig:
    """The preset with these promises; "auto" is slack, with promises."""
    is_auto = slo.ttft_s and echo.steps.limit == "relative"
    limit = "slack" if is_auto else echo.steps.limit
    return with_sections(dataclasses.replace(echo, slo=slo), {"steps": {"limit": limit}})


def _sent(rid: str, task: Task, at_s: float) -> Record:
    return Record(rid, task, at_s, sent_s=at_s)


def latencies(online: Sequence[Record]) -> tuple[Any, Any]:
    """TTFT and TPOT of each request; infinite for what was not answered. Shapes: (n,)."""
    ttft_s, tpot_s = [], []
    for one in online:
        first_s, last_s = one.first_token_s, one.last_token_s
        if first_s is None or last_s is None:
            first_s, last_s = np.inf, np.inf
        ttft_s.append(first_s - one.scheduled_s)
        gaps_s = last_s - first_s if np.isfinite(last_s) else np.inf
        tpot_s.append(gaps_s / max(1, one.completion_tokens - 1))
    return np.array(ttft_s), np.array(tpot_s)
