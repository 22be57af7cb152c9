"""`echo-sgl budget`: traces, presets and refusals alone, replays on a real server."""

from __future__ import annotations

import dataclasses
import math
import random
import subprocess
import tomllib
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.cli.tuning.budget import evidence, refusal, require_same, write_preset
from echo_sgl.cli.tuning.preset_file import preset_text
from echo_sgl.cli.tuning.replay import Outcome, Replayer
from echo_sgl.cli.tuning.replay_load import ReplayError, ReplayLoad, read_job
from echo_sgl.config import EchoConfig, load_config, parse_config, resolve_config_path
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.budget import BudgetSearch, Measurement, Trial, parse_slo
from echo_sgl.sim.trace_columns import TraceFileError
from echo_sgl.sim.workload import Trace
from echo_sgl.types import Task
from eval.ablation.budget import find_arm_budget
from eval.cache.phases import parse_counters
from eval.figures.slo import Slo
from eval.load.mix import Mix, online_body
from eval.servers.server import LOCAL, Server
from eval.workloads.jobs import batch_line
from eval.workloads.traces import Arrival
from tests.cli.jobs import completion_line, run_cli, write_job
from tests.servers import COMMON_ARGS, NAMED, STRICT

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319569,110,27
2023-11-16 18:18:04.0319569,1,1
"""
UNSORTED = "t_s,context_tokens,generated_tokens\n1,2,2\n0,2,2\n"
TARGETS = parse_slo("ttft_p99=1s,tpot_mean=50ms")


def trace_file(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


# Jobs


def test_a_bad_job_line_is_refused_by_its_number(tmp_path):
    job = write_job(tmp_path / "job.jsonl", [completion_line("a"), b"{}"])
    with pytest.raises(TraceFileError, match="line 2"):
        read_job(job)
    with pytest.raises(TraceFileError, match="is empty"):
        read_job(trace_file(tmp_path, "", "none.jsonl"))


def load_for(
    trace: Trace, *, context_tokens: int = 1000, pool_tokens: int = 20_000, jobs: Path | None = None
) -> ReplayLoad:
    server = {"max_context_tokens": context_tokens, "max_total_tokens": pool_tokens, "vocab": 500}
    return ReplayLoad(trace, server, jobs=jobs, speed=1.0, rng=random.Random(0))


def lengths(*pairs: tuple[int, int]) -> Trace:
    prompts, answers = zip(*pairs, strict=True)
    times = array("d", (0.0 for _ in pairs))
    return Trace(Task.ONLINE, times, array("q", prompts), array("q", answers))


def test_what_a_server_takes_of_a_trace_is_sent_as_it_is_and_the_rest_is_told() -> None:
    load = load_for(lengths((900, 98), (10, 500), (5000, 10), (800, 500)))
    assert [one[1:] for one in load.arrivals] == [(900, 98), (10, 500), (993, 5), (800, 198)]
    assert [len(body["input_ids"]) for body in load.online_bodies()] == [900, 10, 993, 800]
    [note] = load.notes()
    assert note.startswith("2 of 4 requests of the trace are longer than the server takes, 1,000")
    assert not list(load_for(lengths((900, 98))).notes())
    [small] = load_for(lengths((5000, 10)), pool_tokens=600).arrivals
    assert small[1:] == (593, 5)


def test_a_refused_line_of_a_job_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.jsonl", [completion_line(name) for name in "abc"])
    load = load_for(lengths((9, 2)), jobs=job)
    bodies = load.offline_bodies()
    assert [next(bodies).line for _ in range(4)] == [1, 2, 3, 1]
    load.refuse(2, "too long")
    assert [next(bodies).line for _ in range(4)] == [3, 1, 3, 1]
    assert list(load.notes()) == [
        "the server refuses 1 of 3 lines of the job, first line 2: too long"
    ]


def test_synthetic_lines_leave_room_in_a_small_pool() -> None:
    bodies = load_for(lengths((9, 2)), pool_tokens=600).offline_bodies()
    sent = [next(bodies) for _ in range(20)]
    assert {len(one.body["input_ids"]) for one in sent} == {236}
    assert not any(one.line for one in sent)


# Statistics


def test_statistics_are_those_asked_and_lost_answers_count_as_infinite():
    outcome = Outcome([0.1, 0.2, 0.9, math.inf], [0.01, 0.03], 500, elapsed_s=10.0)
    wanted = parse_slo("ttft_p50=1s,ttft_p99=1s,tpot_mean=1s,tpot_p90=1s")
    measured = outcome.measurement(wanted)
    assert measured.values_s == {
        "ttft_p50": 0.9,
        "ttft_p99": math.inf,
        "tpot_mean": 0.02,
        "tpot_p90": 0.03,
    }
    assert (measured.num_requests, measured.offline_tokens_per_s) == (4, 50.0)


def test_a_promise_that_no_request_can_show_is_refused():
    with pytest.raises(ReplayError, match="tpot_mean has no values"):
        Outcome([0.1], [], 0).measurement(TARGETS)


# Presets


@given(
    st.builds(
        lambda name, share, seed, budget_s, switch: parse_config(
            {
                "estimator": {"profile": name},
                "cache": {"protected_share": share},
                "offline": {"seed": seed},
                "steps": {"limit": "budget", "budget_s": budget_s, "park": switch},
            }
        ),
        st.text(st.characters(exclude_categories=["Cs"])),
        st.floats(0, 1),
        st.integers(0, 2**31),
        st.floats(0, 3600, exclude_min=True),
        st.booleans(),
    )
)
def test_a_preset_reads_back_as_the_config_that_it_was_written_from(config: EchoConfig):
    assert parse_config(tomllib.loads(preset_text(config, ["a comment", ""]))) == config


@given(st.text())
def test_whatever_a_comment_holds_the_preset_reads_back(comment):
    """A proxy's page of several lines, the name of a file whose bytes are not UTF-8."""
    for text in (comment, "<html>\nsteps = 1\n</html>", "caf\udce9.csv\x01"):
        written = preset_text(EchoConfig(), [text])
        assert parse_config(tomllib.loads(written.encode().decode())) == parse_config({})


