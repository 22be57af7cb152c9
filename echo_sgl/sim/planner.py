"""How much hardware keeps the online SLO at the peak, and what offline work it leaves room for.

    trace ---- peak five minutes ----> smallest (device, KV, instances) that keeps the SLO, alone
          ---- the whole of it  -----> offline tokens beside it on that hardware

Source: Echo 5.4, its two steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from echo_sgl.estimators.budget import Target
from echo_sgl.estimators.floor import slo_floor
from echo_sgl.sim.instances import instance_shares, line_share
from echo_sgl.sim.kv_pool import OutOfKvError
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import Progress, SimServer
from echo_sgl.sim.server_config import ServerConfig
from echo_sgl.sim.workload import Trace, empty_trace
from echo_sgl.types import Task

PEAK_S = 300.0
SHORT_OF_KV_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Resource:
    """Instances of one server on one kind of device, each with its own KV pool."""

    kv_tokens: int
    num_instances: int
    device: str


@dataclass(frozen=True, slots=True)
class PeakTrial:
    """The peak on one resource without offline work, on that instance which does worst.

    `load`: value over limit, by target. `instance`: its place in `instance_shares`.
    """

    resource: Resource
    instance: int
    load: dict[str, float]
    values_s: dict[str, float]
    binds: str
    results: SimResults

    @property
    def is_kept(self) -> bool:
        return keeps(self.results, self.load)

    @property
    def distance(self) -> tuple[bool, bool, float]:
        """How far from the SLO it is: what has no room at all comes before what is late."""
        return not self.is_kept, self.results.refused > 0, max(self.load.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """What was tried, and the whole trace on the smallest resource that keeps the SLO.

    `whole`: of the instance that does worst at the peak. `num_too_long`: requests of the whole
    trace, whatever their instance, whose prompts `chosen` has no room for.
    """

    peak_start_s: float
    num_peak_requests: int
    trials: tuple[PeakTrial, ...]
    chosen: Resource | None
    whole: SimResults | None
    whole_load: dict[str, float]
    num_too_long: int
    num_lines: int
    num_share_lines: int

    @property
    def is_kept_beside(self) -> bool:
        """Whether the SLO holds over the whole trace, with offline work beside it."""
        whole = self.whole
        if whole is None or self.num_too_long or whole.is_out_of_kv or whole.online_unfinished:
            return False
        return max(self.whole_load.values()) <= 1.0

    @property
    def binds(self) -> str:
        """Which limit binds on the largest resource that was tried."""
        return self.trials[-1].binds

    @property
    def offline_tokens_per_s(self) -> float:
        """Of all instances, while there were lines to do."""
        if self.whole is None or not self.num_share_lines:
            return 0.0
        # The stretch of the job that is simulated may be a line longer than the others.
        num_shares = self.num_lines / self.num_share_lines
        return offline_tokens_per_s(self.whole, self.num_share_lines) * num_shares

    @property
    def is_all_done(self) -> bool:
        """Whether the offline lines ended before the trace did, but for those that never fit."""
        return self.whole is not None and _is_job_done(self.whole, self.num_share_lines)

    def price_per_million(self, price_per_hour: float) -> float | None:
        """Money per million offline tokens if they paid for the whole hardware."""
        if not self.offline_tokens_per_s or self.chosen is None:
            return None
        tokens_per_hour = self.offline_tokens_per_s * 3600
        return price_per_hour * self.chosen.num_instances / tokens_per_hour * 1e6


def offline_tokens_per_s(results: SimResults, num_lines: int) -> float:
    """Prompt and answer, while there were lines to do; of those under way, what they have."""
    end_s = results.offline_end_s if _is_job_done(results, num_lines) else results.end_s
    num_tokens = results.offline_tokens + results.offline_begun_tokens
    return num_tokens / (end_s - results.start_s) if num_tokens else 0.0


def _is_job_done(results: SimResults, num_lines: int) -> bool:
    """Whether no line is left that could be done."""
    return results.offline_done + results.offline_refused == num_lines


def keeps(results: SimResults, load: Mapping[str, float]) -> bool:
    """Whether a run served all that came, each target within its limit."""
    all_served = not (results.refused or results.unfinished or results.is_out_of_kv)
    return all_served and max(load.values()) <= 1.0


def make_plan(
    devices: Mapping[str, ServerConfig],
    online: Trace,
    offline: Trace,
    targets: Sequence[Target],
    resources: Sequence[Resource],
    *,
    prices: Mapping[str, float] | None = None,
    on_progress: Callable[[str, float], None] = lambda what, share: None,
) -> Plan:
    """Try the resources in order of size until one keeps the SLO at the peak; then run it all.

    The cheapest comes first if there are `prices` (of one instance, by device), else the one
    with the fewest instances; then the least KV. Requests go to the instances by chance
    (`instance_shares`), offline lines as one stretch of the file each. At the peak every instance
    is simulated; then the one that did worst.
    Units: seconds, tokens.
    """
    peak_start_s = busiest_start_s(online)
    peak_end_s = peak_start_s + PEAK_S
    ordered = in_order_of_size(resources, tuple(devices), prices)
    dealt = {num: instance_shares(online, num) for num in {one.num_instances for one in ordered}}
    trials: list[PeakTrial] = []
    for resource in ordered:
        on_progress(f"peak on {describe(resource)}", len(trials) / len(ordered))
        peaks = [one.between(peak_start_s, peak_end_s) for one in dealt[resource.num_instances]]
        trials.append(_try_peak(sized(devices, resource), peaks, targets, resource))
        if trials[-1].is_kept:
            break
    last = trials[-1]
    chosen = last.resource if last.is_kept else None
    whole, load, num_too_long = None, dict[str, float](), 0
    lines = line_share(offline, chosen.num_instances) if chosen else offline
    if chosen is not None:
        config, share = sized(devices, chosen), dealt[chosen.num_instances][last.instance]
        whole = _run_whole(config, share, lines, f"whole trace on {describe(chosen)}", on_progress)
        load = whole.load(targets)
        num_too_long = sum(not config.takes_prompt(tokens) for tokens in online.prompt_tokens)
    return Plan(
        peak_start_s,
        len(online.between(peak_start_s, peak_end_s)),
        tuple(trials),
        chosen,
        whole,
        load,
        num_too_long,
        len(offline),
        len(lines),
    )


def _run_whole(
    config: ServerConfig,
    online: Trace,
    offline: Trace,
    what: str,
    on_progress: Callable[[str, float], None],
) -> SimResults:
    """One instance under all of its requests, the offline work beside them."""
    # Requests that come all at once are a trace of no length: then to the end of the work.
    end_s = online.at_s[-1] if online.duration_s else math.inf
    return run(
        config,
        online,
        offline,
        until_s=end_s,
        finishes_online=True,
        on_progress=lambda now_s: on_progress(what, min(1.0, now_s / end_s)),
    )


def in_order_of_size(
    resources: Sequence[Resource], devices: Sequence[str], prices: Mapping[str, float] | None
) -> list[Resource]:
    """The smallest first. `devices`: as they were named, the smallest first where that decides."""

    def size(one: Resource) -> tuple[float, int, int, int]:
        price = prices[one.device] * one.num_instances if prices else 0.0
        return price, one.num_instances, devices.index(one.device), one.kv_tokens

    return sorted(resources, key=size)


def busiest_start_s(trace: Trace, length_s: float = PEAK_S) -> float:
    """When the seconds with the most tokens begin: with one of the arrivals."""
    best_tokens, best_s, tokens, end = -1, 0.0, 0, 0
    lengths = [a + b for a, b in zip(trace.prompt_tokens, trace.output_tokens, strict=True)]
    for start, at_s in enumerate(trace.at_s):
        while end < len(trace) and trace.at_s[end] < at_s + length_s:
            tokens += lengths[end]
            end += 1
        if tokens > best_tokens:
            best_tokens, best_s = tokens, at_s
        tokens -= lengths[start]
    return best_s


def describe(resource: Resource) -> str:
    many = "instance" if resource.num_instances == 1 else "instances"
    size = f"{resource.kv_tokens:,} KV tokens"
    return f"{resource.num_instances} {many} of {size} on {resource.device}"


def out_of_range(results: SimResults, largest: dict[str, int] | None) -> Iterator[str]:
    """Where simulated steps were larger than any that the profile was measured on."""
    if largest is None:
        yield (
            "the profile does not say which steps it was measured on (it is from before "
            "echo-sgl wrote that); calibrate again to have times outside of them noticed"
        )
        return
    for name, value in results.largest_row._asdict().items():
        if name in largest and value > largest[name]:
            yield (
                f"steps had a {name} of up to {value:,}; the profile was measured on 0 to "
                f"{largest[name]:,}, and beyond that its times are a guess"
            )


def _try_peak(
    config: ServerConfig, peaks: Sequence[Trace], targets: Sequence[Target], resource: Resource
) -> PeakTrial:
    """The peak on each instance to which somebody comes; the one farthest from the SLO."""
    trials = (
        _try_instance(config, peak, targets, resource, instance)
        for instance, peak in enumerate(peaks)
        if len(peak)
    )
    return max(trials, key=lambda trial: trial.distance)


def _try_instance(
    config: ServerConfig,
    peak: Trace,
    targets: Sequence[Target],
    resource: Resource,
    instance: int,
) -> PeakTrial:
    results = run(config, peak, None)
    return PeakTrial(
        resource,
        instance,
        results.load(targets),
        {one.name: results.statistic_s(one.metric, one.statistic) for one in targets},
        binding_limit(config, peak, results, targets),
        results,
    )


def binding_limit(
    config: ServerConfig, trace: Trace, results: SimResults, targets: Sequence[Target]
) -> str:
    """What keeps a resource from keeping the SLO, in words; "nothing" if it is kept."""
    broken = [name for name, load in results.load(targets).items() if load > 1.0]
    if keeps(results, results.load(targets)):
        return "nothing"
    if results.refused:
        return (
            f"KV memory: {results.refused} prompts do not fit in a pool of "
            f"{config.kv_tokens:,} tokens"
        )
    if results.is_out_of_kv or results.unfinished:
        return f"KV memory: requests for which a pool of {config.kv_tokens:,} tokens has no room"
    # What the cache held need not be computed, however slow the device.
    computed_share = 1 - results.online_cached_tokens / max(1, results.online_prompt_tokens)
    for target in (one for one in targets if one.name in broken):
        new_tokens = max(1, round(_prompt_tokens(trace, target.statistic) * computed_share))
        if (least_s := _alone_s(config, new_tokens, target.metric)) > target.limit_s:
            return (
                f"the device: a request of {new_tokens} new tokens alone has a {target.metric} "
                f"of {least_s:.3g} s, above the {target.limit_s:g} s of {target.name}"
            )
    if results.num_memory_waits > SHORT_OF_KV_SHARE * results.num_steps:
        return (
            f"KV memory: at {results.num_memory_waits / results.num_steps:.0%} of the steps a "
            f"request waited for room in a pool of {config.kv_tokens:,} tokens"
        )
    if results.largest_row.num_decodes >= config.max_running_requests:
        return f"max_running_requests: {config.max_running_requests} requests decoded at once"
    busy = results.busy_s / results.duration_s if results.duration_s else 0.0
    return (
        f"computing time: steps ran {busy:.0%} of the time, up to {results.longest_queue} "
        f"requests waited; broken are {', '.join(broken)}"
    )


def _prompt_tokens(trace: Trace, statistic: str) -> float:
    """The same statistic of the prompts: who waits for nobody is as late as its prompt is long."""
    if statistic == "mean":
        return statistics.fmean(trace.prompt_tokens)
    share = float(statistic[1:])
    return float(np.percentile(np.asarray(trace.prompt_tokens), share, method="lower"))


def _alone_s(config: ServerConfig, prompt_tokens: int, metric: str) -> float:
    floor = slo_floor(
        config.device,
        prompt_tokens=prompt_tokens,
        chunk_tokens=config.chunked_prefill_tokens,
        host=config.host,
    )
    return floor.ttft_s if metric == "ttft" else floor.tpot_s


def sized(devices: Mapping[str, ServerConfig], resource: Resource) -> ServerConfig:
    """The config of one instance of a resource."""
    return replace(devices[resource.device], kv_tokens=resource.kv_tokens)


def run(
    config: ServerConfig,
    online: Trace,
    offline: Trace | None,
    *,
    until_s: float = math.inf,
    finishes_online: bool = False,
    on_progress: Progress | None = None,
) -> SimResults:
    """Simulate; a pool that is too small for what SGLang lets in ends the run where it is."""
    server = SimServer(config, online, offline or empty_trace(Task.OFFLINE))
    try:
        server.run(until_s=until_s, finishes_online=finishes_online, on_progress=on_progress)
    except OutOfKvError:
        server.results.is_out_of_kv = True
    return server.results
