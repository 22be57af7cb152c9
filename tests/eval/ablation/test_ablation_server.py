"""The ablation on real servers: one short run, which is then gone on with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import orjson
import pytest

from echo_sgl.config import load_config
from eval.ablation.options import AblationOptions
from eval.ablation.run import Ablation

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def options() -> AblationOptions:
    """Seconds of llm-d's pattern, which needs no data set; few lines, so that some are done."""
    return AblationOptions(
        name="test", workload="llm-d", arms="stock", model="tiny", repetitions=1,
        length_scale=0.0625, job_lines=20, online_load=0.2, duration_s=6, phase_s=2, lead_s=3,
        drain_s=60, ceiling_s=5, calibrate_s=20, calibration_requests=240,
        server_args="--sleep-on-idle",
    )  # fmt: skip


def test_a_run_measures_every_arm_once_and_goes_on_where_it_ended(
    options: AblationOptions, tmp_path: Path
) -> None:
    Ablation(options, "first", results_dir=tmp_path).run()
    folder = tmp_path / "ablation-test"
    before = {path: path.stat().st_mtime_ns for path in (folder / "raw").iterdir()}

    more = {"resume": True, "arms": "bs,bs-e,stock,alone", "repetitions": 2, "rounds": 2}
    resumed = dataclasses.replace(options, servers_up=2, **more)
    second = Ablation(resumed, "second", results_dir=tmp_path)
    second.run()
    assert second.failures == []
    assert before == {path: path.stat().st_mtime_ns for path in before}
    summary = orjson.loads((folder / "summary.json").read_bytes())["arms"]
    assert list(summary) == ["bs", "bs-e", "stock", "alone"]
    alone = summary.pop("alone")
    assert alone["repetitions"] == 2
    assert alone["online_together"]["ok"]["min"] > 0
    assert alone["offline_together"]["requests"]["max"] == 0
    for tree in summary.values():
        assert tree["repetitions"] == 2
        # The deadlines in the lines' bodies are taken by stock servers too.
        assert tree["online_together"]["error"]["max"] == 0
        assert tree["offline_together"]["error"]["max"] == 0
        assert tree["offline_together"]["ok"]["min"] > 0
    promised = [load_config(folder / "configs" / f"bs-{number}.toml").slo for number in (1, 2)]
    assert promised[0] == promised[1], "two rounds on one server"
    assert promised[0].ttft_s > 0 and promised[0].tpot_s > 0
    assert summary["bs"]["retractions"]["median"] is not None
