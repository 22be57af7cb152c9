"""The fidelity harness without a server: what is replayed, compared, blamed and refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from echo_sgl.batch_shape import BatchRow, StepKind
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.estimators.held_out import StepError
from echo_sgl.estimators.host_time import HostTime
from echo_sgl.estimators.profile import Profile
from echo_sgl.sim.server_config import SpeedChange
from echo_sgl.types import Task
from eval.ablation.options import AblationOptions
from eval.fidelity.options import check_load, facts_of, given_load, stored_options
from eval.fidelity.replay import Prompts, noise_of, replay, with_unfinished
from eval.fidelity.report import (
    Row,
    cause_of,
    markdown,
    real_span,
    rows_of_phase,
    speed_changes,
    step_evidence,
)
from eval.fidelity.run import at_speed, evidence_of
from eval.load.records import Record, Status
from eval.workloads import WorkloadError
from eval.workloads.jobs import batch_line, write_job
from tests.sim.workloads import COEFFICIENTS, device, server


class Words:
    """A tokenizer with one token for each word."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: object, /) -> str:
        raise NotImplementedError

    def get_vocab(self) -> dict[str, int]:
        return {}


def text(start: int, num_tokens: int) -> str:
    return " ".join(str(start + index) for index in range(num_tokens))


BODIES = {
    "online-0": {"prompt": text(10_000, 40), "max_tokens": 5},
    "a": {"prompt": text(0, 300) + " 7", "max_tokens": 4},
    "b": {"prompt": text(0, 300) + " 8", "max_tokens": 4},
}


def record(name: str, sent_s: float, *, end_s: float = 2.0) -> Record:
    task = Task.ONLINE if name.startswith("online") else Task.OFFLINE
    one = Record(name, task, sent_s - 0.001, sent_s=sent_s)
    one.prompt_tokens = len(str(BODIES[name]["prompt"]).split())
    one.completion_tokens = int(str(BODIES[name]["max_tokens"]))
    one.end(Status.OK, end_s)
    return one


def profile(**changes: object) -> Profile:
    estimator = create_batch_time("pooled").with_coefficients(COEFFICIENTS)
    plain = Profile("d", "m", "0.5.23", "2026-11-21", 10, {}, estimator)
    return dataclasses.replace(plain, **changes)


def test_a_replay_has_the_same_requests_with_the_hits_of_their_real_tokens() -> None:
    real = [record("a", 0.0), record("online-0", 0.5), record("b", 1.0)]
    sim, results = replay(server(), real, Prompts(BODIES, Words()))
    by_id = {one.id: one for one in sim}
    assert set(by_id) == set(BODIES)
    assert by_id["b"].cached_tokens == 300
    assert by_id["a"].cached_tokens == by_id["online-0"].cached_tokens == 0
    assert by_id["online-0"].completion_tokens == 5
    assert by_id["online-0"].scheduled_s == pytest.approx(0.499)
    ttft_s = by_id["online-0"].ttft_s
    assert ttft_s is not None and ttft_s > 0.001
    assert results.online_done == 1 and results.offline_done == 2


def test_what_the_simulation_does_not_answer_in_time_is_given_up_as_in_the_real_phase() -> None:
    real = [record("a", 0.0, end_s=0.01)]
    sim, _ = replay(server(), real, Prompts(BODIES, Words()))
    assert [(one.status, one.end_s) for one in sim] == [(Status.CANCELLED, 0.01)]


def test_prompts_that_the_server_counted_otherwise_are_refused() -> None:
    real = record("a", 0.0)
    real.prompt_tokens = 17
    with pytest.raises(WorkloadError, match="a has 301 tokens here and had 17 on the server"):
        replay(server(), [real], Prompts(BODIES, Words()))


def test_answers_given_up_half_way_count_with_the_tokens_that_had_come() -> None:
    real = [record("a", 0.0), Record("b", Task.OFFLINE, 0.0, sent_s=0.0)]
    real[1].first_token_s, real[1].last_token_s, real[1].gaps_s = 0.5, 0.7, [0.1, 0.1]
    real[1].end(Status.CANCELLED, 2.0)
    done, half = with_unfinished(real, Prompts(BODIES, Words()))
    assert done is real[0]
    assert (half.prompt_tokens, half.completion_tokens) == (301, 3)
    again, _ = replay(server(), real, Prompts(BODIES, Words()), end_s=100.0)
    alone_s = {one.id: one.first_token_s for one in again}["a"]
    assert alone_s is not None
    cut, _ = replay(server(), real, Prompts(BODIES, Words()), end_s=alone_s + 1e-6)
    [begun] = [one for one in cut if one.first_token_s is not None]
    assert (begun.id, begun.status) == ("a", Status.CANCELLED)
    assert (begun.prompt_tokens, begun.completion_tokens) == (301, 1)