def search(budget_s: float | None, *loads: tuple[float, float]) -> BudgetSearch:
    trials = tuple(
        Trial(tried, (Measurement({"ttft_p99": load, "tpot_mean": 0.05 * load}, 9, 3.0),), load)
        for tried, load in loads
    )
    return BudgetSearch(budget_s, TARGETS, trials)


def test_the_preset_holds_the_budget_and_the_figures_it_rests_on(tmp_path):
    found, path = search(0.02, (0.0, 0.5), (0.02, 0.8), (0.05, 1.5)), tmp_path / "mine.toml"
    base = load_config(resolve_config_path("hygen"))
    write_preset(path, base, 0.02, list(evidence(found)))
    stored = load_config(path)
    assert (stored.steps.limit, stored.steps.budget_s) == ("budget", 0.02)
    assert (stored.offline, stored.cache, stored.slo) == (base.offline, base.cache, base.slo)
    rows = [line.split() for line in path.read_text().splitlines() if line.endswith("kept")]
    assert rows[1] == ["#", "0.02", "1", "0.8", "0.04", "3", "kept"]
    assert "broken" in path.read_text()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (search(None, (0.0, 1.2)), "even without offline work"),
        (search(None, (0.0, 0.9), (0.001, 1.2)), "not beside any"),
        (search(None, (0.05, 1.2), (0.0, 0.9)), "stored budget of 0.05 s"),
        (search(None, (0.05, 1.2), (0.0, 1.1)), "even without offline work"),
    ],
)
def test_a_budget_that_is_not_there_is_explained(found, message):
    assert message in refusal(found)


# The command


