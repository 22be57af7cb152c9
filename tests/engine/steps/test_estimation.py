"""The live estimator of a server: from its profile, from nothing, or refused with a reason."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_sgl.batch_shape import BatchRow, BatchShape, StepKind, decode_row
from echo_sgl.config import CALIBRATE_ENV, FORCE_PROFILE_ENV, EchoConfig, parse_config
from echo_sgl.engine.server_facts import captured_batch_sizes, transformer_sizes
from echo_sgl.engine.steps.estimation import (
    FloorWatch,
    RefusalWatch,
    create_live_batch_time,
)
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.host_time import HostTime
from echo_sgl.estimators.live import LiveBatchTime
from echo_sgl.estimators.profile import Profile, load_profile, save_profile
from eval.servers.server import ServerStartError
from tests.estimators.steps import shape_of, true_model

SERVER: dict[str, Any] = {
    "device": "some device",
    "model": "some model",
    "num_ranks": 1,
    "weights": "bfloat16",
    "transformer": None,
    "captured_batch_sizes": [],
}
LARGEST = {
    "num_prefills": 8,
    "prefill_tokens": 2048,
    "cached_tokens": 4000,
    "prefill_area": 20_000_000,
    "num_decodes": 64,
    "decode_tokens": 64_000,
    "max_decode_tokens": 4000,
}
SIZES = {
    "num_layers": 2,
    "hidden": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate": 128,
    "vocab": 500,
    "dtype_bytes": 4,
    "head_dim": 16,
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A pooled model, measured on "some device" with "some model"."""
    path = tmp_path / "profile.json"
    save_profile(
        Profile(
            "some device",
            "some model",
            "0.5.23",
            "2026-01-31",
            500,
            {},
            true_model("pooled"),
            largest_step=LARGEST,
            num_ranks=1,
            weights="bfloat16",
        ),
        path,
    )
    return path


def config(**sections: dict[str, Any]) -> EchoConfig:
    return parse_config(sections)


def test_without_a_profile_the_named_model_waits_for_the_first_steps():
    live = create_live_batch_time(config(estimator={"model": "bros"}), SERVER)
    assert not live.is_ready
    assert live.model.NAME == "bros"


def test_the_profiles_model_takes_the_place_of_the_named_one(profile):
    live = create_live_batch_time(
        config(estimator={"model": "linear", "profile": str(profile), "quantile": 0.9}), SERVER
    )
    assert live.model.coefficients_ == true_model("pooled").coefficients_
    assert live.quantile == 0.9


def test_settings_of_the_config_reach_the_estimator(profile):
    given = {"profile": str(profile), "error": 0.1, "refit_steps": 20, "stale_s": 5.0}
    live, shape = create_live_batch_time(config(estimator=given), SERVER), shape_of([(0, 50)])
    assert live.predict_s(shape) == pytest.approx(1.1 * true_model("pooled").predict_s(shape))
    for _ in range(40):
        live.observe(shape, 0.01, 1.0)
    assert live.num_refits == 2
    assert live.evidence(StepKind.DECODE, 5.5) == "fresh"
    assert live.evidence(StepKind.DECODE, 6.5) == "stale"


@pytest.mark.parametrize(
    ("field", "measured", "here"),
    [
        ("device", "some device", "another"),
        ("model", "some model", "another"),
        ("num_ranks", 1, 4),
        ("weights", "bfloat16", "bfloat16 fp8"),
    ],
)
def test_a_profile_of_something_else_is_refused_unless_forced(
    profile, field, measured, here, monkeypatch
):
    settings, other = config(estimator={"profile": str(profile)}), SERVER | {field: here}
    with pytest.raises(ConfigError, match=f"{field} is {measured!r}.*--force-profile"):
        create_live_batch_time(settings, other)
    monkeypatch.setenv(FORCE_PROFILE_ENV, "1")
    assert create_live_batch_time(settings, other).is_ready


def test_a_server_that_will_write_the_profile_starts_without_it(profile, monkeypatch):
    monkeypatch.setenv(CALIBRATE_ENV, "60")
    settings = config(estimator={"profile": str(profile), "model": "bros"})
    live = create_live_batch_time(settings, SERVER | {"device": "another"})
    assert live.model.NAME == "bros" and not live.is_ready


def test_decode_graphs_of_this_start_pad_the_profiles_model(profile):
    settings = config(estimator={"profile": str(profile)})
    live = create_live_batch_time(settings, SERVER | {"captured_batch_sizes": [4, 8]})
    three, four = (live.predict_s(shape_of([(0, 60)] * size)) for size in (3, 4))
    assert live.model.captured_batch_sizes == (4, 8)
    assert three == pytest.approx(four, rel=0.01)


def test_a_promise_that_an_idle_server_breaks_is_refused_with_the_figure(profile):
    settings = config(slo={"ttft_s": 1.0, "tpot_s": 1e-4}, estimator={"profile": str(profile)})
    with pytest.raises(ConfigError, match=r"slo.tpot_s promises 0.0001 s, .* alone takes 0.0059 s"):
        create_live_batch_time(settings, SERVER)


