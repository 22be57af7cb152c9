"""A few rounds of the crash table; the whole of it is `python -m eval.crash`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from eval.crash import PHASES, WINDOW_LINES, CrashError, Job, check, markdown, run, summarise


def test_killed_servers_lose_and_repeat_no_line(tmp_path: Path) -> None:
    jobs = list(run(tmp_path, rounds=len(PHASES), num_lines=150, seed=1))
    kills = [kill for job in jobs for kill in job.kills]
    assert [kill.phase for kill in kills] == list(PHASES)
    assert all(kill.num_lost_answers <= WINDOW_LINES for kill in kills)
    text = markdown(summarise(jobs, 150))
    assert all(f"| {phase} | 1 |" in text for phase in PHASES)


class FakeVictim:
    """Answers as a server whose output lacks a line, or has one twice."""

    def __init__(self, names: list[str]) -> None:
        self._content = "\n".join(f'{{"custom_id":"{name}"}}' for name in names).encode()
        self.http = self
        self.content = self._content

    def batch(self, batch_id: str) -> dict[str, object]:
        return {"status": "completed", "output_file_id": "file", "error_file_id": None}

    def get(self, path: str) -> FakeVictim:
        return self

    def calls(self) -> Counter[str]:
        return Counter()


@pytest.mark.parametrize(
    ("names", "fault"), [(["a"], "missing {'b'}"), (["a", "b", "b"], "'b': 1")]
)
def test_a_lost_or_repeated_line_ends_the_run(names: list[str], fault: str) -> None:
    with pytest.raises(CrashError, match=fault):
        check(FakeVictim(names), Job("batch", {"a": "1", "b": "2"}))  # type: ignore[arg-type]
