"""Attainment and offline work against the online load: the same trace, quicker and slower."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from echo_sgl.sim.instances import instance_shares, line_share
from echo_sgl.sim.planner import busiest_start_s, offline_tokens_per_s, run
from echo_sgl.sim.server_config import ServerConfig
from echo_sgl.sim.workload import Trace

SWEEP_S = 1800.0
# So many times what a first token may take, the last requests are waited for.
DRAIN_PROMISES = 10.0


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What hardware does at `load` times the trace's rate.

    `attainment`: share of the online requests that kept both promises; those that were refused or
    not answered broke them. `offline_tokens_per_s`: of all instances, while there were lines to
    do, prompt and answer.
    """

    load: float
    attainment: float
    offline_tokens_per_s: float


def sweep(
    config: ServerConfig,
    online: Trace,
    offline: Trace,
    loads: Sequence[float],
    *,
    num_instances: int = 1,
    instance: int = 0,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Iterator[LoadPoint]:
    """Simulate one instance's busiest `SWEEP_S` seconds at each load, offline work beside it.

    `config` is one instance's and names the promises; `instance`: which of `instance_shares`.
    Units: seconds, tokens.
    """
    mine = instance_shares(online, num_instances)[instance]
    start_s = busiest_start_s(mine, SWEEP_S)
    busiest = mine.between(start_s, start_s + SWEEP_S)
    lines = line_share(offline, num_instances)
    num_shares = len(offline) / max(1, len(lines))
    for number, load in enumerate(loads):
        on_progress(number / len(loads))
        share = at_load(busiest, load)
        end_s = share.at_s[-1] + DRAIN_PROMISES * config.echo.slo.ttft_s
        results = run(config, share, lines, until_s=end_s)
        sold = offline_tokens_per_s(results, len(lines)) * num_shares
        yield LoadPoint(load, results.online_kept / len(share), sold)


def at_load(trace: Trace, load: float) -> Trace:
    """The same requests, coming `load` times as fast from time 0 on."""
    first_s = trace.at_s[0]
    return replace(trace, at_s=array("d", ((at_s - first_s) / load for at_s in trace.at_s)))
