"""Arms, options and the report of a co-run, without a server."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import orjson
import pytest

from echo_sgl.config import load_config, resolve_config_path
from echo_sgl.types import Task, task_of_service_tier
from eval.arms import ARMS, Arm, pick_arms
from eval.corun.report import summary_markdown
from eval.corun.run import server_args
from eval.figures.summary import over_repetitions, summarise_repetition
from eval.load.mix import SERVED_MODEL, build_mix
from eval.options import CorunOptions, parse_options
from eval.workloads import WorkloadError
from eval.workloads.jobs import batch_line, write_job
from eval.workloads.prompts import count_tokens, load_tokenizer
from tests.eval.figures.test_summary import offline, online


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A trace of one request a second and a job of three lines."""
    trace, job = tmp_path / "trace.csv", tmp_path / "job.jsonl"
    rows = "".join(f"{second},{100 + second},8\n" for second in range(60))
    trace.write_text("t_s,context_tokens,generated_tokens\n" + rows)
    write_job(job, [batch_line(str(n), {"model": "other", "prompt": "x"}) for n in range(3)])
    return {"trace": str(trace), "job": str(job)}


def test_stock_is_stock_and_echo_differs_only_by_its_config_and_the_service_tier() -> None:
    assert ARMS["stock"] == Arm()
    echo = ARMS["echo"]
    assert echo.args == () and not echo.online_fields
    assert task_of_service_tier(echo.offline_fields["service_tier"]) is Task.OFFLINE
    load_config(resolve_config_path(str(echo.config)))


def test_sglang_takes_every_arms_arguments() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for arm in ARMS.values():
        _, unknown = parser.parse_known_args(["--model-path", "m", *arm.args])
        assert unknown == []


def test_the_priority_gap_is_large_enough_for_sglang_to_preempt() -> None:
    from sglang.srt.server_args import ServerArgs

    arm = ARMS["stock-priority"]
    gap = arm.online_fields["priority"] - arm.offline_fields["priority"]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert gap > parser.get_default("priority_scheduling_preemption_threshold")
    # Larger values go first unless this is set, and preemption is on unless that is.
    assert parser.get_default("schedule_low_priority_values_first") is False
    assert parser.get_default("disable_priority_preemption") is False


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--arms", "stock,nothing"], "unknown arm 'nothing'; known are stock,"),
        (["--arms", "echo,echo"], "arm 'echo' is named twice"),
        (["--duration-s", "0"], "--duration-s is 0.0; it must be 1 or more"),
        (["--duration-s", "nan"], "--duration-s is nan"),
        (["--repetitions", "0"], "--repetitions is 0"),
        (["--job-order", "random"], "allowed are shuffled, given"),
        (["--name", "../x"], "--name is '../x'"),
        (["--name", ".."], "--name is '..'"),
        (["--window", "many"], "invalid int value: 'many'"),
    ],
)
def test_a_wrong_option_ends_with_code_2_and_says_what_is_allowed(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv, prog="corun")
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_every_option_can_be_given_on_the_command_line() -> None:
    defaults = dataclasses.asdict(CorunOptions())
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in defaults.items()
            if not isinstance(value, bool)]  # fmt: skip
    options = parse_options([*argv, "--stream-offline"], prog="corun")
    assert dataclasses.asdict(options) == defaults | {"stream_offline": True}


def test_limits_reach_the_server_and_zero_leaves_its_default() -> None:
    options = CorunOptions(pool_tokens=7000, chunked_prefill_size=0, server_args="--page-size 16")
    args = server_args(options, ARMS["stock-priority"])
    assert args[args.index("--max-total-tokens") + 1] == "7000"
    assert args[args.index("--page-size") + 1] == "16"
    assert "--chunked-prefill-size" not in args
    assert args[-len(ARMS["stock-priority"].args) :] == ARMS["stock-priority"].args


