"""Figures out of metrics text."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from echo_sgl.cli.watching.scrape import TaskFigures, parse_figures, quantile
from echo_sgl.types import Task

BOUNDS_S = (0.1, 1.0, 10.0)


@pytest.fixture
def text() -> str:
    """What a server of two ranks shows after some requests."""
    registry = CollectorRegistry()
    labels = ["task", "rank"]
    prompt = Counter("echo_sgl_prompt_tokens", "x", labels, registry=registry)
    cached = Counter("echo_sgl_cached_prompt_tokens", "x", labels, registry=registry)
    requests = Counter("echo_sgl_requests", "x", [*labels, "outcome"], registry=registry)
    pool = Gauge("echo_sgl_pool_requests", "x", labels, registry=registry)
    oldest = Gauge("echo_sgl_pool_oldest_age_seconds", "x", labels, registry=registry)
    ttft = Histogram("echo_sgl_ttft_seconds", "x", labels, buckets=BOUNDS_S, registry=registry)
    Counter("sglang:prompt_tokens", "x", registry=registry).inc(10**6)
    for rank in ("0", "1"):
        prompt.labels("offline", rank).inc(100)
        cached.labels("offline", rank).inc(25 * (1 + int(rank)))
        requests.labels("offline", rank, "finished").inc(3)
        pool.labels("offline", rank).set(7)
        oldest.labels("offline", rank).set(5 + int(rank))
        ttft.labels("offline", rank).observe(0.05)
        ttft.labels("offline", rank).observe(5)
    prompt.labels("online", "0").inc(1)
    return generate_latest(registry).decode()


def test_figures_are_summed_over_ranks_and_kept_apart_by_task(text: str) -> None:
    figures = parse_figures(text)
    offline = figures[Task.OFFLINE]
    assert list(figures) == [Task.ONLINE, Task.OFFLINE]
    assert offline.prompt_tokens == 200
    assert offline.hit_rate == 75 / 200
    assert offline.requests == {"finished": 6}
    assert offline.pool_requests == 14
    assert offline.pool_oldest_age_s == 6
    assert offline.ttft_s == {0.1: 2, 1.0: 2, 10.0: 4, math.inf: 4}
    assert figures[Task.ONLINE].prompt_tokens == 1
    assert math.isnan(TaskFigures().hit_rate)


def test_text_of_a_server_without_echo_holds_no_figures() -> None:
    assert parse_figures("# TYPE sglang:x counter\nsglang:x_total 3\n") == {}


def test_an_interval_holds_what_was_counted_in_it(text: str) -> None:
    offline = parse_figures(text)[Task.OFFLINE]
    prompts = 'echo_sgl_prompt_tokens_total{rank="0",task="offline"}'
    later = parse_figures(text.replace(f"{prompts} 100.0", f"{prompts} 40.0"))
    nothing = offline.since(offline)
    assert nothing.prompt_tokens == 0
    assert set(nothing.ttft_s.values()) == {0}
    assert nothing.pool_requests == 14
    assert offline.since(TaskFigures()) == offline
    restarted = later[Task.OFFLINE]
    assert restarted.prompt_tokens == 140
    assert restarted.since(offline) == restarted


@example(values=[1.0, 1.0, 1.0, 0.0625, 0.0625, 0.0625], share=0.5)  # rounds beyond the bucket
@given(
    values=st.lists(st.floats(0.001, 9.9), min_size=1, max_size=50),
    share=st.floats(0.01, 0.99),
)
def test_a_quantile_lies_in_the_bucket_that_holds_it(values: list[float], share: float) -> None:
    bounds = (*BOUNDS_S, math.inf)
    buckets = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    exact = sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]
    high = min(bound for bound in bounds if exact <= bound)
    low = max((bound for bound in bounds if bound < high), default=0.0)
    assert low <= quantile(buckets, share) <= high


def test_a_quantile_without_observations_is_not_a_number() -> None:
    assert math.isnan(quantile({}, 0.5))
    assert math.isnan(quantile({1.0: 0.0, math.inf: 0.0}, 0.5))


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile({1.0: 0.0, 2.0: 0.0, math.inf: 5.0}, 0.5) == 2.0
