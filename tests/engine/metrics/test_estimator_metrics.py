"""The estimator on /metrics, in the form of several processes that SGLang uses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from tests.engine.traffic import completion, documents, metric, send_all, wait_until

METRICS_SCRIPT = """
import os, sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from echo_sgl.batch_shape import StepKind
from echo_sgl.engine.metrics.estimator_metrics import EstimatorMetrics
from echo_sgl.estimators.live import LiveBatchTime
from tests.estimators.steps import shape_of, true_model

live, metrics = LiveBatchTime(true_model("bros"), refit_steps=50), EstimatorMetrics()
shape = shape_of([(0, 50)])
for _ in range(3):
    metrics.publish(live, 0.0)
for number in range(40):
    metrics.observe(StepKind.DECODE, 0.011, 0.010)
    metrics.observe(StepKind.MIXED, float("inf"), 0.010)
    live.observe(shape, 0.010 + 1e-5 * (number % 7), 1.0)
for number in range(40):
    live.observe(shape, 0.010 + 1e-5 * (number % 7), 1.0)
for _ in range(2):
    metrics.publish(live, 1.0)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
for number in range(800):  # what is normal is known after 300
    live.observe(shape, 0.010 if number < 400 else 0.030, 1.0 + 0.01 * number)
metrics.publish(live, 5.0)
print("# later", generate_latest(registry).decode())
"""


def test_metrics_show_errors_evidence_and_what_became_of_refits(tmp_path):
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", METRICS_SCRIPT]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    page, _, later = told.partition("# later")
    for series, value in (
        ('predicted_ratio_count{kind="decode"}', "40.0"),
        ('predicted_ratio_bucket{kind="decode",le="1.05"}', "0.0"),
        ('predicted_ratio_bucket{kind="decode",le="1.15"}', "40.0"),
        ('predicted_ratio_count{kind="mixed"}', "0.0"),
        ('drifts_total{kind="decode"}', "0.0"),
        ("refits_total", "0.0"),
        ("refit_refusals_total", "1.0"),
    ):
        assert f"echo_sgl_step_time_{series} {value}\n" in page
    assert 'le="-' not in page  # OpenMetrics: a histogram with a sum has no negative bucket
    [evidence] = [line for line in page.splitlines() if 'evidence{kind="decode"' in line]
    assert evidence.endswith(" 2.0")
    [coverage] = [line for line in page.splitlines() if line.startswith("echo_sgl_step_time_cov")]
    assert 'kind="decode"' in coverage and 0.8 <= float(coverage.split()[-1]) <= 1.0
    [drifts] = [line for line in later.splitlines() if 'drifts_total{kind="decode"}' in line]
    assert float(drifts.split()[-1]) >= 1.0


@pytest.mark.server
def test_a_server_shows_how_many_steps_its_bound_covered(echo_server):
    bodies = [completion(text, 40) for text in documents(6, 60, seed=71)]
    wait_until(
        lambda: (
            {answer.status_code for answer in asyncio.run(send_all(echo_server, bodies))} == {200}
            and metric(echo_server, "echo_sgl_step_time_coverage_ratio", kind="decode") > 0
        ),
        "decodes were held against a bound",
    )
    assert metric(echo_server, "echo_sgl_step_time_coverage_ratio", kind="decode") <= 1.0
