"""The ablation without a server: arms, options, loads, what is kept and gone on with, figures."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import orjson
import pytest

from echo_sgl.config import load_config, parse_config, resolve_config_path
from echo_sgl.types import Task, task_of_service_tier
from eval.ablation.arms import (
    ABLATION_ARMS,
    ERRORS,
    PRESETS,
    ablation_arms,
    error_arm_name,
    with_promises,
)
from eval.ablation.load import (
    build_mix,
    calibration_requests,
    calibration_window,
    check_inputs,
    in_flight,
)
from eval.ablation.options import AblationOptions, parse_options
from eval.ablation.run import Ablation, in_order
from eval.ablation.store import Store
from eval.arms import ARMS
from eval.cache.arms import with_config_file
from eval.figures.deadlines import deadlines_of
from eval.figures.slo import Slo
from eval.workloads import WorkloadError
from eval.workloads.prompts import count_tokens, load_tokenizer
from eval.workloads.traces import tell_once

Tree = dict[str, Any]

SLO = Slo(ttft_s=0.15, tpot_s=0.055)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A request a second, whose lengths differ."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"{second},{100 + second % 50},{8 + second % 4}\n" for second in range(400))
    path.write_text("t_s,context_tokens,generated_tokens\n" + rows)
    return str(path)


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_arm_is_the_preset_with_the_promises(name: str, tmp_path: Path) -> None:
    [arm] = ablation_arms([name], {"estimator": {"quantile": 0.9}}).values()
    arm = with_promises(arm, SLO)
    written = load_config(str(with_config_file(arm, tmp_path / "arm.toml").config))
    preset = tomllib.loads(resolve_config_path(name).read_text())
    estimator = preset.get("estimator", {}) | {"quantile": 0.9}
    promises = preset.get("slo", {}) | {"ttft_s": 0.15, "tpot_s": 0.055}
    assert written == parse_config(preset | {"slo": promises, "estimator": estimator})
    assert task_of_service_tier(arm.offline_fields["service_tier"]) is Task.OFFLINE


def test_stock_arms_are_those_of_the_corun_and_are_told_nothing() -> None:
    for name in ("stock", "stock-priority"):
        assert ABLATION_ARMS[name] == ARMS[name]
        [arm] = ablation_arms([name], {"offline": {"order": "fcfs"}}).values()
        assert with_promises(arm, SLO) == ARMS[name]


def test_the_arm_alone_is_the_stock_server_without_a_job(
    tiny_model: Path, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    monkeypatch.setattr("eval.ablation.load._job", lambda *_: [line])
    options = AblationOptions(trace=trace, duration_s=10)
    arms = options.picked_arms()
    assert next(iter(arms)) == "alone", "each round has what the others are held against"
    mix = build_mix(options, load_tokenizer(str(tiny_model)), saturation_rps=8.0)
    sent = {
        name: [
            [(at_s, one.content) for at_s, one in mix.schedule(arms[name])],
            [one.id for one in mix.lines(arms[name], stream=False)],
        ]
        for name in ("alone", "stock")
    }
    assert sent["alone"][0] == sent["stock"][0] and len(sent["alone"][0]) > 0
    assert sent["alone"][1] == [] and sent["stock"][1] == ["x"]
    assert with_promises(arms["alone"], SLO).args == arms["stock"].args


def test_error_arms_are_echo_but_for_the_error() -> None:
    echo = ABLATION_ARMS["echo"].settings
    for error in ERRORS:
        settings = ABLATION_ARMS[error_arm_name(error)].settings
        assert parse_config(settings).estimator.error == error
        unchanged = {**settings, "estimator": {**settings["estimator"], "error": 0.0}}
        assert parse_config(unchanged) == parse_config(echo)
    assert [error_arm_name(error) for error in (-0.05, 0.0, 0.1)] == ["error-5", "error+0",
                                                                      "error+10"]  # fmt: skip


def test_an_arm_may_be_a_preset_with_other_settings() -> None:
    name = "echo:steps.place_share=0.5:estimator.quantile=0.9"
    arms = ablation_arms(["echo", name, "echo-mixed:steps.park=false"])
    assert arms["echo"] == ABLATION_ARMS["echo"]
    config, unchanged = parse_config(arms[name].settings), parse_config(arms["echo"].settings)
    assert (config.steps.place_share, config.estimator.quantile) == (0.5, 0.9)
    steps = dataclasses.replace(config.steps, place_share=unchanged.steps.place_share)
    assert steps == unchanged.steps
    assert arms["echo-mixed:steps.park=false"].args == ABLATION_ARMS["echo-mixed"].args
    # What an arm's name says is what it has.
    [arm] = ablation_arms([name], {"steps": {"place_share": 0.9, "slack_pace": 0.4}}).values()
    steps = parse_config(arm.settings).steps
    assert (steps.place_share, steps.slack_pace) == (0.5, 0.4)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--workload", "chat"], "--workload is 'chat'; allowed are azure-qmsum, bursts-loogle"),
        (["--arms", "stock,bs-x"], "unknown arm 'bs-x'; known are alone, stock,"),
        (["--arms", "bs-x:steps.park=false"], "unknown arm 'bs-x:steps.park=false'; known are"),
        (["--arms", "echo:park"], "'park' is not of the form section.key=value"),
        (["--arms", "echo:steps.place_share=2"], "steps.place_share is 2"),
        (["--arms", "stock:steps.park=false"], "a stock server has no settings"),
        (["--arms", "echo:estimator.profile=a/b"], "only letters, digits and . : = _ -"),
        (["--arms", "echo:slo.ttft_s=1"], "[slo] is what the run promises"),
        (["--slo-factor", "0.5"], "--slo-factor is '0.5'"),
        (["--answer-lengths", "long"], "allowed are equal, lognormal"),
        (["--settings", "steps.limit=fast"], "steps.limit is 'fast'; allowed are"),
        (["--online-load", "0"], "--online-load is 0.0; it must be 0.001 or more"),
        (["--name", "../x"], "--name is '../x'"),
    ],
)
def test_a_wrong_option_ends_with_code_2_and_says_what_is_allowed(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv, "ablation")
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_an_arms_repetition_takes_about_two_and_a_half_minutes_by_default() -> None:
    one, two = (AblationOptions(arms=arms, repetitions=1) for arms in ("echo", "echo,bs"))
    assert two.estimate_s() - one.estimate_s() < 175
    once = dataclasses.replace(one, repetitions=5, ceilings_once=True)
    assert once.estimate_s() < dataclasses.replace(one, repetitions=5).estimate_s()
    assert dataclasses.replace(once, rounds=5).estimate_s() < 0.6 * once.estimate_s()


def test_the_order_of_arms_alternates() -> None:
    orders = [in_order(["a", "b", "c"], repetition) for repetition in (1, 2, 3)]
    assert orders == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


@pytest.mark.parametrize("workload", ["azure-qmsum", "bursts-loogle", "long-answers", "llm-d"])
def test_online_requests_come_at_the_asked_share_of_the_saturation(
    workload: str, trace: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.ablation.load._job", lambda *_: [])
    options = AblationOptions(workload=workload, trace=trace, online_load=0.5, duration_s=40)
    mix = build_mix(options, load_tokenizer(str(tiny_model)), saturation_rps=8.0)
    assert 120 <= len(mix.arrivals) <= 205  # 160 expected, Poisson or in clumps
    assert all(0 <= one.at_s < 40 for one in mix.arrivals)
    if workload == "llm-d":
        assert {(one.prompt_tokens, one.output_tokens) for one in mix.arrivals} == {(128, 32)}


def test_long_answers_are_longer_than_their_prompts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.ablation.load._job", lambda *_: [])
    options = AblationOptions(workload="long-answers", online_rps=4.0, duration_s=300)
    arrivals = build_mix(options, load_tokenizer(str(tiny_model)), 0.0).arrivals
    prompts, answers = ([getattr(one, name) for one in arrivals]
                        for name in ("prompt_tokens", "output_tokens"))  # fmt: skip
    assert sum(prompts) / len(prompts) == pytest.approx(0.25 * 300, rel=0.2)
    assert sum(answers) / len(answers) == pytest.approx(0.25 * 900, rel=0.2)
    assert max(answers) <= 0.25 * 3000 and len(set(zip(prompts, answers, strict=True))) > 100


def test_a_rate_of_their_own_goes_before_the_share_of_the_saturation(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.ablation.load._job", lambda *_: [])
    options = AblationOptions(workload="llm-d", online_rps=4, online_load=0.5, duration_s=40)
    mix = build_mix(options, load_tokenizer(str(tiny_model)), saturation_rps=100.0)
    assert 120 <= len(mix.arrivals) <= 205  # 160 expected, Poisson


def test_calibration_sends_the_workloads_lengths_and_texts_of_its_own(
    trace: str, tiny_model: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    options = AblationOptions(
        workload="llm-d", trace=trace, calibration_requests=30, job_lines=50, duration_s=5
    )
    bodies = [orjson.loads(one.content) for one in calibration_requests(options, tokenizer)]
    assert {count_tokens(tokenizer, body["prompt"]) for body in bodies} == {128}
    assert {body["max_tokens"] for body in bodies} == {32}
    mix = build_mix(options, tokenizer, saturation_rps=8.0)
    prompts = [body["prompt"] for body in [*bodies, *mix.online_bodies]]
    prompts += [line["body"]["prompt"] for line in mix.job]
    assert len(set(prompts)) == len(prompts)
    assert calibration_window(options) == 32
    assert calibration_window(dataclasses.replace(options, max_running_requests=0)) == 256


@pytest.mark.parametrize("workload", ["azure-qmsum", "bursts-loogle"])
def test_what_the_prompts_of_a_trace_share_is_shared_where_it_is_measured(
    workload: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten conversations of a turn a second each: a turn begins with all of the one before."""
    monkeypatch.setattr("eval.ablation.load._job", lambda *_: [])
    path = tmp_path / "mooncake.jsonl"
    rows = (
        {"timestamp": 1000 * turn + 100 * talk, "input_length": 512 * (turn + 1),
         "output_length": 8, "hash_ids": [100 * talk + n for n in range(turn + 1)]}
        for turn in range(8) for talk in range(10)
    )  # fmt: skip
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    options = AblationOptions(workload=workload, trace=str(path), length_scale=0.1, duration_s=10,
                              calibration_requests=100)  # fmt: skip
    tokenizer = load_tokenizer(str(tiny_model))
    prompts = [
        body["prompt"] for body in build_mix(options, tokenizer, saturation_rps=15.0).online_bodies
    ]
    assert 20 <= len(prompts) <= 79
    turns = zip(prompts, prompts[10:], strict=False)
    assert all(later.startswith(earlier) and later != earlier for earlier, later in turns)
    assert len({prompt[:40] for prompt in prompts}) == 10
    calibrated = [orjson.loads(one.content)["prompt"]
                  for one in calibration_requests(options, tokenizer)]  # fmt: skip
    assert calibrated[10].startswith(calibrated[0]), "the server saturates where these hit"
    assert not calibrated[80].startswith(calibrated[0]), "the trace again finds nothing of itself"


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"trace": "nowhere.csv"}, "there is no file nowhere.csv"),
        ({"job": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
        ({"job": "nowhere"}, "there is no file nowhere.prefixes.jsonl.gz"),
        ({"job": "job.jsonl"}, "url is '/v1/embeddings'; allowed are"),
    ],
)
def test_bad_inputs_end_a_run_before_a_server_starts_and_leave_its_folder_free(
    inputs: Tree, problem: str, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eval.ablation.run.start_server", lambda *_, **__: pytest.fail("started"))
    line = {"custom_id": "a", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}}
    Path("job.jsonl").write_bytes(orjson.dumps(line))
    bad, good = (
        AblationOptions(model="tiny", arms="stock", **{"trace": trace, "job": "stdlib", **more})
        for more in (inputs, {})
    )
    with pytest.raises(WorkloadError, match=problem):
        Ablation(bad, "", results_dir=tmp_path).run()
    Ablation(good, "", results_dir=tmp_path)


