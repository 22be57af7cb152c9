"""What the batch service shows on /metrics, in the form of several processes that SGLang uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# A process of its own: prometheus_client decides at its import whether it writes files.
SCRIPT = """
import asyncio, json, sys
from pathlib import Path
from prometheus_client import CollectorRegistry, multiprocess
from tests.batches.client import job, running_stub, until

def page():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in registry.collect() for sample in family.samples
    }

async def main(state_dir):
    pages = {}
    async with running_stub(state_dir, with_metrics=True, window_lines=8, delay_s=0.2) as stub:
        pages["idle"] = page()
        first = await stub.create(job([f"prompt {n}" for n in range(60)] + ["bad one", "bad two"]))
        async def runs():
            pages["running"] = page()
            return pages["running"]["echo_sgl_batch_lines_in_flight"] > 0
        await until(runs)
        later = await stub.create(job(["later"] * 300))
        await stub.client.post(f"/batches/{later.id}/pause", cast_to=object)
        async def is_paused():
            pages["paused"] = page()
            return pages["paused"]["echo_sgl_open_batchespaused"] == 1
        await until(is_paused)
        await stub.ended(first.id)
        async def is_quiet():
            pages["quiet"] = page()
            in_flight = pages["quiet"]["echo_sgl_batch_lines_in_flight"]
            return in_flight + pages["quiet"]["echo_sgl_open_batchesin_progress"] == 0
        await until(is_quiet)
    print(json.dumps(pages))

asyncio.run(main(Path(sys.argv[1])))
"""


def test_metrics_follow_batches_from_their_start_to_their_end(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "state")]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, env=env, timeout=100
    )
    assert result.returncode == 0, result.stderr
    pages = json.loads(result.stdout)
    assert set(pages["idle"].values()) == {0.0}
    assert 0 < pages["running"]["echo_sgl_batch_lines_in_flight"] <= 8
    assert 0 < pages["running"]["echo_sgl_batch_waiting_lines"] <= 62
    quiet = pages["quiet"]
    assert quiet["echo_sgl_batch_lines_totalanswered"] == 60
    assert quiet["echo_sgl_batch_lines_totalfailed"] == 2
    assert quiet["echo_sgl_open_batchespaused"] == 1


WAITING_SCRIPT = """
import json
from types import SimpleNamespace
from prometheus_client import REGISTRY
from echo_sgl.batches.dispatch.metrics import SHOWN_STATUSES, JobMetrics

statuses = ("validating", "in_progress", "finalizing", "cancelling")
lines = {"total": 5, "completed": 1, "failed": 1}
rows = [SimpleNamespace(status=status, paused_at_s=9.0, **lines) for status in statuses]
rows += [
    SimpleNamespace(status=status, paused_at_s=None, tenant=tenant, **lines)
    for tenant in ("full", "other") for status in ("in_progress", "finalizing")
]
JobMetrics().show_batches(rows, {"full"})
name = "echo_sgl_open_batches"
print(json.dumps({s: REGISTRY.get_sample_value(name, {"status": s}) for s in SHOWN_STATUSES}))
"""


def test_a_batch_that_waits_counts_as_waiting_until_it_ends() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WAITING_SCRIPT], check=True, capture_output=True, text=True
    )
    assert json.loads(result.stdout) == {
        "validating": 0,
        "in_progress": 1,
        "finalizing": 3,
        "cancelling": 1,
        "paused": 2,
        "storage_full": 1,
    }