def test_who_forces_a_profile_is_warned_of_a_promise_that_it_says_is_broken(
    profile, monkeypatch, caplog
):
    monkeypatch.setenv(FORCE_PROFILE_ENV, "1")
    settings = config(slo={"ttft_s": 1.0, "tpot_s": 1e-4}, estimator={"profile": str(profile)})
    assert create_live_batch_time(settings, SERVER | {"num_ranks": 4}).is_ready
    assert "slo.tpot_s promises 0.0001 s" in caplog.text


def test_a_fit_to_live_steps_keeps_what_calibration_knew_beyond_them(profile):
    """All prompts of an hour are short; then a chunk comes, ten times as long as any of them."""
    truth, rng = true_model("pooled"), random.Random(0)
    live = create_live_batch_time(config(estimator={"profile": str(profile)}), SERVER)
    for number in range(1200):
        is_prefill = number % 4 == 0
        shape = shape_of([(rng.randint(180, 220), 0)] if is_prefill else [(0, 250)] * 8)
        noise = rng.uniform(0.9, 1.1)
        live.observe(shape, 1.5 * noise * truth.predict_s(shape), 0.01 * number)
    assert live.num_refits == 2
    chunk = shape_of([(2048, 0)])
    assert live.predict_s(chunk) == pytest.approx(1.5 * truth.predict_s(chunk), rel=0.1)


def test_steps_of_one_kind_alone_show_no_promise_out_of_reach(caplog):
    """Nothing tells yet what a prefill takes, which both promises begin with."""
    truth = true_model("pooled")
    live = LiveBatchTime(true_model("pooled"))
    watch = FloorWatch(config(slo={"ttft_s": 1.0, "tpot_s": 1e-4}).slo, warms_up=False)
    for shape, num_warnings in ((shape_of([(0, 100)]), 0), (shape_of([(100, 0)]), 1)):
        for number in range(100):
            live.observe(shape, truth.predict_s(shape), 0.01 * number)
        watch.look(1.0, live)
        assert len(caplog.records) == num_warnings


@pytest.mark.parametrize(("tpot_s", "num_warnings"), [(1e-4, 1), (1.0, 0)])
def test_without_a_profile_a_promise_out_of_reach_is_told_once_when_steps_show_it(
    tpot_s, num_warnings, caplog
):
    truth, rng = true_model("pooled"), random.Random(0)
    settings = config(slo={"ttft_s": 1.0, "tpot_s": tpot_s})
    live = create_live_batch_time(settings, SERVER)
    watch = FloorWatch(settings.slo, warms_up=False)
    for number in range(200):
        watch.look(0.01 * number, live)
        decodes = [(0, 50 + number)] * rng.randint(1, 8)
        shape = shape_of([(rng.randint(1, 400), 0)] if number % 3 == 0 else decodes)
        live.observe(shape, truth.predict_s(shape), 0.01 * number)
    assert caplog.text.count("slo.tpot_s promises 0.0001 s") == num_warnings


def decodes(*times_s: float, others: int = 0) -> list[tuple[BatchRow, float]]:
    return [(decode_row([9 + n] * (1 + others)), time_s) for n, time_s in enumerate(times_s)]


@pytest.mark.parametrize(
    ("slo", "refused"),
    [
        ({"ttft_s": 1.0, "tpot_s": 0.002}, "slo.tpot_s promises 0.002 s, .* alone takes 0.003 s"),
        ({"ttft_s": 0.002, "tpot_s": 1.0}, "slo.ttft_s promises 0.002 s, .* alone takes 0.003 s"),
        ({"ttft_s": 1.0, "tpot_s": 1.0, "min_tpot_s": 0.002}, "slo.min_tpot_s promises 0.002 s"),
        ({"ttft_s": 0.003, "tpot_s": 0.003}, None),
        ({}, None),
    ],
)
def test_promises_below_all_steps_of_the_warm_up_are_refused(slo, refused):
    """A slow first step is none of the floor."""
    watch = FloorWatch(config(slo=slo).slo, warms_up=True)
    prefill = BatchShape()
    prefill.add_prefill(5)
    steps = [(prefill.row(), 0.9), *decodes(0.5, 0.004, 0.003, 0.004, 0.004)]
    watch.note(steps)
    watch.note([])
    if refused is None:
        watch.note(decodes(0.004))
    else:
        with pytest.raises(ConfigError, match=f"by this server's warm-up, {refused}"):
            watch.note(decodes(0.004))


def test_what_others_took_of_the_cores_is_no_floor():
    """As where several servers start at once: each step took 0.1 s, and was run for 2 to 4 ms."""
    slo = config(slo={"ttft_s": 1.0, "tpot_s": 0.003}).slo
    FloorWatch(slo, warms_up=True, busy_s=[0.004, 0.004, 0.002]).note(decodes(*[0.1] * 6))
    with pytest.raises(ConfigError, match=r"slo.tpot_s promises 0.003 s, .* alone takes 0.004 s"):
        FloorWatch(slo, warms_up=True, busy_s=[0.004] * 6).note(decodes(*[0.1] * 6))
    with pytest.raises(ConfigError, match=r"alone takes 0.1 s"):
        FloorWatch(slo, warms_up=True, busy_s=[math.inf] * 6).note(decodes(*[0.1] * 6))


