"""`echo-sgl plan` from the command line: table, JSON, and what it says when nothing fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_sgl.cli import app
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.estimators.profile import Profile, save_profile
from tests.sim.workloads import COEFFICIENTS, device, online_trace

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
    assert plan["chosen"] == {"kv_tokens": 40_000, "num_instances": 1, "device": "profile"}
    assert [trial["is_kept"] for trial in plan["trials"]] == [False, True]
    assert plan["trials"][0]["binds"].startswith("KV memory")
    assert plan["whole"]["offline_done"] == 40
    rate = plan["offline_tokens_per_s"]
    assert plan["price_per_million_offline_tokens"] == pytest.approx(2e6 / (rate * 3600))
    assert plan["is_kept_beside"] and plan["loads"] == []


def test_of_two_devices_the_cheapest_that_keeps_the_slo_is_found(files: dict[str, str]) -> None:
    slow = Path(files["profile.json"]).with_name("slow.json")
    slower = {name: 5 * value for name, value in COEFFICIENTS.items() if name != "mixing"}
    model = create_batch_time("pooled").with_coefficients({**COEFFICIENTS, **slower})
    save_profile(Profile("H0", "m", "0.5.23", "2026-01-31", 500, {}, model, LARGEST), slow)
    options = ("--profile", str(slow), "--kv-tokens", "40000", "--instances", "1,2", "--json")
    easy, hard = "ttft_p99=9s,tpot_p99=900ms", "ttft_p99=1s,tpot_p99=50ms"

    def chosen(prices: str, slo: str) -> tuple[str, int]:
        plan = json.loads(run(files, *options, "--price-per-hour", prices, slo=slo)[1])
        return plan["chosen"]["device"], plan["chosen"]["num_instances"]

    assert chosen("3,1", easy) == ("slow", 1)
    assert chosen("3,4", easy) == ("profile", 1)
    assert chosen("3,1", hard) == ("profile", 1)
    with pytest.raises(ValueError, match="3 prices for 2 profiles"):
        run(files, *options, "--price-per-hour", "1,2,3")
    with pytest.raises(ValueError, match="give each its own name"):
        run(files, "--profile", files["profile.json"])


def test_the_picture_shows_what_more_load_costs(files: dict[str, str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    options = ("--jobs", files["jobs.jsonl"], "--kv-tokens", "40000", "--loads", "16,1,4")
    _, out, _ = run(files, *options, "--picture", str(picture), "--json")
    points = json.loads(out)["loads"]
    assert [one["load"] for one in points] == [1, 4, 16]
    kept = [one["attainment"] for one in points]
    assert kept[0] > 0.95 and kept[2] < 0.6 and kept == sorted(kept, reverse=True)
    assert points[0]["offline_tokens_per_s"] > 0
    assert "offline tokens an hour" in picture.read_text()
    assert "promises kept" in run(files, *options, "--picture", str(picture))[1]


def test_a_job_of_one_line_is_sold_once_however_many_instances_there_are(
    files: dict[str, str], tmp_path: Path
) -> None:
    jobs = Path(files["jobs.jsonl"])
    jobs.write_text(jobs.read_text().splitlines()[0])
    options = ("--jobs", str(jobs), "--kv-tokens", "40000", "--instances", "4", "--loads", "1")
    plan = json.loads(run(files, *options, "--picture", str(tmp_path / "p.svg"), "--json")[1])
    assert plan["loads"][0]["offline_tokens_per_s"] == pytest.approx(
        plan["offline_tokens_per_s"], rel=0.1
    )


def test_the_last_requests_are_waited_for_before_the_slo_is_judged(files: dict[str, str]) -> None:
    path = Path(files["trace.csv"])
    with path.open("a") as trace:
        trace.write("300,3000,50\n" * 40)
    options = ("--jobs", files["jobs.jsonl"], "--kv-tokens", "400000", "--json")
    code, out, _ = run(files, *options, slo="ttft_p99=9s,tpot_p99=9s")
    whole = json.loads(out)["whole"]
    assert (code, whole["online_done"], whole["online_unfinished"]) == (0, 640, 0)
    late = run(files, *options, slo=f"ttft_p99={whole['ttft_p99_s'] * 0.9}s,tpot_p99=9s")
    assert late[0] == 1


def test_what_nobody_measured_is_shown_as_a_dash(files: dict[str, str]) -> None:
    Path(files["trace.csv"]).write_text("t_s,context_tokens,generated_tokens\n0,100,1\n9,100,1\n")
    code, out, _ = run(files, "--kv-tokens", "40000")
    assert code == 0
    assert "tpot_p99 -" in out and "nan" not in out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--picture", ".svg"), "name must end in"),
        (("--loads", "one"), "write numbers"),
        (("--picture", "plan.gif"), "must end in .svg, .png, .pdf"),
        (("--picture", "nowhere/plan.svg"), "its folder does not exist"),
        (("--picture", "plan.svg", "--loads", "0,1"), "numbers above 0 are simulated"),
        (("--picture", "plan.svg", "--loads", "one"), "write numbers"),
        (("--price-per-hour", "-1"), "write numbers"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_runs(
    files: dict[str, str], options: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        run(files, *options)


def test_a_picture_of_promises_needs_both(files: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="name a ttft and a tpot"):
        run(files, "--picture", "plan.svg", slo="ttft_p99=1s")


def test_a_picture_is_no_folder(files: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "plan.svg"
    folder.mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        run(files, "--picture", str(folder))


def test_requests_that_the_whole_trace_has_and_the_pool_has_no_room_for_break_the_plan(
    files: dict[str, str],
) -> None:
    path = Path(files["trace.csv"])
    path.write_text(path.read_text() + "1000,60000,10\n1001,100,10\n")
    code, out, err = run(files, "--kv-tokens", "40000")
    assert code == 1
    assert "refused           1 requests, 0 lines of one instance" in out
    assert "SLO beside it     broken" in out and "broken over the whole trace" in err


def test_requests_that_come_all_at_once_are_served_to_the_end(files: dict[str, str]) -> None:
    Path(files["trace.csv"]).write_text("t_s,context_tokens,generated_tokens\n" + "0,100,5\n" * 3)
    options = ("--jobs", files["jobs.jsonl"], "--kv-tokens", "40000", "--json")
    plan = json.loads(run(files, *options)[1])
    assert plan["whole"]["online_done"] == 3 and plan["whole"]["offline_done"] == 40


def test_the_table_tells_the_same(files: dict[str, str]) -> None:
    code, out, _ = run(files, "--jobs", files["jobs.jsonl"], "--kv-tokens", "40000")
    assert code == 0
    assert "40,000" in out
    assert "kept" in out
    assert "40 of 40 done, after 0.0" in out


def test_a_line_that_never_fits_does_not_change_what_the_others_bring(
    files: dict[str, str],
) -> None:
    options = ("--jobs", files["jobs.jsonl"], "--kv-tokens", "40000", "--json")
    fitting = json.loads(run(files, *options)[1])
    with Path(files["jobs.jsonl"]).open("a") as file:
        line = {"custom_id": "x", "body": {"prompt": "l" * 400_000, "max_tokens": 20}}
        file.write("\n" + json.dumps(line))
    plan = json.loads(run(files, *options)[1])
    assert plan["whole"]["offline_refused"] == 1 and plan["is_all_done"]
    assert plan["offline_tokens_per_s"] == pytest.approx(fitting["offline_tokens_per_s"], rel=0.01)


def test_a_line_that_is_under_way_at_the_end_counts_as_far_as_it_is(
    files: dict[str, str],
) -> None:
    line = {"custom_id": "x", "body": {"prompt": "word " * 400, "max_tokens": 30_000}}
    Path(files["jobs.jsonl"]).write_text(json.dumps(line))
    options = ("--jobs", files["jobs.jsonl"], "--kv-tokens", "100000", "--json")
    plan = json.loads(run(files, *options)[1])
    assert plan["whole"]["offline_done"] == 0 and not plan["is_all_done"]
    # It decodes for four minutes, in steps of more than 12 ms.
    assert 500 / 240 < plan["offline_tokens_per_s"] < (500 + 240 / 0.012) / 240


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        ("ttft_p99=1s,tpot_p99=50ms", "config echo with [slo] ttft_s = 1, tpot_s = 0.05, [steps]"),
        ("ttft_p99=1s", "config echo without promises"),
    ],
)
def test_the_plan_says_what_the_servers_promise(files: dict[str, str], slo: str, said: str) -> None:
    assert said in run(files, "--kv-tokens", "40000", slo=slo)[1]
    plan = json.loads(run(files, "--kv-tokens", "40000", "--json", slo=slo)[1])
    assert plan["rules"].startswith(said)


def test_mixed_chunks_are_simulated_where_the_servers_have_them(files: dict[str, str]) -> None:
    options = ("--jobs", files["jobs.jsonl"], "--kv-tokens", "40000", "--json")
    plain, mixed = (
        json.loads(run(files, *options, *more)[1]) for more in ((), ("--enable-mixed-chunk",))
    )
    assert plain["whole"]["num_steps"] != mixed["whole"]["num_steps"]


def test_a_cached_prompt_is_not_blamed_on_the_device(files: dict[str, str], tmp_path: Path) -> None:
    """All of these share their prompts: it is answers that take the time."""
    trace = tmp_path / "shared.jsonl"
    lengths = {"input_length": 4096, "output_length": 60, "hash_ids": list(range(8))}
    rows = ({"timestamp": 400 * i, **lengths} for i in range(200))
    trace.write_text("\n".join(map(json.dumps, rows)))
    alone = {**files, "trace.csv": str(tmp_path / "alone.csv")}
    text = "".join(f"{0.4 * i},4096,60\n" for i in range(200))
    Path(alone["trace.csv"]).write_text("t_s,context_tokens,generated_tokens\n" + text)
    slo = "ttft_p50=100ms,ttft_p99=1ms"
    for which, is_the_device in (({**files, "trace.csv": str(trace)}, False), (alone, True)):
        _, _, err = run(which, "--kv-tokens", "100000", slo=slo)
        assert ("a request of 4096 new tokens alone" in err) == is_the_device


def test_a_pool_too_small_for_the_reserve_is_refused_before_anything_runs(
    files: dict[str, str], tmp_path: Path
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("[reserve]\nmin_tokens = 8000\n")
    with pytest.raises(ConfigError, match=r"--kv-tokens 20000: reserve.min_tokens is 8000"):
        run(files, "--config", str(config), "--kv-tokens", "20000,40000")


def test_what_binds_is_said_when_nothing_keeps_the_slo(files: dict[str, str]) -> None:
    code, _, err = run(files, slo="tpot_p99=5ms")
    assert code == 1
    assert "What binds: the device: a request of" in err
    assert "above the 0.005 s of tpot_p99" in err


def test_long_prompts_that_break_a_percentile_alone_are_blamed_on_the_device(
    files: dict[str, str],
) -> None:
    """More servers would be bought in vain: 2 of 100 take longer alone than is promised."""
    rows = (f"{i},{30_000 if i % 50 == 7 else 100},10\n" for i in range(250))
    Path(files["trace.csv"]).write_text("t_s,context_tokens,generated_tokens\n" + "".join(rows))
    sizes = ("--kv-tokens", "100000", "--instances", "4")
    _, _, err = run(files, *sizes, slo="ttft_p99=500ms")
    assert "What binds: the device: a request of 30000 new tokens alone has a ttft of" in err
    assert run(files, *sizes, slo="ttft_p90=500ms")[0] == 0


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