def test_bad_options_end_with_code_2_before_anything_is_sent(tmp_path):
    trace = trace_file(tmp_path, AZURE)
    unsorted = trace_file(tmp_path, UNSORTED, "unsorted.csv")
    given = {"--slo": "ttft_p99=1s", "--trace": trace, "--output": tmp_path / "new.toml"}
    for option, value, message in [
        ("--slo", "ttft_p95=1s", "--slo: the SLO has a part 'ttft_p95=1s'"),
        ("--trace", tmp_path / "none.csv", "cannot be read"),
        ("--trace", unsorted, "line 3: t_s goes back by 1 s; sort"),
        ("--output", tmp_path / "none" / "new.toml", "folder that does not exist"),
    ]:
        options = [part for pair in (given | {option: value}).items() for part in pair]
        result = run_cli("budget", *options, "--url", "http://127.0.0.1:9")
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
    assert not (tmp_path / "new.toml").exists()


def test_a_preset_without_a_budget_cannot_be_checked(tmp_path):
    preset = trace_file(tmp_path, "[steps]\nlimit = 'off'\n", "p.toml")
    options = ("--trace", trace_file(tmp_path, AZURE), "--output", preset, "--check")
    result = run_cli("budget", "--slo", "ttft_p99=1s", *options)
    assert result.returncode == 2
    assert "steps.limit 'off', so there is no budget to check" in result.stderr


def test_a_preset_is_checked_only_where_it_runs(tmp_path: Path) -> None:
    running = load_config(resolve_config_path("hygen"))
    moved = dataclasses.replace(running.steps, budget_s=0.007, adapt_budget=False)
    require_same(dataclasses.replace(running, steps=moved), running, tmp_path)
    others = dataclasses.replace(running, cache=dataclasses.replace(running.cache, order="echo"))
    with pytest.raises(ConfigError, match=r"cache\.order is 'lru' there and 'echo' in the preset"):
        require_same(others, running, tmp_path)


@pytest.fixture
def budget_server(server_for: Callable[..., Server]) -> Server:
    return server_for((*COMMON_ARGS, *NAMED), config="hygen", env=STRICT)


@pytest.mark.server
def test_a_replay_on_a_real_server_times_every_request(server: Server):
    trace = Trace(
        Task.ONLINE,
        array("d", (0.2 * number for number in range(6))),
        array("q", (30 + number for number in range(6))),
        array("q", (1 + 3 * number for number in range(6))),
    )
    replayer = Replayer(server.url, None, trace, jobs=None, speed=2.0, rng=random.Random(0))
    assert replayer.seconds == 1.0
    measured = replayer.measure(0.0, parse_slo("ttft_mean=1s,ttft_p99=1s,tpot_p50=1s"))
    values = measured.values_s
    assert measured.num_requests == 6 and measured.offline_tokens_per_s == 0.0
    assert 0 < values["ttft_mean"] <= values["ttft_p99"] < 60
    assert 0 < values["tpot_p50"] < 60


@pytest.mark.server
def test_the_longest_request_that_a_server_takes_is_sent_as_it_is(server: Server) -> None:
    """One that is longer is sent as long as that; neither is refused, as one more token is."""
    trace = lengths((10**6, 10**6), (7800, 10**6))
    replayer = Replayer(server.url, None, trace, jobs=None, speed=1.0, rng=random.Random(0))
    longest, answer = replayer.load.online_bodies()
    replayer.measure(0.0, parse_slo("ttft_p99=100s"))
    facts = replayer.server
    most = min(facts["max_context_tokens"], facts["max_total_tokens"])
    assert len(longest["input_ids"]) == most - 7
    assert answer["sampling_params"]["max_new_tokens"] == most - 2 - 7800
    refused = longest | {"input_ids": [*longest["input_ids"], 20, 20], "stream": False}
    assert LOCAL.post(f"{server.url}/generate", json=refused, timeout=60).status_code == 400