def test_what_is_no_warm_up_refuses_nothing():
    slo = config(slo={"ttft_s": 1.0, "tpot_s": 0.002}).slo
    FloorWatch(slo, warms_up=False).note(decodes(*[0.003] * 20))
    watch = FloorWatch(slo, warms_up=True)
    watch.note(decodes(*[0.003] * 12, others=1))  # others have come
    watch.note(decodes(*[0.003] * 20))


def test_between_the_steps_of_a_profile_the_host_takes_time_too(profile):
    known = load_profile(profile, device="", model="", force=True)
    path = profile.with_name("with-host.json")
    save_profile(dataclasses.replace(known, host=HostTime(0.002, 0.0001, 0.003)), path)
    settings = config(slo={"ttft_s": 1.0, "tpot_s": 0.007}, estimator={"profile": str(path)})
    with pytest.raises(ConfigError, match=r"slo.tpot_s promises 0.007 s, .* alone takes 0.008 s"):
        create_live_batch_time(settings, SERVER)


@pytest.mark.server
def test_a_server_that_promises_what_its_warm_up_did_not_get_ends_and_says_why(
    server_for, write_config
):
    slo = {"ttft_s": 1.0, "tpot_s": 1e-6}
    with pytest.raises(ServerStartError, match="the server ended") as ended:
        server_for(config=str(write_config(slo=slo)))
    assert "by this server's warm-up, slo.tpot_s promises 1e-06 s, but" in str(ended.value)


def test_a_roofline_needs_sizes_that_the_model_tells():
    settings = config(estimator={"model": "roofline"})
    with pytest.raises(ConfigError, match=r"estimator.model is 'roofline'.*set .* pooled"):
        create_live_batch_time(settings, SERVER)
    live = create_live_batch_time(settings, SERVER | {"transformer": SIZES})
    assert live.model.NAME == "roofline"


@pytest.mark.parametrize(("captured", "read"), [([], []), ([8, 1, 4, 4], [1, 4, 8])])
def test_captured_sizes_are_read_off_the_runner(captured, read):
    """A stand-in: no machine of this suite captures graphs."""
    assert captured_batch_sizes(SimpleNamespace(decode_cuda_graph_capture_bs=captured)) == read


@pytest.mark.server
def test_a_server_with_the_profile_of_another_machine_ends_and_says_why(
    profile, server_for, write_config
):
    with pytest.raises(ServerStartError, match="the server ended") as ended:
        server_for(config=str(write_config(estimator={"profile": str(profile)})))
    log = str(ended.value)
    assert "device is 'some device' and this server's is" in log
    assert "use the profile anyway with --force-profile" in log


def test_a_model_whose_layers_differ_has_no_single_size():
    """As Gemma 3n has one intermediate size for each layer, and others have experts or MLA."""
    dtype = SimpleNamespace(itemsize=2)
    sizes = {"num_attention_heads": 8, "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 8}
    model = SimpleNamespace(**sizes, num_key_value_heads=4, vocab_size=500, dtype=dtype)
    model.hf_text_config = SimpleNamespace(intermediate_size=[128, 256])
    assert transformer_sizes(model, 2) is None
    for other in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"):
        model.hf_text_config = SimpleNamespace(intermediate_size=128, **{other: 8})
        assert transformer_sizes(model, 2) is None
    model.hf_text_config = SimpleNamespace(intermediate_size=128)
    assert transformer_sizes(model, 2) == {
        "num_layers": 2,
        "hidden": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate": 64,
        "vocab": 250,
        "dtype_bytes": 2,
        "head_dim": 8,
    }


def test_the_log_says_why_fits_are_refused_once_until_one_is_not(caplog):
    caplog.set_level("INFO")
    truth, rng = true_model("pooled"), random.Random(0)
    live, watch = create_live_batch_time(config(), SERVER), RefusalWatch()

    def run(*kinds: StepKind) -> int:
        """How many lines the log has after 100 steps of these kinds."""
        for number in range(100):
            is_prefill = kinds[number % len(kinds)] is StepKind.PREFILL
            shape = shape_of([(rng.randint(1, 400), 0)] if is_prefill else [(0, 9)] * (number % 9))
            if len(shape):
                live.observe(shape, truth.predict_s(shape), 0.01 * number)
            watch.look(live)
        return len(caplog.records)

    assert run(StepKind.DECODE) == 1 < live.num_refusals
    assert "step times stay unknown: " in caplog.text
    assert str(live.last_refusal).partition(" ")[0] in caplog.text
    assert run(StepKind.PREFILL, StepKind.DECODE) == 1 and live.is_ready
    watch.look(live)
    assert len(caplog.records) == 1
