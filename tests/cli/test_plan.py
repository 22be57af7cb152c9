"""`echo-sgl plan` from the command line: table, JSON, and what it says when nothing fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_sgl.cli import app
from echo_sgl.estimators.profile import Profile, save_profile
from tests.sim.workloads import device, online_trace

runner = CliRunner()
LARGEST = {"prefill_tokens": 100_000, "num_decodes": 1000, "decode_tokens": 10_000_000}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A trace of four minutes, a job of 40 lines, a profile."""
    trace = online_trace(600, rate_rps=2.5)
    rows = zip(trace.at_s, trace.prompt_tokens, trace.output_tokens, strict=True)
    text = "".join(f"{at_s},{prompt},{output}\n" for at_s, prompt, output in rows)
    paths = {name: tmp_path / name for name in ("trace.csv", "jobs.jsonl", "profile.json")}
    paths["trace.csv"].write_text("t_s,context_tokens,generated_tokens\n" + text)
    lines = (
        json.dumps({"custom_id": str(i), "body": {"prompt": "s" * 3000 + str(i), "max_tokens": 20}})
        for i in range(40)
    )
    paths["jobs.jsonl"].write_text("\n".join(lines))
    profile = Profile("H1", "m", "0.5.23", "2026-01-31", 500, {}, device(), LARGEST)
    save_profile(profile, paths["profile.json"])
    return {name: str(path) for name, path in paths.items()}


def run(
    files: dict[str, str], *more: str, slo: str = "ttft_p99=1s,tpot_p99=50ms"
) -> tuple[int, str, str]:
    arguments = ["--trace", files["trace.csv"], "--profile", files["profile.json"], "--slo", slo]
    result = runner.invoke(app, ["plan", *arguments, *more])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_smallest_hardware_that_keeps_the_slo_is_found(files: dict[str, str]) -> None:
    sizes = ("--kv-tokens", "1700,40000", "--instances", "1,2")
    code, out, _ = run(
        files, "--jobs", files["jobs.jsonl"], *sizes, "--price-per-hour", "2", "--json"
    )
    assert code == 0
    plan = json.loads(out)
    assert plan["chosen"] == {"kv_tokens": 40_000, "num_instances": 1}
    assert [trial["is_kept"] for trial in plan["trials"]] == [False, False, True]
    assert plan["trials"][0]["binds"].startswith("KV memory")
    assert plan["whole"]["offline_done"] == 40
    rate = plan["offline_tokens_per_s"]
    assert plan["price_per_million_offline_tokens"] == pytest.approx(2e6 / (rate * 3600))


def test_the_table_tells_the_same(files: dict[str, str]) -> None:
    code, out, _ = run(files, "--jobs", files["jobs.jsonl"], "--kv-tokens", "40000")
    assert code == 0
    assert "40,000" in out
    assert "kept" in out
    assert "40 of 40 done, after 0.0" in out


def test_what_binds_is_said_when_nothing_keeps_the_slo(files: dict[str, str]) -> None:
    code, _, err = run(files, slo="tpot_p99=5ms")
    assert code == 1
    assert "What binds: the device: a request of" in err
    assert "above the 0.005 s of tpot_p99" in err


def test_too_little_computing_time_is_told_from_too_little_memory(files: dict[str, str]) -> None:
    code, _, err = run(files, "--kv-tokens", "1000000", slo="ttft_p99=60ms")
    assert code == 1
    assert "What binds: computing time" in err


def test_steps_beyond_the_measured_ones_are_warned_of_with_the_range(
    files: dict[str, str],
) -> None:
    path = Path(files["profile.json"])
    document = json.loads(path.read_text())
    document["largest_step"]["num_decodes"] = 1
    path.write_text(json.dumps(document))
    _, _, err = run(files)
    assert "warning: steps had a num_decodes of up to" in err
    assert "measured on 0 to 1" in err


def test_a_profile_without_its_range_says_so(files: dict[str, str]) -> None:
    path = Path(files["profile.json"])
    document = json.loads(path.read_text())
    del document["largest_step"]
    path.write_text(json.dumps(document))
    assert "does not say which steps it was measured on" in run(files)[2]


@pytest.mark.parametrize(
    ("option", "value"), [("--kv-tokens", "many"), ("--instances", "0"), ("--instances", "1,,2")]
)
def test_sizes_that_are_no_numbers_are_refused(
    files: dict[str, str], option: str, value: str
) -> None:
    with pytest.raises(ValueError, match=f"{option} is '{value}'; write whole numbers"):
        run(files, option, value)
