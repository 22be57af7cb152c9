"""`echo-sgl calibrate`: the grid and the fit alone, and the whole way on a real server."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from echo_sgl.batch_shape import BatchRow, BatchShape, StepKind, rows_of
from echo_sgl.cli.tuning.calibrate import host_line
from echo_sgl.cli.tuning.calibration import Driver, decode_period_s, fit_all, host_gaps
from echo_sgl.cli.tuning.calibration_grid import AT_ONCE_DECODE_TOKENS, MOST_AT_ONCE, Wave, grid
from echo_sgl.cli.watching.steps import StepsError
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.estimators.host_time import HostTime
from echo_sgl.estimators.profile import Profile, load_profile, save_profile
from eval.servers.server import LOCAL, Server
from tests.cli.conftest import StartCli
from tests.cli.jobs import run_cli
from tests.servers import ServerPool

FORGETS = '"POST /echo/forget-traffic HTTP/1.1" 200'
SERVER: dict[str, Any] = {
    "device": "some device",
    "model": "some model",
    "num_ranks": 1,
    "weights": "bfloat16",
    "sglang_version": "0.5.23",
    "max_total_tokens": 3000,
    "max_context_tokens": 2048,
    "max_running_requests": 16,
    "chunked_prefill_tokens": 256,
    "vocab": 500,
    "transformer": None,
    "captured_batch_sizes": [],
}

IDLE: dict[str, Any] = {
    "server": SERVER,
    "num_running": 0,
    "num_waiting": 0,
    "num_offline": 0,
    "num_started": 0,
    "num_steps": 1,
    "rows": [[0.0] * (len(BatchRow._fields) + 1)],
}


@pytest.mark.parametrize(
    ("context", "pool"), [(2048, 100_000), (1024, 3000), (40_000, 4000), (2048, 600)]
)
@pytest.mark.parametrize("places", [1, 64, 2048])
def test_chunks_larger_than_a_request_may_be_are_not_filled(context, pool, places):
    """SGLang sets the chunk by the device's memory, whatever the model's context."""
    limits = {"max_context_tokens": context, "max_total_tokens": pool}
    limits["max_running_requests"] = places
    server = SERVER | limits | {"chunked_prefill_tokens": 8192}
    for wave in itertools.islice(grid(server, random.Random(0)), 400):
        assert wave.num_tokens <= pool
        for cached, new, generated in wave.requests:
            assert wave.shared_tokens + cached + new + generated <= context


def test_every_wave_of_the_grid_fits_the_server():
    waves = list(itertools.islice(grid(SERVER, random.Random(0)), 400))
    contexts = []
    for wave in waves:
        assert wave.num_tokens <= SERVER["max_total_tokens"]
        assert len(wave.requests) <= SERVER["max_running_requests"]
        for cached, new, generated in wave.requests:
            assert cached >= 0 and new >= 1 and 1 <= generated <= AT_ONCE_DECODE_TOKENS
            context = wave.shared_tokens + cached + new + generated
            assert context <= SERVER["max_context_tokens"]
            contexts.append((len(wave.requests), context))
    assert any(cached for wave in waves for cached, _, _ in wave.requests)
    assert {len(wave.requests) for wave in waves} >= {1, 2, 4, 8, 16}
    assert max(wave.requests[0][1] for wave in waves) > SERVER["chunked_prefill_tokens"]
    # Full batches of contexts that would not fit the pool without their shared prefix.
    assert max(batch * context for batch, context in contexts) > 4 * SERVER["max_total_tokens"]


@pytest.mark.parametrize(
    ("places", "pool", "largest"),
    [(16, 200_000, 16), (300, 200_000, 300), (4096, 200_000, MOST_AT_ONCE), (4096, 20_000, 125)],
)
def test_batches_grow_to_the_servers_places_as_far_as_the_pool_holds_them(
    places: int, pool: int, largest: int
) -> None:
    server = SERVER | {"max_running_requests": places, "max_total_tokens": pool}
    waves = list(itertools.islice(grid(server, random.Random(0)), 400))
    assert max(len(wave.requests) for wave in waves) == largest
    large = [len(wave.requests) for wave in waves if wave.is_large and len(wave.requests) > 1]
    assert large == [size for size in (128, 256, 512) if size < largest] + [largest] * (places > 64)


@pytest.mark.parametrize(
    ("context", "pool", "longest"),
    [(40_000, 200_000, 39_983), (40_000, 4000, 3484), (1024, 200_000, 1007)],
)
def test_prompts_grow_to_what_context_and_pool_allow_each_length_once(
    context: int, pool: int, longest: int
) -> None:
    server = SERVER | {"max_context_tokens": context, "max_total_tokens": pool}
    waves = list(itertools.islice(grid(server, random.Random(0)), 400))
    large = [wave.requests[0][1] for wave in waves if wave.is_large]
    assert large == sorted(set(large)) and all(2 * a >= b for a, b in itertools.pairwise(large))
    assert longest == (large[-1] if large else 4 * SERVER["chunked_prefill_tokens"] - 17)


def test_a_slow_server_is_spared_the_larger_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes 10 ms here: a large wave must not take a tenth of the time and be followed."""
    now_s, sent = [0.0], list[Wave]()

    def send(driver: Driver, wave: Wave) -> None:
        sent.append(wave)
        now_s[0] += 0.01 * wave.num_tokens

    monkeypatch.setattr("echo_sgl.cli.tuning.calibration.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("echo_sgl.cli.tuning.calibration.fetch_steps", lambda *args: [IDLE])
    monkeypatch.setattr(Driver, "_send", send)
    for seconds, num_large in ((60.0, 1), (100_000.0, 6)):
        server = SERVER | {"max_context_tokens": 40_000, "max_total_tokens": 200_000}
        driver, now_s[0] = Driver("http://127.0.0.1:9", None, random.Random(0)), 0.0
        driver.server = server
        driver._drive(seconds, on_wave=lambda share: None)
        assert sum(wave.is_large for wave in sent) == num_large and now_s[0] >= seconds
        sent.clear()


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
    model = create_batch_time("bros").fit(*linear_steps(600))
    save_profile(Profile("a device", "a model", "0.5.23", "2026-01-31", 600, {}, model), output)
    num_before = server.log().count(FORGETS)
    result = run_cli("calibrate", "--url", server.url, "--output", output, "--seconds", 15)
    assert result.returncode == 0, result.stderr
    assert "it replaces bros of 2026-01-31 for a model, a device" in result.stderr
    assert "requests of others" not in result.stderr
    for name in ("pooled", "linear", "bros", "roofline", "(best)", "MAPE"):
        assert name in result.stdout
    state = LOCAL.get(f"{server.url}/echo/steps", timeout=60).json()["replicas"][0]["server"]
    profile = load_profile(output, device=state["device"], model=state["model"])
    assert profile.num_samples > 50
    assert {StepKind.PREFILL, StepKind.DECODE} <= set(profile.errors)
    shape = BatchShape()
    shape.add_decode(100)
    assert 0 < profile.estimator.predict_s(shape) < 10
    assert server.log().count(FORGETS) == num_before + 1  # its waves were no traffic


@pytest.mark.server
def test_requests_of_others_that_come_meanwhile_are_counted(server: Server) -> None:
    sent: list[httpx.Response] = []

    def somebody_comes(share: float) -> None:
        body = {"text": "somebody else", "sampling_params": {"max_new_tokens": 2}}
        sent.append(LOCAL.post(f"{server.url}/generate", json=body, timeout=60))

    driver = Driver(server.url, None, random.Random(0))
    driver.measure(1.0, on_wave=somebody_comes)
    assert driver.num_others == len(sent) > 0
    LOCAL.get(f"{server.url}/health_generate", timeout=60).raise_for_status()
    driver.measure(1.0, on_wave=lambda share: None)
    assert driver.num_others == 0


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
    assert "busy: 1 requests run and 0 wait, 0 of them offline" in result.stderr
    assert not (tmp_path / "none.json").exists()
    deadline_s = time.monotonic() + 60
    while LOCAL.get(f"{server.url}/echo/steps").json()["replicas"][0]["num_running"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def note(start_s: float, time_s: float | None, prefills: int, decodes: int) -> dict[str, Any]:
    times: dict[str, Any] = {"start_s": start_s, "time_s": time_s}
    return times | {"num_prefills": prefills, "num_decodes": decodes}


def test_only_steps_that_another_one_waited_for_tell_the_hosts_time() -> None:
    notes = [
        note(0.0, 0.010, 2, 0),
        note(0.013, 0.005, 0, 2),
        note(5.0, 0.010, 1, 0),  # nobody was there before it
        note(5.5, None, 0, 1),  # the step before it is measured, its own time is not
        note(6.0, 0.001, 0, 1),
    ]
    assert host_gaps(notes) == [(2, pytest.approx(0.003)), (1, pytest.approx(0.49))]


def test_the_period_of_a_decode_is_told_by_steps_that_follow_one_another() -> None:
    steps = [(0.0, 1, 9), (0.02, 0, 0), (0.05, 0, 0), (0.07, 1, 9), (0.10, 0, 0), (0.13, 0, 0)]
    steps += [(0.15, 1, 9), (0.2, 0, 0), (0.9, 0, 0)]  # what comes after the last one is another's
    notes = [
        {**note(start_s, 0.01, prefills, 1 - prefills), "prefill_tokens": tokens}
        for start_s, prefills, tokens in steps
    ]
    assert decode_period_s(notes, 9) == pytest.approx(0.03)
    assert decode_period_s(notes, 8) == 0.0


def test_the_hosts_time_is_that_of_the_probes_whatever_the_grid_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = [(0.0, 1, 9), (0.02, 0, 0), (0.05, 0, 0), (0.07, 1, 9), (0.10, 0, 0), (0.15, 1, 9)]
    probes = [(-1.0, 1, 8), *beside]
    # Decodes of a whole batch later, until another prompt of nine tokens.
    grid_steps = [(1.0, 0, 0), (1.9, 0, 0), (2.8, 0, 0), (3.7, 1, 9)]
    hosts = []
    for steps in (probes, probes + grid_steps):
        answers = [probes, steps]
        monkeypatch.setattr(
            "echo_sgl.cli.tuning.calibration.fetch_replicas",
            lambda *args, answers=answers, **options: [replica_of(answers.pop(0))],
        )
        monkeypatch.setattr("echo_sgl.cli.tuning.calibration.fetch_steps", lambda *args: [IDLE])
        monkeypatch.setattr(Driver, "_generate", lambda *args: time.sleep(0.002))
        driver = Driver("http://127.0.0.1:9", None, random.Random(0))
        driver.measure(0.001, on_wave=lambda share: None)
        host = driver.host_time()
        assert host is not None
        hosts.append(host)
    assert hosts[1].busy_intake_s == pytest.approx(hosts[0].busy_intake_s, abs=0.01)


def test_a_server_that_turns_the_grid_away_is_not_calibrated(monkeypatch) -> None:
    """With 200, as SGLang begins to answer before it knows; its steps would be those of others."""
    reason = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    chunk = {"text": "", "meta_info": {"completion_tokens": 0, "finish_reason": reason}}
    full = httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
    monkeypatch.setattr("echo_sgl.cli.tuning.calibration.fetch_steps", lambda *args: [IDLE])
    driver = Driver("http://127.0.0.1:9", None, random.Random(0))
    driver._client = httpx.Client(
        transport=httpx.MockTransport(lambda request: full), base_url="http://server"
    )
    with pytest.raises(StepsError, match=r"queue is full.*503.*without --max-queued-requests"):
        driver.measure(0.001, on_wave=lambda share: None)


def replica_of(steps: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    """What `/echo/trace` answers."""
    notes = [
        {**note(start_s, 0.01, prefills, 1 - prefills), "prefill_tokens": tokens}
        for start_s, prefills, tokens in steps
    ]
    return {"columns": list(notes[0]), "rows": [list(one.values()) for one in notes]}


def test_the_hosts_time_is_told_in_milliseconds() -> None:
    line = host_line(HostTime(0.0012, 0.00005, 0.004, 0.009, 0.0007))
    assert line.startswith("host: 1.20 ms between steps and 0.050 ms more for each request")
    assert "4.00 ms around a request, 9.00 ms while another one decodes" in line
    assert line.endswith("0.70 ms more for each further one")


def test_an_unknown_model_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = run_cli("calibrate", "--output", tmp_path / "p.json", "--model", "crystal")
    assert result.returncode == 2
    assert "--model is 'crystal'; known are pooled, linear, bros, roofline" in result.stderr


def test_a_file_that_is_no_profile_is_never_replaced(tmp_path: Path) -> None:
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    result = run_cli("calibrate", "--output", other, "--url", "http://127.0.0.1:9")
    assert result.returncode == 2
    assert "It is left as it is; choose another file" in result.stderr
    assert other.read_text() == "years of work"


@pytest.mark.server
def test_a_server_started_with_calibrate_writes_the_profile_and_serves_on(
    server_for: ServerPool, tmp_path: Path
) -> None:
    profile, config = tmp_path / "profile.json", tmp_path / "echo.toml"
    config.write_text(f'[estimator]\nprofile = "{profile}"\nmodel = "linear"\n')
    args = ("--max-total-tokens", "20000", "--api-key", "secret")
    calibrate = ("--calibrate", "--calibrate-seconds", "10")
    with server_for.once((*args, *calibrate), config=config) as server:
        deadline_s, seen = time.monotonic() + 600, ""
        while not profile.exists():
            assert server.process.poll() is None and time.monotonic() < deadline_s, server.log()
            seen = seen or _arguments_of_calibration(server.process.pid)
            time.sleep(0.2)
        assert "--wait" in seen and "secret" not in seen
        headers = {"Authorization": "Bearer secret"}
        [replica] = LOCAL.get(f"{server.url}/echo/steps", headers=headers).json()["replicas"]
        here = replica["server"]
        stored = load_profile(profile, device=here["device"], model=here["model"])
        assert stored.num_samples > 30
        assert stored.host is not None and stored.host.intake_s > 0
        assert stored.estimator.NAME == "linear"
        assert "(best)" in server.log()


def _arguments_of_calibration(launcher_pid: int) -> str:
    children = [
        child
        for child in Path("/proc").glob("[0-9]*")
        if f"PPid:\t{launcher_pid}\n" in _text(child / "status")
    ]
    arguments = [_text(child / "cmdline") for child in children]
    return "".join(one for one in arguments if "\0calibrate\0" in one)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
