"""The cache experiments: what is counted, compared and reported."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from echo_sgl.types import Task
from eval.cache.figures import burst_figures, counter, matched, offline_figures, overlap_figures
from eval.cache.options import default_options
from eval.cache.phases import PHASES, PhaseResult, parse_counters
from eval.cache.report import summary_markdown
from eval.figures.summary import over_repetitions
from eval.load.records import Record, Status


def record(name: str, task: Task, end_s: float, **values: Any) -> Record:
    """An answer to a prompt of 100 tokens, 60 of them cached."""
    usual = {"end_s": end_s, "prompt_tokens": 100, "cached_tokens": 60, "completion_tokens": 5}
    return Record(name, task, 0.0, **(usual | {"status": Status.OK} | values))


def offline(name: str, end_s: float = 1.0, **values: Any) -> Record:
    return record(name, Task.OFFLINE, end_s, **values)


def online(name: str, at_s: float = 0.0, ttft_s: float = 0.1, **values: Any) -> Record:
    made = record(name, Task.ONLINE, at_s + 1, first_token_s=at_s + ttft_s, **values)
    return dataclasses.replace(made, scheduled_s=at_s)


METRICS = """\
# TYPE echo_sgl_retractions counter
echo_sgl_retractions_total{task="offline",pid="1"} 2.0
echo_sgl_retractions_total{task="offline",pid="2"} 3.0
echo_sgl_retractions_total{task="online",pid="1"} 1.0
# TYPE sglang:evicted_tokens_total counter
sglang:evicted_tokens_total{model_name="m",tp_rank="0"} 70.0
# TYPE echo_sgl_pool_requests gauge
echo_sgl_pool_requests{task="offline"} 9.0
"""


def test_counters_are_summed_over_places_and_kept_apart_by_kind() -> None:
    counters = parse_counters(METRICS)
    assert counters == {
        "echo_sgl_retractions_total{task=offline}": 5.0,
        "echo_sgl_retractions_total{task=online}": 1.0,
        "sglang:evicted_tokens_total": 70.0,
    }
    assert counter(counters, "echo_sgl_retractions_total", task="offline") == 5.0
    assert counter(counters, "echo_sgl_retractions_total") == 6.0
    assert counter(counters, "sglang:evicted_tokens_total") == 70.0
    assert counter(counters, "echo_sgl_retractions") is None


def test_offline_hits_are_compared_with_the_infinite_caches() -> None:
    records = [offline("a", 2.0), offline("b", 4.0), offline("c", 3.0, status=Status.ERROR)]
    tree = offline_figures(PhaseResult(records, parse_counters(METRICS)), infinite_hits=150)
    assert tree["hit_ratio"] == 0.6 and tree["of_infinite"] == 0.8
    assert (tree["ok"], tree["error"], tree["evicted_tokens"]) == (2, 1, 70.0)
    assert tree["time_s"] == 4.0 and tree["tokens_per_s"] == 210 / 4
    nothing = offline_figures(PhaseResult([]), infinite_hits=0)
    assert nothing["hit_ratio"] is None and nothing["of_infinite"] is None


def test_only_what_was_answered_in_both_phases_is_compared() -> None:
    alone = [offline("a"), offline("b"), offline("c", status=Status.CANCELLED), online("a")]
    together = [offline("c"), offline("b"), offline("d"), offline("a", status=Status.CANCELLED)]
    first, second = matched(alone, together, Task.OFFLINE)
    assert (first, second) == ([alone[1]], [together[1]])


def overlap(cached_together: int) -> dict[str, Any]:
    alone = [online("t/0"), online("t/1")]
    jobs = [offline("a"), offline("b")]
    mixed = [online("t/0", cached_tokens=cached_together), offline("a", cached_tokens=54)]
    phases = {"online-alone": alone, "offline-alone": jobs, "together": mixed}
    return overlap_figures({name: PhaseResult(records) for name, records in phases.items()})


def test_each_class_is_compared_with_itself_alone() -> None:
    tree = overlap(57)
    assert tree["online"]["matched"] == tree["offline"]["matched"] == 1
    assert tree["online"]["alone"] == 0.6 and tree["online"]["together"] == 0.57
    assert tree["online"]["difference"] == pytest.approx(-0.03)
    assert tree["offline"]["of_alone"] == pytest.approx(0.9)
    empty = dict.fromkeys(PHASES["overlap"], PhaseResult([]))
    assert overlap_figures(empty)["online"]["together"] is None


def burst() -> dict[str, Any]:
    options = default_options("burst", bursts=2, steady_s=10, burst_s=5, after_s=5)
    records = [online("s", 1.0, 0.2), online("b", 12.0, 3.0), online("s2", 16.0, 0.2)]
    records += [online("b2", 29.0, 3.0), online("after", 31.0, 9.0)]
    records += [offline("a", cached_tokens=0), offline("b"), offline("c", status=Status.CANCELLED)]
    prompts = {"a": [1] * 90 + [2] * 10, "b": [1] * 90 + [3] * 10, "c": [4]}
    return burst_figures(PhaseResult(records, parse_counters(METRICS)), prompts, options)


def test_bursts_and_the_times_before_them_have_their_own_waits() -> None:
    tree = burst()
    assert tree["steady"]["ttft_ms"]["p99"] == pytest.approx(200)
    assert tree["burst"]["ttft_ms"]["p50"] == pytest.approx(3000)
    assert tree["burst"]["requests"] == tree["steady"]["requests"] == 2


def test_work_done_twice_is_what_was_computed_beyond_the_distinct_tokens() -> None:
    tree = burst()["offline"]
    # 100 + 40 were computed; 90 shared and twice 10 own tokens have to be.
    assert (tree["computed_tokens"], tree["computed_again"]) == (140, 30)
    assert tree["retractions"] == 5.0 and tree["recomputed_tokens"] is None
    assert tree["ran_dry"] is False


def report(experiment: str, arms: dict[str, Any], **changes: Any) -> list[str]:
    config = {
        "command": f"python -m eval.cache {experiment}", "job": "set",
        **dict.fromkeys(("machine", "date", "sglang", "torch", "python"), "0"),
        "options": dataclasses.asdict(default_options(experiment)),
        "bounds": {"infinite": 150, "belady, file order": 100, "belady, prefix order": 150},
        "load": {"lines": 2, "prompt_tokens": 200, "pool_tokens": 50, "pool_note": "given",
                 "sessions": 1, "turns": 2, "online_requests": 3} | changes,
    }  # fmt: skip
    summary = {name: over_repetitions(trees) for name, trees in arms.items()}
    text = summary_markdown(config, summary)
    assert f"    python -m eval.cache {experiment}" in text
    return text.splitlines()


def test_the_offline_report_shows_bounds_arms_and_the_target() -> None:
    trees = [offline_figures(PhaseResult([offline("a", end_s)]), 60) for end_s in (2.0, 4.0)]
    low = [offline_figures(PhaseResult([offline("a", cached_tokens=30)]), 60)]
    lines = report("offline", {"stock-lpm": low, "psm": trees, "psm-echo": low})
    assert "| *belady, file order* | 50.0% | 66.7% |  |  |  |  |" in lines
    assert "| psm | 60.0% | 100.0% | 0 | 3.0 [2.0-4.0] | 39 [26-52] | 0 |" in lines
    target = "at least 97% of the infinite cache's hits"
    assert f"- target: {target}: psm 100.0% (met), psm-echo 50.0% (missed)" in lines


def test_the_control_report_compares_with_the_best_stock_arm() -> None:
    def tree(cached: int, end_s: float) -> list[dict[str, Any]]:
        return [offline_figures(PhaseResult([offline("a", end_s, cached_tokens=cached)]), 60)]

    arms = {"stock-fcfs": tree(50, 2.0), "stock-lpm": tree(60, 4.0), "psm": tree(59, 2.0)}
    said = "\n".join(report("control", arms))
    assert "best stock arm's: psm -1.0 points (missed)" in said
    assert "fastest stock arm's: psm 1.00x (met)" in said
    assert "nothing to compare with" in "\n".join(report("control", {"psm": tree(1, 1.0)}))


def test_the_overlap_report_says_both_targets() -> None:
    lines = report("overlap", {"psm": [overlap(57)], "psm-echo": [overlap(60)]})
    assert "| psm | online | 60.0% | 57.0% | 95.0% | 1 | 0 | 1 |" in lines
    assert any("alone: psm -3.0 points (missed), psm-echo +0.0 points (met)" in x for x in lines)
    assert any("own alone: psm 90.0% (missed)" in line for line in lines)


def test_the_burst_report_shows_waits_and_work_done_twice() -> None:
    lines = report("burst", {"reserve-off": [burst()]})
    assert "| reserve-off | 200 | 200 | 3,000 | 3,000 | 5 | - | 30 | 2 | 7 |" in lines