def test_llm_d_sends_three_jobs_of_different_windows_at_once(tiny_model: Path) -> None:
    options = AblationOptions(workload="llm-d", answer_lengths="lognormal", job_lines=200,
                              lead_s=10, duration_s=40)  # fmt: skip
    mix = build_mix(options, load_tokenizer(str(tiny_model)), saturation_rps=3.0)
    assert len(mix.job) == min(200, 3 * (10 + 40 + 15))
    windows = {line["custom_id"].partition("/")[0]: deadlines_of([line]).popitem()[1]
               for line in mix.job}  # fmt: skip
    assert windows == {"job-0": 30.0, "job-1": 50.0, "job-2": 500.0}
    assert len({line["body"]["max_tokens"] for line in mix.job}) > 10
    assert in_flight(options, mix).window == len(mix.job)
    other = dataclasses.replace(options, workload="azure-qmsum")
    assert in_flight(other, mix) == other


@pytest.mark.parametrize("workload", ["azure-qmsum", "bursts-loogle", "long-answers", "llm-d"])
def test_a_job_of_ones_own_stands_in_for_that_of_the_workload(
    workload: str, trace: str, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"  # any name of a file
    lines = [
        {"custom_id": f"mine-{number}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "another", "messages": [{"role": "user", "content": f"Say {number}"}],
                  "max_tokens": 9}}
        for number in range(20)
    ]  # fmt: skip
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    options = AblationOptions(
        workload=workload, trace=trace, job=str(path), max_answer_tokens=5, duration_s=10
    )
    mix = build_mix(options, load_tokenizer(str(tiny_model)), saturation_rps=4.0)
    assert sorted(line["custom_id"] for line in mix.job) == sorted(
        line["custom_id"] for line in lines
    )
    assert {line["url"] for line in mix.job} == {"/v1/chat/completions"}
    assert {line["body"]["max_tokens"] for line in mix.job} == {5}
    assert {line["body"]["model"] for line in mix.job} == {"eval-model"}
    # It has no windows that count from when it is sent.
    assert deadlines_of(mix.job) == {}
    assert in_flight(options, mix) == options


