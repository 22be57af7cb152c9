"""What a config file may say, and what a user is told when it says something else."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest

from echo_sgl.config import (
    EchoConfig,
    load_config,
    parse_config,
    preset_names,
    resolve_config_path,
)
from echo_sgl.errors import ConfigError


@pytest.mark.parametrize("name", preset_names())
def test_every_packaged_preset_loads(name):
    assert isinstance(load_config(resolve_config_path(name)), EchoConfig)


@pytest.mark.parametrize("name", ["echo.v2", "hygen.json", "bros.toml.bak", "configs/echo.toml"])
def test_a_file_that_is_not_there_is_no_preset_of_a_similar_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be read.*Presets that ship"):
        load_config(resolve_config_path(name))


@pytest.mark.parametrize(
    ("name", "order", "cache", "limit", "model", "selection", "parks"),
    [
        ("bs", "fcfs", "stock", "off", "pooled", "shortest", False),
        ("bs-e", "fcfs", "stock", "slack", "pooled", "in-order", True),
        ("bs-e-s", "psm", "stock", "slack", "pooled", "shortest", True),
        ("echo", "psm", "next-use", "slack", "pooled", "shortest", True),
        ("hygen", "psm", "lru", "budget", "linear", "in-order", True),
        ("bros", "fcfs", "stock", "slack", "bros", "uncached", True),
        ("ooco", "fcfs", "lru", "slack", "roofline", "bottleneck", True),
    ],
)
def test_with_promises_filled_in_a_preset_is_the_system_it_is_named_after(
    name, order, cache, limit, model, selection, parks
):
    document = tomllib.loads(resolve_config_path(name).read_text())
    config = parse_config(document | {"slo": {"ttft_s": 1.0, "tpot_s": 0.1}})
    steps = config.steps
    assert (config.offline.order, config.cache.order) == (order, cache)
    assert (steps.limit, config.estimator.model) == (limit, model)
    assert (steps.decode_selection, steps.park) == (selection, parks)
    assert steps.batch_size == ("adaptive" if name == "bros" else "fixed")
    assert config.reserve.predictor == ("peak" if name == "echo" else "off")


def test_the_presets_of_the_ablation_are_all_shipped():
    known = {"bs", "bs-e", "bs-e-s", "echo", "hygen", "bros", "ooco"}
    assert known <= set(preset_names())


def test_echo_toml_names_every_setting():
    document = tomllib.loads(resolve_config_path("echo").read_text())
    for section in dataclasses.fields(EchoConfig):
        names = {one.name for one in dataclasses.fields(getattr(EchoConfig(), section.name))}
        assert document[section.name].keys() == names


def test_an_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    assert load_config(path) == parse_config({})
    assert load_config(path).offline == EchoConfig().offline


def test_given_values_replace_defaults():
    config = parse_config({"offline": {"order": "fcfs", "utility_ratio": 1}})
    expected = dataclasses.replace(EchoConfig().offline, order="fcfs", utility_ratio=1.0)
    assert config.offline == expected
    assert isinstance(config.offline.utility_ratio, float)


@pytest.mark.parametrize(("offline", "cache"), [("psm", "next-use"), ("fcfs", "echo")])
def test_the_order_of_eviction_follows_the_offline_order(offline, cache):
    assert parse_config({"offline": {"order": offline}}).cache.order == cache


@pytest.mark.parametrize(
    ("slo", "limit"),
    [({}, "relative"), ({"ttft_s": 1.0}, "relative"), ({"ttft_s": 1.0, "tpot_s": 0.1}, "slack")],
)
def test_the_limit_of_a_step_follows_the_promises_that_are_named(slo, limit):
    assert parse_config({"slo": slo}).steps.limit == limit


def test_switches_and_texts_are_taken_as_they_are():
    config = parse_config({"steps": {"park": False}, "estimator": {"profile": "h200.json"}})
    assert config.steps.park is False
    assert config.estimator.profile == "h200.json"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"ofline": {}}, "unknown section 'ofline'; known are offline"),
        ({"offline": 3}, r"offline is 3; write it as a section: \[offline\]"),
        ({"offline": {"ordr": "psm"}}, r"\[offline\] unknown key 'ordr'; known are order"),
        ({"offline": {"order": "lifo"}}, "offline.order is 'lifo'; allowed are psm, fcfs"),
        ({"offline": {"order": ["psm"]}}, "allowed are psm, fcfs"),
        (
            {"offline": {"utility_ratio": 1.5}},
            "utility_ratio is 1.5; allowed is 0.0 to 1.0",
        ),
        ({"offline": {"utility_ratio": float("nan")}}, "allowed is 0.0 to 1.0"),
        ({"offline": {"utility_ratio": "high"}}, "must be a float"),
        ({"offline": {"seed": True}}, "offline.seed is True; it must be a int"),
        ({"offline": {"seed": 1.0}}, "must be a int"),
        ({"offline": {"max_pool_requests": 0}}, "allowed is 1 to 1000000"),
        ({"cache": {"order": "mru"}}, "allowed are auto, next-use, echo, lru, stock"),
        ({"steps": {"limit": "slack"}}, "needs both promises, but slo.ttft_s is 0.0"),
        ({"steps": {"limit": "budget", "budget_s": 0}}, "steps.budget_s is 0.0 .* above 0"),
        ({"steps": {"park": 1}}, "steps.park is 1; allowed are true, false"),
        ({"steps": {"max_inflation": 0.9}}, "allowed is 1.0 to 1000.0"),
        ({"estimator": {"profile": 3}}, "estimator.profile is 3; it must be a text"),
        (
            {"slo": {"ttft_s": 1.0, "min_ttft_s": 2.0}},
            "slo.min_ttft_s is 2.0, above slo.ttft_s, 1.0; .* at most the promise",
        ),
        ({"slo": {"tpot_s": -1}}, "slo.tpot_s is -1; allowed is 0.0 to 3600.0"),
        ({"cache": {"protected_share": 1.1}}, "protected_share is 1.1; allowed is 0.0 to 1.0"),
        ({"reserve": {"k": -1}}, "reserve.k is -1; allowed is 0.0 to 100.0"),
        ({"reserve": {"predictor": "oracle"}}, "allowed are peak, mean-std, off"),
        (
            {"offline": {"order": "fcfs"}, "cache": {"order": "next-use"}},
            "cache.order is 'next-use', .* offline.order is 'fcfs'; set cache.order to auto",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(document, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


def test_a_missing_file_names_the_presets():
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read.*echo"):
        load_config("nowhere.toml")


@pytest.mark.parametrize("text", ["offline = [", "[offline]\norder = psm"])
def test_a_file_that_is_not_toml_is_named(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(path)


def test_a_preset_is_found_by_name_and_a_file_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_config_path("echo").name == "echo.toml"
    assert resolve_config_path("echo").exists()
    own = tmp_path / "echo"
    own.mkdir()
    assert resolve_config_path("echo").name == "echo.toml"
    own.rmdir()
    own.write_text("")
    assert resolve_config_path("echo") == own
