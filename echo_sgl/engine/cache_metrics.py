"""The KV cache on /metrics: what was evicted, what that cost, and what the reserve holds."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from echo_sgl.policies.eviction_order import Worth
from echo_sgl.types import Task

if TYPE_CHECKING:
    from echo_sgl.engine.kv_limits import KvLimits
    from echo_sgl.engine.tree_core import EchoTreeCore

RECOMPUTED_BUCKETS = (0, *(2**power for power in range(4, 18)))


class CacheMetrics:
    """Reported by the leading rank of each replica, from counts that the engine keeps anyway."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, text: str) -> Any:
            return Gauge(name, text, ["task"], multiprocess_mode="livesum")

        self._evicted = Counter(
            "echo_sgl_evicted_tokens",
            "Cached tokens evicted, by class of their last user and what they were worth.",
            ["task", "worth"],
        )
        self._punished = Counter(
            "echo_sgl_punished_tokens",
            "Tokens computed again because they were evicted while requests waited for them.",
            ["task"],
        )
        self._held_back = Counter(
            "echo_sgl_held_back",
            "Times that a request was not started because the burst reserve forbade it.",
            ["task"],
        )
        self._reserve_hits = Counter(
            "echo_sgl_reserve_hits",
            "Online requests that started on room which the reserve had kept.",
            ["task"],
        )
        self._recomputed = Histogram(
            "echo_sgl_recomputed_tokens",
            "Tokens that an offline request computed more than once, one value per request.",
            ["task"],
            buckets=RECOMPUTED_BUCKETS,
        )
        self._cached = gauge("echo_sgl_cached_tokens", "Tokens in the cache by last user.")
        self._active = gauge("echo_sgl_active_kv_tokens", "KV tokens that running requests hold.")
        self._limit = gauge("echo_sgl_kv_limit_tokens", "KV that offline requests may hold active.")
        self._reserve = gauge(
            "echo_sgl_reserve_tokens", "KV kept free for growth of online use beyond the present."
        )
        self._protected = gauge(
            "echo_sgl_protected_tokens", "Cached tokens in the protected online working set."
        )
        self._seen: defaultdict[Any, int] = defaultdict(int)
        self._show_zeros()

    def observe_end(self, recomputed_tokens: int) -> None:
        """An offline request ended."""
        self._recomputed.labels(Task.OFFLINE).observe(recomputed_tokens)

    def publish(self, core: EchoTreeCore | None, limits: KvLimits) -> None:
        """Refresh all series; a few times a second."""
        self._add(self._held_back.labels(Task.OFFLINE), limits.num_held_back)
        self._add(self._reserve_hits.labels(Task.ONLINE), limits.num_reserve_hits)
        self._active.labels(Task.ONLINE).set(limits.online_tokens)
        self._active.labels(Task.OFFLINE).set(limits.offline_tokens)
        self._limit.labels(Task.OFFLINE).set(limits.offline_limit_tokens)
        self._reserve.labels(Task.ONLINE).set(limits.reserve_tokens)
        if core is None:
            return
        for (task, worth), num_tokens in core.counts.evicted_tokens.items():
            self._add(self._evicted.labels(task, worth), num_tokens)
        self._add(self._punished.labels(Task.OFFLINE), core.counts.punished_tokens)
        self._protected.labels(Task.ONLINE).set(core.working_set.num_tokens)
        for task in Task:
            self._cached.labels(task).set(core.counts.cached_tokens[task])

    def _add(self, counter: Any, total: int) -> None:
        """Bring a counter to a total that the engine counts itself."""
        counter.inc(total - self._seen[counter])
        self._seen[counter] = total

    def _show_zeros(self) -> None:
        for worth in Worth:
            for task in Task:
                self._evicted.labels(task, worth.name.lower())
        for metric in (self._punished, self._held_back, self._recomputed):
            metric.labels(Task.OFFLINE)
        self._reserve_hits.labels(Task.ONLINE)