def test_the_jobs_speed_is_taken_as_its_tokens_came_where_answers_were_streamed() -> None:
    def job(last_s: float) -> list[Record]:
        one = Record("a", Task.OFFLINE, 0.0, sent_s=0.0, first_token_s=2.0, last_token_s=last_s)
        one.prompt_tokens, one.completion_tokens = 90, 11
        one.end(Status.CANCELLED, 10.0)
        return [one]

    [row] = rows_of_phase("echo", "offline-alone", job(10.0), [job(9.0)])
    assert row.figure == "tokens/s"
    assert row.real == pytest.approx((91 + 10 * 7 / 8) / 8)  # from 1 s to 9 s
    assert row.sim == pytest.approx(101 / 8)


def answered(ttft_s: float, gap_s: float, count: int) -> list[Record]:
    made = []
    for number in range(count):
        one = Record(f"online-{number}", Task.ONLINE, float(number), sent_s=float(number))
        one.first_token_s = number + ttft_s
        one.last_token_s = one.first_token_s + 9 * gap_s
        one.prompt_tokens, one.completion_tokens = 100, 10
        one.end(Status.OK, one.last_token_s)
        made.append(one)
    return made


def test_rows_are_kept_within_their_bound_and_bad_ones_have_a_cause() -> None:
    real, sim = answered(0.1, 0.010, 20), answered(0.115, 0.0105, 20)
    rows = {one.figure: one for one in rows_of_phase("echo", "online-alone", real, [sim])}
    assert set(rows) == {"TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms"}
    assert rows["TTFT p50 ms"].difference == pytest.approx(0.15)
    assert rows["TTFT p50 ms"].is_kept is False
    assert rows["TTFT p99 ms"].is_kept is True
    assert cause_of(rows["TTFT p99 ms"], None) == ""
    assert "no steps were kept" in cause_of(rows["TTFT p50 ms"], None)
    slow = {"device_over_profile": 0.8}
    assert "differ" in cause_of(rows["TTFT p50 ms"], slow)
    at_speed = [answered(ttft_s, 0.02, 20) for ttft_s in (0.1, 0.02, 0.9)]
    again = {
        one.figure: one
        for one in rows_of_phase("echo", "online-alone", real, [sim], None, at_speed)
    }
    assert again["TTFT p50 ms"].difference_at_speed == pytest.approx(0.0)
    assert cause_of(again["TTFT p50 ms"], slow) == "steps took 0.80 x what the profile says"
    off_at_speed = again["TPOT p50 ms"]
    assert off_at_speed.is_kept and off_at_speed.is_kept_at_speed is False
    assert cause_of(off_at_speed, slow) == "decisions or waits differ"


def test_a_real_figure_among_simulated_ones_that_differ_widely_is_chance() -> None:
    real, gaps_s = answered(0.1, 0.010, 20), (0.004, 0.005, 0.02)
    runs = [answered(0.1, gap_s, 20) for gap_s in gaps_s]
    rows = rows_of_phase("echo", "online-alone", real, [real], None, runs)
    row = next(one for one in rows if one.figure == "TPOT p50 ms")
    assert row.is_kept and row.is_kept_at_speed is False
    slow = {"device_over_profile": 0.8}
    assert cause_of(row, slow) == "chance: simulations span 4 to 20"
    lone = dataclasses.replace(row, span_at_speed=(4.0, 5.0))
    assert cause_of(lone, slow) == "decisions or waits differ"
    few = dataclasses.replace(lone, real_span=(4.5, 12.0))
    assert cause_of(few, slow) == "chance: of so many requests the real one spans 4.5 to 12"


