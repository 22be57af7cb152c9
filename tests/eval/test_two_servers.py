"""What the comparison of one server with two promises, and how it is shown."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from eval.two_servers.report import markdown
from eval.two_servers.run import ARMS, FleetError, check, cpu_s


def write(path: Path, names: list[str]) -> Path:
    path.write_bytes(b"".join(orjson.dumps({"custom_id": name}) + b"\n" for name in names))
    return path


def test_files_with_each_line_once_pass(tmp_path: Path) -> None:
    check(write(tmp_path / "out.jsonl", ["b", "a"]), ["a", "b"])


@pytest.mark.parametrize(
    ("found", "errors", "fault"),
    [
        (["a"], [], "missing {'b'}"),
        (["a", "b", "b"], [], "'b': 1"),
        (["a"], ["b"], "1 lines failed"),
    ],
)
def test_a_lost_repeated_or_failed_line_ends_the_run(
    tmp_path: Path, found: list[str], errors: list[str], fault: str
) -> None:
    output = write(tmp_path / "out.jsonl", found)
    write(tmp_path / "out.errors.jsonl", errors)
    with pytest.raises(FleetError, match=fault):
        check(output, ["a", "b"])


def test_the_cpu_time_of_a_process_is_its_own() -> None:
    before_s, start_s = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - start_s < 0.2:
        sum(range(10_000))
    assert 0.15 <= cpu_s(os.getpid()) - before_s <= time.process_time() - start_s + 0.05


@pytest.mark.parametrize("is_routed", [True, False])
def test_the_table_has_a_row_for_each_arm(is_routed: bool) -> None:
    figures = {"seconds": 10.0, "lines_per_s": 24.0, "tokens_per_s": 5e4, "hit_ratio": 0.9}
    figures["machine_load"] = 2.4
    rows = [
        {"arm": arm.name, **figures, "lines_by_server": [200, 40], "http_cpu_s": 2.0 + index}
        for index, arm in enumerate(ARMS)
    ]
    summary: dict[str, Any] = {"machine": "M", "lines": 240, "window_lines": 32, "arms": rows}
    routed = {"version": "9", "statuses": {"/v1/files": 404}, "metrics_by_class": True}
    text = markdown(summary | {"router": routed if is_routed else None})
    assert text.count("| 10.0 | 24.0 | 50,000 | 90.0% | 200 + 40 | 2 |") == len(ARMS)
    assert "20.0% of a core (8.3 ms a line) with the job in the batch service" in text
    assert "30.0% of a core (12.5 ms a line) with the same lines from a client" in text
    assert ("sglang-router 9: `/v1/files` 404" in text) is is_routed
