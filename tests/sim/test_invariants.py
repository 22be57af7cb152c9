"""What holds in every simulation, whatever comes: on random servers and random traces."""

from __future__ import annotations

import dataclasses
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_sgl
from echo_sgl.batch_shape import BatchRow
from echo_sgl.sim.decode_group import DecodeGroup
from echo_sgl.sim.new_token_ratio import NewTokenRatio
from echo_sgl.sim.server import SimServer, simulate
from echo_sgl.sim.server_config import ServerConfig
from echo_sgl.sim.workload import MOST_PLANNED_TOKENS, SimRequest, Trace, empty_trace
from echo_sgl.types import Task
from tests.sim.workloads import SLO, device, offline_trace, online_trace, server

SELECTIONS = ["shortest", "in-order", "mix", "bottleneck", "uncached"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[ServerConfig, Trace, Trace]:
    sections: dict[str, Any] = {
        "offline": {"order": draw(st.sampled_from(["psm", "fcfs"]))},
        "reserve": {"predictor": draw(st.sampled_from(["peak", "mean-std", "off"]))},
        "steps": {
            "limit": draw(st.sampled_from(["slack", "relative", "budget", "off"])),
            "park": draw(st.booleans()),
            "decode_selection": draw(st.sampled_from(SELECTIONS)),
            "batch_size": draw(st.sampled_from(["fixed", "adaptive"])),
            "pack": draw(st.booleans()),
            "replace": draw(st.booleans()),
            "gate": draw(st.booleans()),
        },
        **SLO,
    }
    config = server(
        sections,
        kv_tokens=draw(st.integers(3000, 12_000)),
        page_tokens=draw(st.sampled_from([1, 16, 64])),
        max_running_requests=draw(st.sampled_from([2, 16, 256])),
        chunked_prefill_tokens=draw(st.sampled_from([256, 2048])),
        enable_mixed_chunk=draw(st.booleans()),
        overlap=draw(st.booleans()),
        noise=draw(st.sampled_from([0.0, 0.2])),
    )
    seed = draw(st.integers(0, 100))
    online = online_trace(
        draw(st.integers(1, 40)), rate_rps=draw(st.sampled_from([1.0, 20.0])), seed=seed
    )
    return config, online, offline_trace(draw(st.integers(1, 30)), num_prefixes=3, seed=seed)


class CheckedServer(SimServer):
    """Holds every step against the invariants, before the next one is decided."""

    num_checked = 0
    last_s = 0.0

    def _start_step(self, now_s: float) -> None:
        assert now_s >= self.last_s
        self.last_s = now_s
        self.num_checked += 1
        self._check_memory()
        self._check_requests(now_s)
        super()._start_step(now_s)

    def _check_memory(self) -> None:
        scheduler, kv, tree = self.scheduler, self.scheduler.kv, self.scheduler.tree
        assert tree.num_tokens == sum(node.num_tokens for node in tree.nodes())
        assert tree.locked_tokens == sum(n.num_tokens for n in tree.nodes() if n.lock_count)
        assert kv.private_tokens == sum(
            kv.whole_pages(one.held_tokens - one.protected_tokens) for one in self.holders()
        )
        assert kv.private_tokens % kv.page_tokens == tree.num_tokens % kv.page_tokens == 0
        assert kv.free_tokens >= 0
        for group in (scheduler.online, scheduler.offline):
            assert group.seq_tokens == sum(one.seq_tokens for one in group)
            lengths = [one.seq_tokens for one in group]
            assert group.longest_tokens == max(lengths, default=0)
            assert group.shortest_tokens == min(lengths, default=0)

    def _check_requests(self, now_s: float) -> None:
        results = self.results
        ended = (
            results.online_done + results.offline_done + results.refused + results.offline_refused
        )
        came = sum(1 for t in self._traces.values() for at_s in t.at_s if at_s <= now_s)
        assert ended + self.num_unfinished == came
        for one in self.holders():
            assert one.arrival_s <= now_s
            assert one.first_token_s is None or one.first_token_s > one.arrival_s

    def holders(self) -> list[SimRequest]:
        scheduler = self.scheduler
        chunked = [scheduler.chunked] if scheduler.chunked is not None else []
        sitting_out = *scheduler.parked.values(), *scheduler.without_turn
        return [*scheduler.online, *scheduler.offline, *sitting_out, *chunked]


@settings(max_examples=60)
@given(cases())
def test_requests_and_pages_are_conserved_and_time_never_goes_back(
    case: tuple[ServerConfig, Trace, Trace],
) -> None:
    config, online, offline = case
    checked = CheckedServer(config, online, offline)
    checked.run()
    results, scheduler = checked.results, checked.scheduler
    assert checked.num_checked >= results.num_steps > 0
    done = results.online_done + results.offline_done + results.refused + results.offline_refused
    assert done == len(online) + len(offline)
    assert scheduler.kv.private_tokens == scheduler.tree.locked_tokens == 0
    assert scheduler.kv.free_tokens + scheduler.tree.num_tokens == scheduler.kv.capacity_tokens


@settings(max_examples=20)
@given(cases())
def test_the_same_seed_gives_the_same_bytes(case: tuple[ServerConfig, Trace, Trace]) -> None:
    config, online, offline = case
    assert simulate(config, online, offline) == simulate(config, online, offline)


@settings(max_examples=20)
@given(cases())
def test_no_token_comes_before_its_request_or_its_step(
    case: tuple[ServerConfig, Trace, Trace],
) -> None:
    config, online, offline = case
    results = simulate(config, online, offline)
    fastest_s = 0.004 * (0.3 if config.noise else 1.0)
    assert len(results.ttft_s) == results.online_done
    assert all(ttft_s >= fastest_s for ttft_s in results.ttft_s)
    assert all(tpot_s > 0 for tpot_s in results.tpot_s)
    assert results.busy_s <= results.duration_s * (1 + 1e-9)


class Recorder(SimServer):
    """Keeps each step's start and row, and when the first answer was complete."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[tuple[float, Any]] = []
        self.first_end_s = math.inf

    def _note_ended(self, ended: list[SimRequest], now_s: float) -> None:
        if ended:
            self.first_end_s = min(self.first_end_s, now_s)
        super()._note_ended(ended, now_s)

    def _start_step(self, now_s: float) -> None:
        super()._start_step(now_s)
        if self._plan is not None:
            self.steps.append((now_s, self._plan.row))


@settings(max_examples=20)
@given(cases(), st.integers(1, 400))
def test_no_decision_knows_how_long_an_answer_will_be(
    case: tuple[ServerConfig, Trace, Trace], longer: int
) -> None:
    """Answers that differ only in how much longer they go on: the same up to the first end."""
    config, online, offline = case
    runs = []
    for extra in (0, longer):
        run = Recorder(config, _at_least(online, 40 + extra), _at_least(offline, 30 + extra))
        run.run()
        runs.append(run)
    until_s = min(run.first_end_s for run in runs)
    before = [[step for step in run.steps if step[0] < until_s] for run in runs]
    assert before[0] == before[1]


def test_offline_decodes_do_not_push_online_ones_out_of_their_graphs() -> None:
    """SGLang issue 33483: beyond the largest graph steps take longer, and more requests gather."""

    class Watched(SimServer):
        most_decodes = 0

        def _start_step(self, now_s: float) -> None:
            super()._start_step(now_s)
            if self._plan is not None and len(self.scheduler.online):
                self.most_decodes = max(self.most_decodes, self._plan.row.num_decodes)

    most = []
    for captured in ((), (1, 2, 4, 8)):
        config = server(device=device(captured), max_running_requests=64)
        run = Watched(config, online_trace(20, rate_rps=2.0), offline_trace(60, num_prefixes=3))
        run.run()
        assert run.results.offline_done == 60
        most.append(run.most_decodes)
    assert most[0] > 8
    assert most[1] == 8


def _at_least(trace: Trace, num_tokens: int) -> Trace:
    answers = array("q", (num_tokens,)) * len(trace)
    return dataclasses.replace(trace, output_tokens=answers, max_new_tokens=512)


def test_a_line_that_the_reserve_never_lets_in_is_refused_as_on_a_server() -> None:
    reserve = {"predictor": "off", "min_tokens": 2900, "max_share": 1.0, "window_s": 10.0}
    config = server({"reserve": reserve}, kv_tokens=3000)
    lines = offline_trace(2, num_prefixes=1)
    results = simulate(config, online_trace(1, rate_rps=1.0, most_tokens=50), lines)
    assert (results.online_done, results.offline_done, results.unfinished) == (1, 0, 0)
    assert results.offline_refused == 2


def test_after_a_burst_lines_larger_than_the_reserve_leaves_run_one_at_a_time() -> None:
    config = server({"reserve": {"cold_start_share": 1.0, "max_share": 0.9}}, kv_tokens=3000)
    lines = offline_trace(8, num_prefixes=8)
    assert min(lines.prompt_tokens) > 300

    class Watched(CheckedServer):
        most_at_once = 0

        def _check_requests(self, now_s: float) -> None:
            super()._check_requests(now_s)
            self.most_at_once = max(self.most_at_once, self.scheduler.num_offline)

    watched = Watched(config, empty_trace(Task.ONLINE), lines)
    watched.run()
    assert (watched.results.offline_done, watched.most_at_once) == (8, 1)


def test_a_prompt_that_can_never_fit_is_refused_and_counted() -> None:
    online = online_trace(30, rate_rps=20.0)
    results = simulate(server(kv_tokens=400), online)
    assert 0 < results.refused < 30
    assert results.online_done + results.refused == 30


def test_a_request_does_not_carry_its_true_length() -> None:
    request = online_trace(1, rate_rps=1.0).request(0)
    assert not any("output" in name and name != "outputs_at_join" for name in request.__slots__)
    with pytest.raises(AttributeError):
        request.output_tokens  # noqa: B018


def test_only_the_simulated_server_and_its_workload_name_the_oracle() -> None:
    root = Path(echo_sgl.__file__).parent
    files = [*root.glob("sim/*.py"), *root.glob("policies/*.py"), *root.glob("estimators/*.py")]
    naming = {file.name for file in files if "Oracle(" in file.read_text(encoding="utf-8")}
    assert len(files) > 30
    assert naming == {"server.py"}


def test_policies_and_estimators_do_not_know_the_simulator() -> None:
    root = Path(echo_sgl.__file__).parent
    for file in (*root.glob("policies/*.py"), *root.glob("estimators/*.py")):
        assert "echo_sgl.sim" not in file.read_text(encoding="utf-8"), file


def test_prompts_of_two_classes_share_nothing_unless_they_are_said_to() -> None:
    online = online_trace(40, rate_rps=2.0)
    offline = Trace(Task.OFFLINE, online.at_s, online.prompt_tokens, online.output_tokens)
    results = simulate(server(), online, offline)
    assert results.offline_done == 40
    assert results.offline_cached_tokens == results.online_cached_tokens == 0


def test_a_request_that_starts_anew_finds_what_it_computed_itself_and_that_is_no_hit() -> None:
    online = online_trace(200, rate_rps=10.0)
    lines = Trace(Task.OFFLINE, array("d", [0.0]), array("q", [15_000]), array("q", [4]))
    results = simulate(server(chunked_prefill_tokens=256), online, lines)
    assert results.offline_done == 1 and results.num_prefill_parks > 0
    assert results.offline_prompt_tokens == 15_000 and results.offline_cached_tokens == 0


def test_answers_longer_than_what_sglang_plans_for_are_generated_whole() -> None:
    online = Trace(
        Task.ONLINE, array("d", [0.0]), array("q", [50]), array("q", [9000]), max_new_tokens=16_000
    )
    results = simulate(server(kv_tokens=40_000, overlap=False), online)
    assert results.num_steps - results.num_prefill_steps == 8999


def test_what_a_group_plans_for_is_what_its_requests_plan_for() -> None:
    group = DecodeGroup(1)
    most = MOST_PLANNED_TOKENS
    for number, allowed in enumerate((5, most, most + 1, most + 3, 3 * most)):
        trace = Trace(
            Task.ONLINE, array("d", [0.0]), array("q", [10]), array("q", [9]),
            max_new_tokens=allowed,
        )  # fmt: skip
        request = trace.request(0)
        request.rid = str(number)
        group.add(request, tokens_left=allowed)
    members = dict(group.members)
    for step in range(6):
        assert group.left_tokens == sum(one.planned_tokens for one in group)
        group.advance()
        if step == 2:
            group.remove(members["3"])
        if step == 3:
            group.add(members["3"], tokens_left=most)
    assert group.left_tokens == sum(one.planned_tokens for one in group)
    for request in list(group):
        group.remove(request)
    assert group.left_tokens == 0


@pytest.mark.parametrize("page_tokens", [16, 48, 128, 200])
def test_pages_of_any_size_share_whole_pages_of_equal_blocks_and_leave_nothing(
    page_tokens: int,
) -> None:
    lines = offline_trace(60, num_prefixes=3)
    config = server(page_tokens=page_tokens, kv_tokens=20_000)
    checked = CheckedServer(config, empty_trace(Task.ONLINE), lines)
    checked.run()
    assert checked.results.offline_done == 60
    assert checked.scheduler.kv.private_tokens == checked.scheduler.tree.locked_tokens == 0
    # 512 tokens are common to each group of lines.
    least = (60 - 2 * 3) * (512 // page_tokens) * page_tokens * 0.8
    assert checked.results.offline_cached_tokens > least


def test_under_overlap_a_request_misses_the_step_that_is_formed_when_it_comes() -> None:
    at_s = array("d", (0.0, 0.5))
    online = Trace(Task.ONLINE, at_s, array("q", (100, 100)), array("q", (200, 5)))
    plain, overlapped = (simulate(server(overlap=value), online) for value in (False, True))
    step_s = device().predict_s(BatchRow(0, 0, 0, 0, 1, 150, 150))
    # The second one ends first.
    assert overlapped.ttft_s[1] == pytest.approx(plain.ttft_s[1])
    assert overlapped.ttft_s[0] - plain.ttft_s[0] == pytest.approx(step_s, rel=0.2)


def test_what_answers_may_grow_by_is_expected_anew_when_nobody_is_left() -> None:
    ratio = NewTokenRatio(conservativeness=1.0)
    for _ in range(700):
        ratio.decay()
    assert ratio.current == pytest.approx(0.7 * 0.14)
    online = Trace(Task.ONLINE, array("d", [0.0]), array("q", [50]), array("q", [700]))
    twin = SimServer(server(), online, empty_trace(Task.OFFLINE))
    twin.run()
    assert twin.scheduler.new_token_ratio.current == pytest.approx(0.7)
    ratio.note_retraction([])
    assert ratio.current == 0.0


def test_a_short_prompt_joins_a_chunk_of_a_long_one() -> None:
    """A first request decodes, so a budget cuts the second; the third comes between its chunks."""
    times, prompts = array("d", (0.0, 0.5, 0.6)), array("q", (100, 4000, 20))
    online = Trace(Task.ONLINE, times, prompts, array("q", (200, 5, 5)))
    first_s: dict[int, float | None] = {}

    class Seen:
        def came(self, request: SimRequest) -> None:
            """Only ends are of interest."""

        def ended(self, request: SimRequest, num_tokens: int, now_s: float) -> None:
            first_s[request.number] = request.first_token_s

    steps = {"limit": "budget", "budget_s": 0.03, "adapt_budget": False}
    slo = {"ttft_s": 100.0, "tpot_s": 0.05}  # no first token is urgent
    simulate(server({"steps": steps, "slo": slo}), online, observer=Seen())
    assert 0.6 < first_s[2] < first_s[1]


@pytest.mark.parametrize(("slo", "is_moved"), [({}, False), ({"ttft_s": 100.0}, True)])
def test_a_budget_moves_only_with_promises(slo: dict[str, float], is_moved: bool) -> None:
    num = 60
    times, prompts = array("d", (float(one) for one in range(num))), array("q", [50] * num)
    online = Trace(Task.ONLINE, times, prompts, array("q", [3] * num))
    twin = SimServer(
        server({"steps": {"limit": "budget", "budget_s": 0.03}, "slo": slo}),
        online,
        empty_trace(Task.OFFLINE),
    )
    twin.run()
    assert (twin.scheduler.planner.limit.controller.budget_s > 0.03) is is_moved


def test_with_sglangs_own_tree_nobody_is_weighed_and_lines_start_in_their_order() -> None:
    lines = offline_trace(60, num_prefixes=6)
    started: dict[str, list[int]] = {}
    for cache_order in ("stock", "lru"):
        sections = {"offline": {"order": "fcfs"}, "cache": {"order": cache_order}}
        twin = SimServer(server(sections, kv_tokens=4000), empty_trace(Task.ONLINE), lines)
        taken = started[cache_order] = []
        take = twin.scheduler.pool.take

        def note(request: SimRequest, take: Any = take, taken: list[int] = taken) -> None:
            taken.append(request.number)
            take(request)

        twin.scheduler.pool.take = note  # type: ignore[method-assign]
        twin.run()
    assert started["stock"] == sorted(started["stock"])
    assert started["lru"] != sorted(started["lru"])
