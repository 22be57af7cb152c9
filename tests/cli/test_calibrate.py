"""`echo-sgl calibrate`: the grid and the fit alone, and the whole way on a real server."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from echo_sgl.batch_shape import BatchRow, BatchShape, StepKind, rows_of
from echo_sgl.cli.calibration import DECODE_TOKENS, fit_all, grid
from echo_sgl.estimators.profile import load_profile
from eval.server import Server
from tests.cli.conftest import StartCli
from tests.cli.jobs import run_cli

SERVER: dict[str, Any] = {
    "device": "some device",
    "model": "some model",
    "sglang_version": "0.5.23",
    "max_total_tokens": 3000,
    "max_context_tokens": 2048,
    "max_running_requests": 16,
    "chunked_prefill_tokens": 256,
    "vocab": 500,
    "transformer": None,
}


def test_every_wave_of_the_grid_fits_the_server():
    waves = list(itertools.islice(grid(SERVER, random.Random(0)), 400))
    for wave in waves:
        assert wave.num_tokens <= SERVER["max_total_tokens"]
        assert len(wave.requests) <= SERVER["max_running_requests"]
        for cached, new, generated in wave.requests:
            assert cached >= 0 and new >= 1 and 1 <= generated <= DECODE_TOKENS
            assert cached + new + generated <= SERVER["max_context_tokens"]
    assert any(cached for wave in waves for cached, _, _ in wave.requests)
    assert {len(wave.requests) for wave in waves} >= {1, 2, 4, 8, 16}
    assert max(wave.requests[0][1] for wave in waves) > SERVER["chunked_prefill_tokens"]


def linear_steps(count: int) -> tuple[Any, Any]:
    """Steps of a machine that HyGen's linear model describes, with 1 % of noise."""
    draw = random.Random(1)
    steps, times_s = [], []
    for number in range(count):
        shape = BatchShape()
        if number % 2:
            shape.add_prefill(draw.randint(1, 2000), draw.randint(0, 2000))
        for _ in range(draw.randint(1, 16) if number % 3 else 1 - number % 2):
            shape.add_decode(draw.randint(1, 2000))
        row = shape.row()
        time_s = 0.002 + 2e-5 * row.prefill_tokens + 1e-6 * row.decode_tokens
        steps.append(row)
        times_s.append((time_s + 5e-4 * row.num_decodes) * draw.uniform(0.99, 1.01))
    return rows_of(steps), np.array(times_s)


def test_the_model_that_describes_the_machine_is_found():
    calibration = fit_all(linear_steps(600), SERVER, seed=0)
    assert set(calibration.models) == {"pooled", "linear", "bros"}  # no sizes, no roofline
    best = calibration.errors[calibration.best]
    assert set(best) == set(StepKind)
    assert all(error.mape < 0.03 for error in best.values())
    profile = calibration.profile()
    assert (profile.device, profile.num_samples) == ("some device", 600)
    assert calibration.profile("bros").estimator.NAME == "bros"


def test_samples_without_decodes_are_refused_by_the_column():
    rows, times_s = linear_steps(600)
    only_prefill = rows[:, BatchRow._fields.index("num_decodes")] == 0
    with pytest.raises(ValueError, match="num_decodes"):
        fit_all((rows[only_prefill], times_s[only_prefill]), SERVER, seed=0)


@pytest.mark.server
def test_a_real_server_is_measured_and_its_profile_loads(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    result = run_cli("calibrate", "--url", server.url, "--output", output, "--seconds", 15)
    assert result.returncode == 0, result.stderr
    for name in ("pooled", "linear", "bros", "roofline", "(best)", "MAPE"):
        assert name in result.stdout
    state = httpx.get(f"{server.url}/echo/steps", timeout=60).json()["replicas"][0]["server"]
    profile = load_profile(output, device=state["device"], model=state["model"])
    assert profile.num_samples > 50
    assert {StepKind.PREFILL, StepKind.DECODE} <= set(profile.errors)
    shape = BatchShape()
    shape.add_decode(100)
    assert 0 < profile.estimator.predict_s(shape) < 10


@pytest.mark.server
def test_a_busy_server_is_refused_and_left_alone(
    server: Server, cli: StartCli, tmp_path: Path
) -> None:
    body = {"text": "busy", "sampling_params": {"max_new_tokens": 15_000, "ignore_eos": True}}
    with httpx.stream("POST", f"{server.url}/generate", json=body | {"stream": True}) as reply:
        chunks = reply.iter_raw()  # kept: the connection closes with its iterator
        assert next(chunks)
        result = run_cli("calibrate", "--url", server.url, "--output", tmp_path / "none.json")
    assert result.returncode == 2
    assert "busy: 1 requests run and 0 wait" in result.stderr
    assert not (tmp_path / "none.json").exists()
    deadline_s = time.monotonic() + 60
    while httpx.get(f"{server.url}/echo/steps").json()["replicas"][0]["num_running"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_an_unknown_model_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = run_cli("calibrate", "--output", tmp_path / "p.json", "--model", "crystal")
    assert result.returncode == 2
    assert "--model is 'crystal'; known are pooled, linear, bros, roofline" in result.stderr
