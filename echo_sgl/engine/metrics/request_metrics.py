"""Per-class metrics on the server's own /metrics page.

Requests are counted in the tokenizer manager, the one process that sees each of them once
however many ranks there are; the pool is reported by the leading rank of each replica.
prometheus_client must not be imported before SGLang has named its multiprocess folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echo_sgl.engine.metrics.cache_metrics import CacheMetrics
from echo_sgl.engine.metrics.step_metrics import StepMetrics
from echo_sgl.engine.pool.offline_pool import OfflinePool
from echo_sgl.engine.requests.tasks import task_of_input
from echo_sgl.engine.settings import active_config
from echo_sgl.types import Task

if TYPE_CHECKING:
    from echo_sgl.config import SloConfig
    from echo_sgl.engine.cache.kv_limits import KvLimits
    from echo_sgl.engine.cache.tree_core import EchoTreeCore
    from echo_sgl.engine.steps.step_control import StepControl

# Powers of two with one step between; offline requests may wait for hours.
TTFT_BUCKETS_S = tuple(0.01 * 2 ** (step / 2) for step in range(40))
TPOT_BUCKETS_S = tuple(0.002 * 2 ** (step / 2) for step in range(24))
OUTCOMES = ("finished", "cancelled", "expired", "failed")
POOL_PUBLISH_INTERVAL_S = 1.0
# As steps are learned from: several together cost little more than one.
STEPS_PUBLISH_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What users of each class got: counted in the tokenizer manager."""

    prompt_tokens: Any
    cached_prompt_tokens: Any
    generated_tokens: Any
    requests: Any
    ttft_s: Any
    tpot_s: Any

    @classmethod
    def create(cls, slo: SloConfig) -> RequestMetrics:
        """Errors: those of prometheus_client, where they were made before in this process."""
        from prometheus_client import Counter, Histogram

        by_task = ["task"]
        metrics = cls(
            prompt_tokens=Counter(
                "echo_sgl_prompt_tokens", "Prompt tokens of finished requests.", by_task
            ),
            cached_prompt_tokens=Counter(
                "echo_sgl_cached_prompt_tokens",
                "Prompt tokens of finished requests that were found in the KV cache.",
                by_task,
            ),
            generated_tokens=Counter(
                "echo_sgl_generated_tokens", "Tokens generated for finished requests.", by_task
            ),
            requests=Counter(
                "echo_sgl_requests", "Requests that ended, by outcome.", ["task", "outcome"]
            ),
            ttft_s=Histogram(
                "echo_sgl_ttft_seconds",
                "Time from a request's arrival to its first token.",
                by_task,
                buckets=buckets_s(TTFT_BUCKETS_S, slo.ttft_s),
            ),
            tpot_s=Histogram(
                "echo_sgl_tpot_seconds",
                "Mean time per output token after the first, one value per request.",
                by_task,
                buckets=buckets_s(TPOT_BUCKETS_S, slo.tpot_s),
            ),
        )
        metrics._show_zeros()
        return metrics

    def _show_zeros(self) -> None:
        """Make every series exist before its first event, so that rates start at zero."""
        for task in Task:
            for metric in (
                self.prompt_tokens,
                self.cached_prompt_tokens,
                self.generated_tokens,
                self.ttft_s,
                self.tpot_s,
            ):
                metric.labels(task)
            for outcome in OUTCOMES:
                self.requests.labels(task, outcome)


def buckets_s(bounds_s: tuple[float, ...], promised_s: float) -> tuple[float, ...]:
    """The bounds with a promise (s; 0: none) as one of them.

    Steps are as long as promises allow, so most times lie just below one: within a bucket a
    quantile is a guess, and beyond the promise it would be a false alarm.
    """
    return tuple(sorted({*bounds_s, promised_s} - {0.0}))