def test_a_percentile_of_few_requests_spans_what_resampling_them_gives() -> None:
    alike, one_off = answered(0.1, 0.010, 20), answered(0.1, 0.010, 19) + answered(0.9, 0.01, 1)
    assert real_span(alike, Task.ONLINE, "TTFT p99 ms") == pytest.approx((100, 100))
    low, high = real_span(one_off, Task.ONLINE, "TTFT p99 ms") or (0, 0)
    assert (low, high) == pytest.approx((100, 900)), "a third of the draws leave the slow one out"
    assert real_span(one_off, Task.ONLINE, "TTFT p50 ms") == pytest.approx((100, 100))
    assert real_span(alike, Task.OFFLINE, "TTFT p99 ms") is None
    assert real_span(alike, Task.ONLINE, "hit ratio") is None


def test_a_figure_that_one_side_lacks_is_neither_kept_nor_broken() -> None:
    row = Row("echo", "together", Task.ONLINE, "TPOT p50 ms", None, 3.0, 0.1)
    assert row.difference is None and row.is_kept is None
    assert cause_of(row, None) == ""


def test_work_that_only_the_simulation_got_done_is_broken() -> None:
    row = Row("echo", "together", Task.OFFLINE, "tokens/s", 0.0, 350.0, 0.05)
    assert row.is_kept is False and row.difference == math.inf
    assert dataclasses.replace(row, sim=0.0).is_kept is True


def test_evidence_compares_the_steps_with_their_profile() -> None:
    row = BatchRow(0, 0, 0, 0, 4, 400, 100)
    time_s = device().predict_s(row)
    note = {**row._asdict(), "start_s": 0.0, "time_s": 2 * time_s}
    after = {**note, "start_s": 2 * time_s + 0.004}
    host = HostTime(step_s=0.002, request_s=0.0005, intake_s=0.0)
    evidence = step_evidence(profile(host=host), [note, after])
    assert evidence["device_over_profile"] == pytest.approx(2.0)
    assert evidence["decode_over_profile"] == pytest.approx(2.0)
    assert evidence["mixed_over_profile"] is None
    assert evidence["host_over_profile"] == pytest.approx(1.0)


def test_the_speed_is_told_anew_every_few_seconds() -> None:
    row = BatchRow(0, 0, 0, 0, 4, 400, 100)
    time_s = device().predict_s(row)
    twice = [{**row._asdict(), "start_s": 100.0 + 0.1 * n, "time_s": 2 * time_s} for n in range(9)]
    thrice = [{**one, "start_s": one["start_s"] + 8.0, "time_s": 3 * time_s} for one in twice[:2]]
    changes = speed_changes(profile(), [*twice, *thrice], 100.0)
    assert [change.at_s for change in changes] == [0.0, 8.0]
    assert changes[0].factors[StepKind.DECODE] == pytest.approx(2.0)
    assert changes[0].factors[StepKind.PREFILL] == pytest.approx(2.0), "as all steps at that time"
    assert changes[1].factors[StepKind.DECODE] == pytest.approx(3.0)


def test_at_the_runs_speed_steps_take_as_long_as_they_did() -> None:
    host = HostTime(step_s=0.002, request_s=0.0005, intake_s=0.3)
    changes = [SpeedChange(0.0, {StepKind.PREFILL: 3.0})]
    twin = at_speed(server(host=host), {"host_over_profile": 2.0}, changes)
    assert twin.host == HostTime(step_s=0.004, request_s=0.001, intake_s=0.3)
    real = [record("a", 0.0)]
    ends_s = []
    for config in (server(), dataclasses.replace(twin, host=server().host)):
        sim, _ = replay(config, real, Prompts(BODIES, Words()), end_s=100.0)
        ends_s.append(sim[0].end_s)
    prefill = BatchRow(1, 301, 301, 0, 0, 0, 0)
    assert ends_s[1] - ends_s[0] == pytest.approx(2 * device().predict_s(prefill), rel=0.05)


def test_steps_belong_to_the_phase_in_which_they_began() -> None:
    row = BatchRow(0, 0, 0, 0, 4, 400, 100)
    notes = [
        {**row._asdict(), "start_s": start_s, "time_s": 0.01} for start_s in (0.5, 1.5, 1.6, 9.0)
    ]
    spans_s = {"online-alone": (0.0, 1.0), "together": (1.0, 2.0)}
    first_s = {"online-alone": 0.0, "together": 0.55}  # the job was held for so long
    phases = evidence_of(profile(), {"notes": notes, "spans_s": spans_s}, first_s)
    assert {phase: one["num_steps"] for phase, one in phases.items()} == {
        "online-alone": 1,
        "together": 1,
    }
    assert evidence_of(profile(), {"notes": []}, {}) == {}