def test_a_job_that_is_not_there_is_named(trace: str, tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    for job in (str(tmp_path / "gone.jsonl"), "gone"):
        options = AblationOptions(trace=trace, job=job, duration_s=10)
        with pytest.raises(WorkloadError, match="gone"):
            build_mix(options, tokenizer, saturation_rps=4.0)


def test_what_was_measured_is_kept_and_gone_on_with(tmp_path: Path) -> None:
    options = AblationOptions()
    store = Store(tmp_path / "x", options)
    store.write({"rps": 2.0}, "calibration")
    store.write({"figures": {"a": 1}}, "bs", 2)
    store.write({"figures": {"a": 3}}, "bs-e", 1)
    more = dataclasses.replace(options, resume=True, repetitions=9, arms="stock")
    again = Store(tmp_path / "x", more)
    assert again.has("bs", 2) and not again.has("bs", 1) and not again.has("bs-e", 2)
    assert again.read("calibration") == {"rps": 2.0}
    assert again.runs(["bs", "bs-e", "bs-e-s"]) == {"bs": {2: {"a": 1}}, "bs-e": {1: {"a": 3}},
                                                    "bs-e-s": {}}  # fmt: skip


def test_results_are_never_replaced_nor_mixed_with_those_of_other_options(tmp_path: Path) -> None:
    Store(tmp_path / "x", AblationOptions(duration_s=30))
    store = Store(tmp_path / "x", AblationOptions())  # nothing was measured: no harm
    store.write({"rps": 2.0}, "calibration")
    with pytest.raises(WorkloadError, match="go on with --resume, measure into another folder"):
        Store(tmp_path / "x", AblationOptions())
    changed = AblationOptions(resume=True, duration_s=30)
    with pytest.raises(WorkloadError, match=r"measured with --duration-s 40\.0, not 30"):
        Store(tmp_path / "x", changed)


def test_a_run_goes_on_as_it_began_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path / "x", AblationOptions())
    now = {"machine": "two cores", "torch": "2", "date": "2026-01-01"}
    [echo] = ablation_arms(["echo"]).values()
    [other] = ablation_arms(["echo:steps.place_share=0.7"]).values()
    store.refuse_mixing({"echo": other}, (1, 2), now)  # nothing was measured
    with_config_file(with_promises(echo, SLO), store.config_path("echo", 1))
    store.write({"figures": {}}, "echo", 1)
    store.write_json("config.json", now)
    store.refuse_mixing({"echo": echo}, (1, 2), now | {"date": "2026-01-02"})
    store.refuse_mixing({"echo": other}, (1,), now | {"torch": "3"})  # nothing is left
    with pytest.raises(WorkloadError, match=r"other settings: steps\.place_share 0\.67 -> 0\.7"):
        store.refuse_mixing({"echo": other}, (1, 2), now)
    with pytest.raises(WorkloadError, match="measured with torch 2, this is 3; measure into"):
        store.refuse_mixing({"echo": echo}, (1, 2), now | {"torch": "3"})
    # What was measured stays of the day on which it was.
    assert store.provenance(now | {"date": "2026-01-02"}) == now


def test_a_part_of_a_trace_that_comes_at_once_at_its_end_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Mooncake's conversations come in lots, one in three seconds."""
    path = tmp_path / "lots.csv"
    rows = "".join(f"{3 * (number // 16)},8,2\n" for number in range(64))
    path.write_text("t_s,context_tokens,generated_tokens\n" + rows)
    options = AblationOptions(trace=str(path), trace_start_s=1, online_rps=1, duration_s=10)
    with pytest.raises(WorkloadError, match=r"after 1 s come at once.* --trace-start-s"):
        build_mix(options, load_tokenizer(str(tiny_model)), saturation_rps=8.0)


@pytest.mark.parametrize("workload", ["llm-d", "long-answers", "azure-qmsum"])
def test_a_trace_that_a_workload_does_not_read_is_told(
    workload: str,
    trace: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("eval.ablation.load._job", lambda *_, **__: [])
    tell_once.cache_clear()
    check_inputs(AblationOptions(workload=workload, trace=trace), load_tokenizer(str(tiny_model)))
    is_told = f"{workload} draws its online requests; --trace" in capsys.readouterr().err
    assert is_told == (workload != "azure-qmsum")
