"""A profile reads back as it was written, and only where it was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape, StepKind
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.held_out import StepError
from echo_sgl.estimators.host_time import HostTime
from echo_sgl.estimators.profile import Profile, load_profile, save_profile
from tests.estimators.steps import CAPTURED, NAMES, any_models, random_rows, true_model, unfitted

PACKAGED = Path(__file__).parents[2] / "configs" / "profiles"
DEVICE, MODEL = "Some CPU, 2 cores", "demo-tiny"


def profile_of(estimator: BatchTimeModel) -> Profile:
    return Profile(
        device=DEVICE,
        model=MODEL,
        sglang_version="0.5.23",
        date="2026-11-21",
        num_samples=1234,
        errors={
            StepKind.DECODE: StepError(num_steps=100, mape=1 / 30, p95=0.1, bias=-0.002),
            StepKind.MIXED: StepError(num_steps=7, mape=0.05, p95=0.2, bias=1e-17),
        },
        estimator=estimator,
    )


FACTS = {
    "largest_step": {"prefill_tokens": 2048, "num_decodes": 64},
    "host": HostTime(step_s=0.001, request_s=0.0, intake_s=0.01),
    "num_ranks": 2,
    "weights": "bfloat16",
    "transformer": {"num_layers": 4, "hidden": 256},
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    save_profile(profile_of(true_model("pooled", CAPTURED)), path)
    return path


def load(path: Path, **options: object) -> Profile:
    return load_profile(path, **{"device": DEVICE, "model": MODEL, **options})


def change(path: Path, field: str, value: object) -> None:
    """Set a field, named by its path with dots; `...` removes it."""
    document = table = json.loads(path.read_text())
    *tables, last = field.split(".")
    for name in tables:
        table = table[name]
    if value is ...:
        del table[last]
    else:
        table[last] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("facts", [{}, FACTS], ids=["an older one", "all that is told"])
def test_a_profile_reads_back_as_it_was_written(tmp_path, name, facts):
    written = replace(profile_of(true_model(name, CAPTURED)), **facts)
    save_profile(written, tmp_path / "profile.json")
    read = load(tmp_path / "profile.json")
    assert replace(read, estimator=written.estimator) == written
    assert type(read.estimator) is type(written.estimator)
    assert read.estimator.captured_batch_sizes == CAPTURED
    rows = random_rows(60, seed=1)
    expected = written.estimator.predict_rows_s(rows).tolist()
    assert read.estimator.predict_rows_s(rows).tolist() == expected


def test_an_older_profile_adds_up_the_costs_of_contexts(tmp_path, saved):
    known = load(saved).estimator.coefficients_
    newer = {"prefill_max_token": 0.0, "prefill_overlap": 0.0, "decode_overlap": 0.0}
    for name in newer:
        change(saved, f"estimator.coefficients.{name}", ...)
    assert load(saved).estimator.coefficients_ == known | newer


@given(any_models(), st.text(max_size=20), st.integers(0, 10**12))
def test_any_coefficients_and_names_survive_a_round_trip(tmp_path_factory, model, text, count):
    path = tmp_path_factory.getbasetemp() / "any.json"
    written = replace(profile_of(model), device=text, model=text, num_samples=count)
    save_profile(written, path)
    read = load_profile(path, device=text, model=text)
    assert read.estimator.coefficients_ == model.coefficients_
    assert replace(read, estimator=model) == written


def test_the_same_profile_is_the_same_file(tmp_path, saved):
    save_profile(load(saved), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == saved.read_bytes()


def test_a_model_that_was_not_fitted_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="model bros has no coefficients to save"):
        save_profile(profile_of(unfitted("bros")), tmp_path / "profile.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["device", "model"])
def test_a_profile_of_another_device_or_model_is_refused_unless_forced(saved, field):
    with pytest.raises(ConfigError, match=f"{field} is .* and this server's is 'other'") as caught:
        load(saved, **{field: "other"})
    assert str(saved) in str(caught.value)
    assert "--force-profile" in str(caught.value)
    assert load(saved, **{field: "other"}, force=True).num_samples == 1234


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", ..., "device is None; it must be a str"),
        ("date", "yesterday", "date is 'yesterday'; write it as 2026-01-31"),
        ("num_samples", 1.5, "num_samples is 1.5; it must be a int"),
        ("num_samples", True, "num_samples is True"),
        ("num_samples", -1, "num_samples is -1; it must be at least 0"),
        ("errors", [], "errors is []; it must be a dict"),
        ("errors.decode.mape", float("nan"), "errors.decode.mape is nan; it must be finite"),
        ("errors.decode.p95", ..., "errors.decode.p95 is None"),
        ("errors.decode.mood", 1, "errors.decode.mood is not known"),
        ("errors.idle", {}, "errors.idle is not known"),
        ("colour", "red", "colour is not known; remove it"),
        ("estimator.name", "oracle", "batch-time model is 'oracle'; known are"),
        ("estimator.captured_batch_sizes", ["8"], "estimator.captured_batch_sizes is ['8']"),
        ("estimator.captured_batch_sizes", [0], "captured_batch_sizes holds 0"),
        ("estimator.coefficients.mixing", ..., "miss or have too much mixing"),
        ("estimator.coefficients.mixing", 2, "coefficients.mixing is 2.0; above 1"),
        ("estimator.coefficients.prefill_area", -1e-9, "coefficients.prefill_area is -1e-09"),
        ("estimator.coefficients.prefill_area", "1", "coefficients.prefill_area is '1'"),
        ("estimator.coefficients.prefill_area", float("inf"), "prefill_area is inf"),
        ("estimator.transformer", {}, "estimator.transformer is not known"),
    ],
)
def test_an_error_names_the_file_the_field_and_the_value(saved, field, value, message):
    change(saved, field, value)
    with pytest.raises(ConfigError) as caught:
        load(saved, force=True)
    assert str(caught.value).startswith(f"{saved}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [..., 0, "32"])
def test_a_roofline_whose_sizes_are_wrong_is_refused(tmp_path, value):
    path = tmp_path / "profile.json"
    save_profile(profile_of(true_model("roofline")), path)
    change(path, "estimator.transformer.hidden", value)
    with pytest.raises(ConfigError, match=r"transformer\.hidden is"):
        load(path)


@pytest.mark.parametrize("text", ["", "{", "[", "device = 1"])
def test_a_file_that_is_not_json_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile\.json is not valid JSON"):
        load(path)


def test_a_profile_of_a_model_of_other_sizes_under_the_same_name_is_refused(tmp_path, saved):
    """Servers find their models in one folder, whichever it is today."""
    sizes = {"num_layers": 32, "hidden": 4096}
    assert load(saved, transformer=sizes).transformer is None
    save_profile(replace(profile_of(true_model("pooled", CAPTURED)), transformer=sizes), saved)
    assert load(saved, transformer=dict(sizes)).transformer == sizes
    assert load(saved).transformer == load(saved, transformer=None).transformer == sizes
    with pytest.raises(ConfigError, match=r"transformer is .*32.* and this server's is .*40"):
        load(saved, transformer=sizes | {"num_layers": 40})
    assert load(saved, transformer=sizes | {"num_layers": 40}, force=True).transformer == sizes


@pytest.mark.parametrize("text", ["[]", "null", "3"])
def test_a_file_that_holds_no_table_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="it must be a table of fields"):
        load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read: No such file"):
        load(tmp_path / "nowhere.json")


def test_what_the_host_takes_is_kept_and_older_files_have_none(saved: Path) -> None:
    assert load(saved).host is None
    host = HostTime(
        step_s=1 / 3000, request_s=1e-5, intake_s=0.004, busy_intake_s=0.01, stream_s=0.002
    )
    save_profile(replace(profile_of(true_model("pooled", CAPTURED)), host=host), saved)
    assert load(saved).host == host
    change(saved, "host.stream_s", ...)
    change(saved, "host.busy_intake_s", ...)
    assert load(saved).host == replace(host, busy_intake_s=0.0, stream_s=0.0)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("host.step_s", -1.0, "host.step_s is -1.0; it must be at least 0"),
        ("host.request_s", ..., "host.request_s is None"),
        ("host.more_s", 1.0, "host.more_s is not known"),
        ("host", 3, "host is 3; it must be a dict"),
    ],
)
def test_a_bad_host_time_is_refused_by_its_name(
    saved: Path, field: str, value: object, problem: str
) -> None:
    host = HostTime(step_s=0.001, request_s=1e-5, intake_s=0.004)
    save_profile(replace(profile_of(true_model("pooled", CAPTURED)), host=host), saved)
    change(saved, field, value)
    with pytest.raises(ConfigError, match=problem):
        load(saved)


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.json")), ids=lambda path: path.stem)
def test_a_packaged_profile_can_be_read_and_predicts(path):
    document = json.loads(path.read_text())
    profile = load_profile(path, device=document["device"], model=document["model"])
    shape = BatchShape()
    shape.add_prefill(100)
    assert 0 < profile.estimator.predict_s(shape) < 1
