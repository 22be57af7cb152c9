"""What a step was predicted to take is asked for late, and is what it was when planned."""

from __future__ import annotations

import math
from typing import Any

from echo_sgl.batch_shape import BatchRow
from echo_sgl.engine.steps.step_log import COLUMNS, StepLog, StepNote
from tests.engine.test_held_steps import Clock, Steps

ROW = BatchRow(0, 0, 0, 0, 4, 400, 100)


def note(start_s: float) -> StepNote:
    return StepNote(start_s, ROW, math.inf, math.inf, 1, 0, 0, 0)


def test_several_are_asked_for_at_once_and_none_twice() -> None:
    asked: list[BatchRow] = []

    def predict_both_s(row: BatchRow) -> tuple[float, float]:
        asked.append(row)
        return len(asked) / 10, float(len(asked))

    log, notes = StepLog(predict_both_s), [note(1.0), note(2.0)]
    for one in notes:
        log.add(one)
    assert not asked
    log.predict()
    log.add(note(3.0))
    assert [(one.predicted_s, one.upper_s) for one in log.since(0.0)] == [
        (0.1, 1.0),
        (0.2, 2.0),
        (0.3, 3.0),
    ], "whoever reads them finds all"
    assert log.since(2.5)[0].as_row()[COLUMNS.index("upper_s")] == 3.0
    assert len(asked) == 3


class Learning(Clock):
    """Predicts ten times as much after each lesson."""

    factor = 1.0

    def predict_both_s(self, row: Any) -> tuple[float, float]:
        return self.factor, self.factor

    def learn(self, steps: Any, now_s: float) -> None:
        self.factor *= 10.0

    def advance(self, now_s: float) -> None:
        pass


def test_a_step_keeps_what_was_predicted_before_others_were_learned_from() -> None:
    steps = Steps(Learning())
    for number in range(1, 4):
        steps.begin()
        steps.control.launch(steps.batch(), (), num_pooled=0, num_evicted_tokens=0)
        steps.control.observe([(ROW, 0.01)], float(number))
    assert [one.predicted_s for one in steps.control.log.since(0.0)] == [1.0, 10.0, 100.0]
