"""The KV cache on /metrics: what was evicted, what that cost, and what the reserve holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echo_sgl.engine.metrics.counters import CounterTotals
from echo_sgl.policies.cache.eviction_order import Worth
from echo_sgl.types import Task

if TYPE_CHECKING:
    from echo_sgl.engine.cache.kv_limits import KvLimits
    from echo_sgl.engine.cache.tree_core import EchoTreeCore

RECOMPUTED_BUCKETS = (0, *(2**power for power in range(4, 18)))


class CacheMetrics:
    """Reported by the leading rank of each replica, from counts that the engine keeps anyway."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, text: str) -> Any:
            return Gauge(name, text, ["task"], multiprocess_mode="livesum")

        evicted = Counter(
            "echo_sgl_evicted_tokens",
            "Cached tokens evicted, by class of their last user and what they were worth.",
            ["task", "worth"],
        )
        worths = [worth.name.lower() for worth in Worth]
        self._evicted = {
            (task, worth): evicted.labels(task, worth) for task in Task for worth in worths
        }
        self._punished = Counter(
            "echo_sgl_punished_tokens",
            "Tokens computed again because they were evicted while requests waited for them.",
            ["task"],
        ).labels(Task.OFFLINE)
        self._held_back = Counter(
            "echo_sgl_held_back",
            "Times that a request was not started because the burst reserve forbade it.",
            ["task"],
        ).labels(Task.OFFLINE)
        self._reserve_hits = Counter(
            "echo_sgl_reserve_hits",
            "Online requests that started on room which the reserve had kept.",
            ["task"],
        ).labels(Task.ONLINE)
        self._recomputed = Histogram(
            "echo_sgl_recomputed_tokens",
            "Tokens that an offline request computed more than once, one value per request.",
            ["task"],
            buckets=RECOMPUTED_BUCKETS,
        ).labels(Task.OFFLINE)
        cached = gauge(
            "echo_sgl_cached_tokens", "Tokens in the cache and its host tier by last user."
        )
        self._cached = {task: cached.labels(task) for task in Task}
        active = gauge("echo_sgl_active_kv_tokens", "KV tokens that running requests hold.")
        self._active = {task: active.labels(task) for task in Task}
        self._limit = gauge(
            "echo_sgl_kv_limit_tokens", "KV that offline requests may hold active."
        ).labels(Task.OFFLINE)
        self._reserve = gauge(
            "echo_sgl_reserve_tokens", "KV kept free for growth of online use beyond the present."
        ).labels(Task.ONLINE)
        self._protected = gauge(
            "echo_sgl_protected_tokens", "Cached tokens in the protected online working set."
        ).labels(Task.ONLINE)
        self._totals = CounterTotals()
        self._ended: list[int] = []

    def note_end(self, recomputed_tokens: int) -> None:
        """An offline request ended; it counts from the next `count_ends` on."""
        self._ended.append(recomputed_tokens)

    def count_ends(self) -> None:
        """Several together cost little more than one does in the middle of a step."""
        for recomputed_tokens in self._ended:
            self._recomputed.observe(recomputed_tokens)
        self._ended.clear()

    def publish(self, core: EchoTreeCore | None, limits: KvLimits) -> None:
        """Refresh all series; once a second."""
        self._totals.bring(self._held_back, limits.num_held_back)
        self._totals.bring(self._reserve_hits, limits.num_reserve_hits)
        self._active[Task.ONLINE].set(limits.online_tokens)
        self._active[Task.OFFLINE].set(limits.offline_tokens)
        self._limit.set(limits.offline_limit_tokens)
        self._reserve.set(limits.reserve_tokens)
        if core is None:
            return
        for kind, num_tokens in core.counts.evicted_tokens.items():
            self._totals.bring(self._evicted[kind], num_tokens)
        self._totals.bring(self._punished, core.counts.punished_tokens)
        self._protected.set(core.working_set.num_tokens)
        for task, gauge in self._cached.items():
            gauge.set(core.counts.cached_tokens[task])
