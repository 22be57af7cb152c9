"""The figures on /metrics against what clients saw, and the form that Prometheus asks for."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from echo_sgl.cli.watching.samples import Samples
from echo_sgl.engine.metrics.request_metrics import TTFT_BUCKETS_S, buckets_s, outcome_of
from eval.servers.server import LOCAL
from tests.engine.traffic import FLEX, completion, documents, metric, post, send_all, wait_until

ours = pytest.mark.server
TOKEN_METRICS = {
    "echo_sgl_prompt_tokens_total": lambda usage: usage["prompt_tokens"],
    "echo_sgl_cached_prompt_tokens_total": lambda usage: usage["prompt_tokens_details"][
        "cached_tokens"
    ],
    "echo_sgl_generated_tokens_total": lambda usage: usage["completion_tokens"],
}


@ours
@pytest.mark.parametrize("task", ["online", "offline"])
def test_tokens_and_latencies_add_up_to_what_the_clients_saw(echo_server, task):
    names = [*TOKEN_METRICS, "echo_sgl_ttft_seconds_count", "echo_sgl_tpot_seconds_count"]
    before = {name: metric(echo_server, name, task=task) for name in names}
    extra = FLEX if task == "offline" else {}
    [document] = documents(1, 80, seed=21)
    bodies = [completion(f"{document} {n}", 4 + n, **extra) for n in range(12)]
    usages = [answer.json()["usage"] for answer in asyncio.run(send_all(echo_server, bodies))]
    grown = {name: metric(echo_server, name, task=task) - before[name] for name in names}
    expected = {name: sum(map(read, usages)) for name, read in TOKEN_METRICS.items()}
    expected |= dict.fromkeys(names[-2:], len(bodies))
    assert grown == expected
    assert expected["echo_sgl_cached_prompt_tokens_total"] > 0


@ours
def test_every_series_is_there_before_its_first_event(echo_server):
    page = LOCAL.get(f"{echo_server.url}/metrics").text
    for outcome in ("finished", "cancelled", "expired", "failed"):
        for task in ("online", "offline"):
            series = rf'echo_sgl_requests_total{{outcome="{outcome}",task="{task}"}} \d'
            assert re.search(series, page)


@given(st.floats(0.001, 100.0), st.lists(st.floats(0.5, 1.0), min_size=1, max_size=50))
def test_a_p99_is_not_above_a_promise_that_all_requests_kept(
    promised_s: float, shares: list[float]
) -> None:
    registry = CollectorRegistry()
    bounds_s = buckets_s(TTFT_BUCKETS_S, promised_s)
    assert set(TTFT_BUCKETS_S) < {*bounds_s, 0.0} and list(bounds_s) == sorted(set(bounds_s))
    times = Histogram("echo_sgl_ttft_seconds", "x", buckets=bounds_s, registry=registry)
    for share in shares:
        times.observe(share * promised_s)
    samples = Samples.parse(generate_latest(registry).decode())
    assert samples.quantile("ttft_seconds", 0.99) <= promised_s
    assert buckets_s(TTFT_BUCKETS_S, 0.0) == TTFT_BUCKETS_S


@ours
def test_what_is_promised_is_a_bound_of_the_histograms(tight_server):
    page = LOCAL.get(f"{tight_server.url}/metrics").text
    for name, promised_s in (("ttft", 0.001), ("tpot", 1e-06)):
        assert f'echo_sgl_{name}_seconds_bucket{{le="{promised_s}",task="online"}}' in page


@ours
@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (package prometheus)")
def test_promtool_finds_no_fault_with_our_metrics(echo_server):
    """SGLang's own names hold colons, which promtool rejects: only ours are given to it."""
    page = LOCAL.get(f"{echo_server.url}/metrics").text
    lines = [line for line in page.splitlines() if re.match(r"(# (HELP|TYPE) )?echo_sgl_", line)]
    assert len(lines) > 100
    command = ["promtool", "check", "metrics"]
    text = "\n".join(lines) + "\n"
    result = subprocess.run(command, check=False, input=text, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("finish", "outcome"),
    [
        ({}, "finished"),
        ({"type": "stop"}, "finished"),
        ({"type": "length"}, "finished"),
        ({"type": "abort", "message": "Aborted", "status_code": None}, "cancelled"),
        ({"type": "abort", "message": None}, "cancelled"),
        ({"type": "abort", "message": "too long", "status_code": 400}, "failed"),
        (
            {"type": "abort", "message": "Request waiting timeout reached.", "status_code": 503},
            "expired",
        ),
    ],
)
def test_every_way_to_end_has_one_outcome(finish, outcome):
    assert outcome_of(finish) == outcome


def test_a_request_with_several_choices_is_counted_once_for_each(echo_server):
    """SGLang computes their prompt with a request of its own first."""

    def seen() -> list[float]:
        offline = {"task": "offline"}
        return [
            metric(echo_server, "echo_sgl_requests_total", outcome="finished", **offline),
            metric(echo_server, "echo_sgl_ttft_seconds_count", **offline),
            metric(echo_server, "echo_sgl_generated_tokens_total", **offline),
        ]

    before = seen()
    body = completion("several choices of one prompt", 4, n=3, **FLEX)
    answer = post(echo_server, "/v1/completions", body | {"temperature": 1})
    assert len(answer.json()["choices"]) == 3
    wait_until(lambda: seen()[0] >= before[0] + 3, "it is counted")
    assert [now - then for now, then in zip(seen(), before, strict=True)] == [3, 3, 12]
