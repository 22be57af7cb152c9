"""Files of online traffic: each kind is known by what it holds, and others are refused."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from eval.workloads import DATA_DIR, WorkloadError
from eval.workloads.clients import COLUMNS
from eval.workloads.online import read_online as read
from eval.workloads.sessions import KNOWN
from eval.workloads.traces import Arrival

has_data = pytest.mark.skipif(
    not all((DATA_DIR / name).is_file() for name in KNOWN.values()),
    reason="the real workloads are not here",
)


def test_clients_are_known_by_their_columns(tmp_path: Path) -> None:
    csv = tmp_path / "clients.csv"
    csv.write_text(f"{COLUMNS}\n0,1,2.0,1.0,Gamma,1.0,0.5,40,8\n600,1,2.0,1.0,Gamma,1.0,0.5,40,8\n")
    trace = read(csv, seed=3)
    assert trace == read(csv, seed=3) != read(csv, seed=4)
    assert len(trace) == pytest.approx(1200, rel=0.15)


def test_a_trace_is_read_as_ever_and_an_empty_file_is_refused(tmp_path: Path) -> None:
    csv, empty = tmp_path / "trace.csv", tmp_path / "tau.jsonl"
    csv.write_text("t_s,context_tokens,generated_tokens\n0,5,2\n")
    assert read(csv) == [Arrival(0.0, 5, 2)]
    empty.write_bytes(orjson.dumps({"system_prompt": "x"}))
    with pytest.raises(WorkloadError, match="holds no call"):
        read(empty)


@has_data
@pytest.mark.parametrize("name", KNOWN.values())
def test_real_agents_share_most_of_what_they_send(name: str) -> None:
    seen: set[int] = set()
    hits = blocks = 0
    for one in read(DATA_DIR / name):
        hits += sum(block in seen for block in one.blocks)
        blocks += len(one.blocks)
        seen.update(one.blocks)
    assert hits / blocks > 0.8  # 0.93 in blocks of 16 tokens