class SchedulerMetrics:
    """What only the scheduler sees: the pool, retractions and parked prefills."""

    def __init__(self) -> None:
        from prometheus_client import Gauge

        self._pool_requests = Gauge(
            "echo_sgl_pool_requests",
            "Requests that wait in the offline pool.",
            ["task"],
            multiprocess_mode="livesum",
        ).labels(Task.OFFLINE)
        self._pool_oldest_age_s = Gauge(
            "echo_sgl_pool_oldest_age_seconds",
            "How long the first in line of the offline pool has waited.",
            ["task"],
            multiprocess_mode="livemax",
        ).labels(Task.OFFLINE)
        self._cache = CacheMetrics()
        self._steps = StepMetrics()
        self._next_publish_s = self._next_steps_s = 0.0
        self._was_busy = False

    @staticmethod
    def create(*, enabled: bool) -> SchedulerMetrics:
        return SchedulerMetrics() if enabled else _NoSchedulerMetrics()

    def note_offline_end(self, recomputed_tokens: int) -> None:
        self._cache.note_end(recomputed_tokens)

    def publish(
        self,
        pool: OfflinePool,
        core: EchoTreeCore | None,
        limits: KvLimits,
        control: StepControl,
        now_s: float,
    ) -> None:
        """About every `ADVANCE_EVERY_S`; steps and ends are counted in now and then, gauges once
        a second.

        And at once when nothing waits or runs any more: an idle scheduler may sleep, so what
        stands there last must be right.
        """
        is_busy = len(pool) > 0 or limits.active_tokens > 0
        # Work that came and went between two refreshes counts, too.
        has_settled = self._was_busy and not is_busy
        self._was_busy = is_busy
        counts = now_s >= self._next_steps_s or has_settled
        if counts:
            self._next_steps_s = now_s + STEPS_PUBLISH_INTERVAL_S
            self._steps.observe(control)
            self._cache.count_ends()
        # Not both in one step, as long as it need not be.
        waits_s = STEPS_PUBLISH_INTERVAL_S if counts else 0.0
        if now_s < self._next_publish_s + waits_s and not has_settled:
            return
        self._next_publish_s = now_s + POOL_PUBLISH_INTERVAL_S
        self._pool_requests.set(len(pool))
        self._pool_oldest_age_s.set(pool.oldest_age_s(now_s))
        self._cache.publish(core, limits)
        self._steps.publish(control, now_s)


class _NoSchedulerMetrics(SchedulerMetrics):
    """For ranks that do not report and servers without --enable-metrics."""

    def __init__(self) -> None:
        pass

    def note_offline_end(self, recomputed_tokens: int) -> None:
        pass

    def publish(
        self,
        pool: OfflinePool,
        core: EchoTreeCore | None,
        limits: KvLimits,
        control: StepControl,
        now_s: float,
    ) -> None:
        pass


def create_request_metrics(result: Any, manager: Any) -> None:
    """After the tokenizer manager made its own collector: make ours beside it."""
    slo = active_config().slo
    manager.echo_metrics = RequestMetrics.create(slo) if manager.enable_metrics else None


def observe_output(result: Any, manager: Any, state: Any, recv_obj: Any, i: int) -> None:
    """After SGLang counted an output: count the first token and the end of a request."""
    metrics: RequestMetrics = manager.echo_metrics
    task = task_of_input(state.obj)
    finish = recv_obj.finished_reasons[i] or {}
    params = getattr(state.obj, "sampling_params", None)
    asked = params.get("max_new_tokens") if isinstance(params, dict) else 0
    if finish.get("length") == 0 and asked != 0:
        return  # SGLang's own, which computes the prompt of several choices first
    if state.ttft_observed and not getattr(state, "echo_ttft_observed", False):
        state.echo_ttft_observed = True
        metrics.ttft_s.labels(task).observe(state.time_stats.get_first_token_latency())
    if not state.finished:
        return
    outcome = outcome_of(finish)
    metrics.requests.labels(task, outcome).inc()
    metrics.prompt_tokens.labels(task).inc(recv_obj.prompt_tokens[i])
    metrics.cached_prompt_tokens.labels(task).inc(recv_obj.cached_tokens[i])
    completion_tokens = getattr(recv_obj, "completion_tokens", None)
    num_generated = completion_tokens[i] if completion_tokens else 0
    metrics.generated_tokens.labels(task).inc(num_generated)
    tpot_s = state.time_stats.get_time_per_output_token(num_generated)
    if outcome == "finished" and tpot_s is not None:
        metrics.tpot_s.labels(task).observe(tpot_s)


def observe_queued_abort(manager: Any, recv_obj: Any) -> None:
    """Before SGLang ends a request that never ran, or stopped between two chunks: count it."""
    state = manager.rid_to_state.get(recv_obj.rid)
    if manager.echo_metrics is None or state is None:
        return
    finish = dict(recv_obj.finished_reason or {})
    finish.setdefault("message", recv_obj.abort_message)
    outcome = outcome_of({"type": "abort", **finish})
    manager.echo_metrics.requests.labels(task_of_input(state.obj), outcome).inc()


def outcome_of(finish: dict[str, Any]) -> str:
    """Map SGLang's finish reason to finished, cancelled, expired or failed."""
    if finish.get("type") != "abort":
        return "finished"
    if "timeout reached" in (finish.get("message") or ""):
        return "expired"
    return "cancelled" if finish.get("status_code") is None else "failed"