@pytest.mark.server
def test_a_replay_finds_in_the_cache_what_the_prompts_of_the_trace_share(server: Server) -> None:
    """Three come one after the other: 2 of 3 blocks are shared, and one follows on another."""
    trace = Trace(
        Task.ONLINE,
        array("d", (0.0, 2.0, 4.0)),
        array("q", (160, 150, 200)),
        array("q", (2, 2, 2)),
        blocks=[array("q", ids) for ids in ((1, 2, 3), (1, 2, 4), (1, 2, 3, 5))],
        block_tokens=64,
    )
    replayer = Replayer(server.url, None, trace, jobs=None, speed=2.0, rng=random.Random(0))
    replayer.measure(0.0, TARGETS)  # The first one warms up.
    for _ in range(2):  # Nothing is left of the last replay.
        before = cached_tokens(server)
        replayer.measure(0.0, TARGETS)
        assert cached_tokens(server) - before == 128 + 160


def cached_tokens(server: Server) -> float:
    page = LOCAL.get(f"{server.url}/metrics").text
    return parse_counters(page)["echo_sgl_cached_prompt_tokens_total{task=online}"]


@pytest.mark.server
def test_an_slo_that_the_idle_server_breaks_is_reported_with_its_figures(
    budget_server: Server, tmp_path: Path
) -> None:
    result = run_budget(budget_server, "ttft_p99=1us,tpot_mean=1s", tmp_path)
    assert result.returncode == 1, result.stderr
    assert "even without offline work" in result.stderr
    assert "ttft_p99 <= 1e-06 s" in result.stdout and "broken" in result.stdout
    assert not (tmp_path / "new.toml").exists()


@pytest.mark.server
def test_a_budget_is_found_beside_offline_work_and_checked_where_it_runs(
    budget_server: Server, server: Server, tmp_path: Path
) -> None:
    slo = "ttft_p90=40s,tpot_mean=40s"
    found = run_budget(budget_server, slo, tmp_path)
    assert found.returncode == 0, found.stderr
    stored = load_config(tmp_path / "new.toml")
    running = load_config(resolve_config_path("hygen"))
    assert stored == dataclasses.replace(
        running, steps=dataclasses.replace(running.steps, budget_s=40.0)
    )
    alone, *beside = [line.split() for line in found.stdout.splitlines()[2:]]
    assert alone[0] == "0" and alone[-2:] == ["0", "kept"]
    assert len(beside) == 2 and float(beside[-1][-2]) > 0
    checked = run_budget(budget_server, slo, tmp_path, "--check")
    assert checked.returncode == 0, checked.stderr
    broken = run_budget(budget_server, "ttft_p90=1us", tmp_path, "--check")
    assert broken.returncode == 1
    assert "even without offline work" in broken.stderr
    assert load_config(tmp_path / "new.toml") == stored
    elsewhere = run_budget(server, slo, tmp_path, "--check")
    assert elsewhere.returncode == 2
    assert "steps.limit 'relative', so its steps have no budget" in elsewhere.stderr


@pytest.mark.server
@pytest.mark.parametrize(("promised_s", "budget_s"), [(40.0, 40.0), (1e-6, None)])
def test_an_ablation_finds_the_budget_of_an_arm_on_its_server(
    budget_server: Server, tmp_path: Path, promised_s: float, budget_s: float | None
) -> None:
    arrivals = [Arrival(0.2 * number, 20 + number, 5) for number in range(10)]
    lines = [batch_line(str(number), online_body(f"job {number}", 4)) for number in range(5)]
    found = find_arm_budget(
        budget_server,
        Mix(arrivals, [], lines),
        Slo(promised_s, promised_s),
        seconds=1.0,
        job_path=tmp_path / "job.jsonl",
        seed=0,
    )
    assert (found["budget_s"], found["keeps_promises"]) == (budget_s, budget_s is not None)
    verdicts = [line.split()[-1] for line in found["evidence"][2:]]
    assert verdicts == (["kept"] * 3 if budget_s else ["broken"])


def run_budget(
    server: Server, slo: str, folder: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    trace = trace_file(folder, "TIMESTAMP,ContextTokens,GeneratedTokens\n0,20,120\n0.5,40,2\n")
    options = ("--url", server.url, "--trace", trace, "--output", folder / "new.toml")
    return run_cli("budget", "--slo", slo, *options, *more)