def test_scatter_comes_from_the_errors_on_held_out_steps() -> None:
    errors = {
        StepKind.DECODE: StepError(num_steps=30, mape=0.08, p95=0.2, bias=0.0),
        StepKind.MIXED: StepError(num_steps=10, mape=0.16, p95=0.3, bias=0.0),
    }
    assert noise_of(profile(errors=errors)) == pytest.approx(0.1 * 1.2533, rel=1e-3)
    assert noise_of(profile()) == 0.0


def test_the_summary_shows_bad_rows_with_their_cause() -> None:
    config = {
        "command": "run", "machine": "m", "date": "d", "sglang": "s",
        "options": {"workload": "w", "model": "tiny"},
        "online": {"requests": 1}, "offline": {"lines": 2},
    }  # fmt: skip
    bad = Row("echo", "together", Task.OFFLINE, "tokens/s", 1000.0, 1200.0, 0.05)
    page = markdown(config, [bad], {})
    assert "kept: 0 of 1" in page and "## Causes" not in page
    assert "\n## Causes\n\nIt rained.\n" in markdown(config, [bad], {}, "It rained.\n")
    assert "| echo | together | offline | tokens/s | 1,000 | 1,200 | +20.0% | 5% | no |" in page


def test_a_line_that_has_no_text_to_replay_is_named() -> None:
    chat = {"a": {"messages": [{"role": "user", "content": "7"}], "max_tokens": 4}}
    with pytest.raises(WorkloadError, match="a has prompt None; a job is replayed whose lines are"):
        replay(server(), [record("a", 0.0)], Prompts(chat, Words()))
    with pytest.raises(WorkloadError, match="a has max_tokens None"):
        replay(server(), [record("a", 0.0)], Prompts({"a": {"prompt": "7"}}, Words()))


def test_a_job_that_cannot_be_replayed_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "job.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    options = AblationOptions(arms="echo", job=str(path))
    for url, body, said in (
        ("/v1/chat/completions", chat, "a has prompt None; a job is replayed"),
        ("/v1/completions", {"prompt": "hi"}, "a has max_tokens None; a job is replayed"),
    ):
        write_job(path, [batch_line("a", body, url)])
        with pytest.raises(WorkloadError, match=said):
            check_load(options)
    check_load(dataclasses.replace(options, max_answer_tokens=5))


def test_a_job_of_ones_own_is_played_beside_llm_ds_phases() -> None:
    check_load(AblationOptions(arms="echo", workload="llm-d", job="mine.jsonl"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"arms": "echo,stock,stock-priority"}, "stock, stock-priority are stock schedulers"),
        ({"arms": "echo", "workload": "llm-d"}, "windows of their own"),
    ],
)
def test_what_the_simulator_does_not_play_is_refused_by_name(
    options: dict[str, str], problem: str
) -> None:
    with pytest.raises(WorkloadError, match=problem):
        check_load(AblationOptions(**options))


def test_a_load_that_is_none_is_refused_and_so_is_an_empty_folder(tmp_path: Path) -> None:
    assert given_load(0.0, "") is None
    given = given_load(2.0, "1.5,0.15")
    assert given is not None and (given.slo.ttft_s, given.slo.tpot_s) == (1.5, 0.15)
    with pytest.raises(WorkloadError, match=r"--promise '1\.5'"):
        given_load(2.0, "1.5")
    with pytest.raises(WorkloadError, match="holds no results"):
        stored_options(tmp_path, "echo")


def test_an_ablations_servers_are_known_by_their_options() -> None:
    options = AblationOptions(server_args="--sleep-on-idle")
    on_cpu = facts_of(options, ["--device", "cpu", "--sleep-on-idle"], "here")
    assert on_cpu["max_total_tokens"] == 20_000 and on_cpu["disable_overlap_schedule"]
    on_gpu = facts_of(options, ["--enable-mixed-chunk"], "here")
    assert on_gpu["is_mixed_chunk"] and not on_gpu["disable_overlap_schedule"]
    assert not on_cpu["is_mixed_chunk"]
    with pytest.raises(WorkloadError, match=r"here was measured with --page-size 16, which is not"):
        facts_of(AblationOptions(server_args="--page-size 16 --sleep-on-idle"), [], "here")
    with pytest.raises(WorkloadError, match="nothing says how large the server was"):
        facts_of(AblationOptions(pool_tokens=0), [], "here")
