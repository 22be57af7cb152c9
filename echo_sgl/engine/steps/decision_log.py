"""What a rank decided at each step, written to a file where somebody asks for it.

Ranks that decide differently hang or answer wrongly; with `ECHO_SGL_DECISION_LOG=PREFIX` in the
environment each rank writes PREFIX.rankN, and equal files are the proof that they agree.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TextIO

DECISION_LOG_ENV = "ECHO_SGL_DECISION_LOG"


class DecisionLog:
    """One line a step: the clock, the limit, what runs with how many new tokens, who sits out."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @staticmethod
    def from_environment(rank: int) -> DecisionLog | None:
        prefix = os.environ.get(DECISION_LOG_ENV)
        if not prefix:
            return None
        # Line buffered: a server that is killed has written what it decided.
        return DecisionLog(open(f"{prefix}.rank{rank}", "w", buffering=1, encoding="utf-8"))

    def write(self, batch: Any, parked: Iterable[Any], *, now_s: float, limit_s: float) -> None:
        new_tokens = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(batch.reqs)
        runs = [f"{req.rid}:{new}" for req, new in zip(batch.reqs, new_tokens, strict=True)]
        sits_out = [req.rid for req in parked]
        self._file.write(f"{now_s!r} {limit_s!r} {' '.join(runs)} | {' '.join(sits_out)}\n")