def test_all_arms_send_the_same_load_but_for_their_own_fields(
    files: dict[str, str], tiny_model: Path
) -> None:
    options = CorunOptions(**files, rate_rps=0.5, duration_s=20, length_scale=0.5)
    mix = build_mix(options, load_tokenizer(str(tiny_model)))
    sent: dict[str, Any] = {}
    for name, arm in pick_arms(["stock", "stock-priority", "echo"]).items():
        bodies = []
        for request in [r for _, r in mix.schedule(arm)] + mix.lines(arm, stream=False):
            body = orjson.loads(request.content)
            for field, value in arm.fields(request.task).items():
                assert body.pop(field) == value
            bodies.append((request.id, request.task, body))
        sent[name] = bodies
    assert sent["stock"] == sent["stock-priority"] == sent["echo"]
    assert {body["model"] for _, _, body in sent["stock"]} == {SERVED_MODEL}


def test_the_online_load_has_the_traces_times_and_lengths(
    files: dict[str, str], tiny_model: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    options = CorunOptions(**files, time_scale=2, duration_s=20, length_scale=0.5,
                           max_prompt_tokens=52, shared_prefix_tokens=10)  # fmt: skip
    mix = build_mix(options, tokenizer)
    assert [at_s for at_s, _ in mix.schedule(ARMS["stock"])] == [2.0 * n for n in range(10)]
    prompts = [body["prompt"] for body in mix.online_bodies]
    lengths = [10 + min(52, round((100 + n) * 0.5)) for n in range(10)]
    assert [count_tokens(tokenizer, prompt) for prompt in prompts] == lengths
    starts = {tuple(tokenizer.encode(prompt)[:10]) for prompt in prompts}
    assert len(starts) == 1 and len(set(prompts)) == 10
    assert {body["max_tokens"] for body in mix.online_bodies} == {4}


def test_a_request_that_cannot_fit_into_the_pool_is_refused_before_the_run(
    files: dict[str, str], tiny_model: Path
) -> None:
    options = CorunOptions(**files, rate_rps=0.5, duration_s=20, pool_tokens=20)
    with pytest.raises(WorkloadError, match="a pool of 20; lower --length-scale"):
        build_mix(options, load_tokenizer(str(tiny_model)))


def test_a_window_of_the_trace_without_requests_is_refused(
    files: dict[str, str], tiny_model: Path
) -> None:
    options = CorunOptions(**files, time_scale=1, trace_start_s=1000)
    with pytest.raises(WorkloadError, match=r"no request of .* falls into"):
        build_mix(options, load_tokenizer(str(tiny_model)))


def test_the_report_shows_command_machine_and_every_arms_figures() -> None:
    alone = [online(number) for number in range(10)]
    lines = [offline(number) for number in range(100)]
    mixed = [online(number, first_token_s=number + 0.2) for number in range(10)]
    half = [offline(number * 2) for number in range(50)] + [offline(100)]
    fast = over_repetitions([summarise_repetition(alone, lines, [*mixed, *lines], (20, 60))] * 2)
    slow = over_repetitions([summarise_repetition(alone, lines, [*mixed, *half], (20, 60))])
    config = {
        "command": "python -m eval.corun --name x", "machine": "a machine", "date": "2026-01-01",
        "sglang": "0", "torch": "0", "python": "0",
        "options": dataclasses.asdict(CorunOptions(name="x")),
        "online": {"requests": 10, "prompt_tokens": 400, "output_tokens": 50},
        "offline": {"lines": 100},
    }  # fmt: skip
    text = summary_markdown(config, {"stock": slow, "echo": fast})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert "    python -m eval.corun --name x" in text and "a machine" in text
    assert ["echo", "TTFT p50", "100.0", "200.0", "2.00x"] in rows
    assert ["stock", "100", "50", "50.0%", "1.00x", "no"] in rows
    assert ["echo", "100", "100", "100.0%", "2.00x", "no"] in rows
    assert ["echo", "online together", "10", "10", "0", "0", "0"] in rows
    quick = [offline(number / 10) for number in range(100)]
    done = over_repetitions([summarise_repetition(alone, lines, [*mixed, *quick], (20, 60))])
    for arms in ({"stock": slow, "quick": done}, {"quick": done, "stock": slow}):
        assert "| quick | 100 | - | - | - | yes |" in summary_markdown(config, arms)
    assert ["stock", "25.0%", "25.0%", "0.0%", "0.0%"] in rows
