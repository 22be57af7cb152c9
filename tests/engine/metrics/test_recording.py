"""What a server tells of its requests to a recording, and what it keeps to itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from echo_sgl.engine.metrics import recording
from echo_sgl.engine.metrics.recording import BLOCK_TOKENS, KEEP_S, LISTEN_S, RecordingLog
from echo_sgl.engine.requests.terms import RequestTerms
from echo_sgl.policies.limits.step_limit import Promise
from echo_sgl.types import Task

ONE, OTHER = "a" * 32, "b" * 32


def ended(prompt: list[int], *, outputs: int = 3, salt: str | None = None) -> Any:
    return SimpleNamespace(
        origin_input_ids=prompt,
        output_ids=[1] * outputs,
        cached_tokens=5,
        extra_key=None,
        cache_salt=salt,
        echo_terms=RequestTerms(Task.ONLINE, Promise(), 12.5, float("inf")),
    )


def listening() -> RecordingLog:
    log = RecordingLog()
    log.since(ONE, 0, now_s=100.0)
    return log


def blocks_of(log: RecordingLog, recording_id: str = ONE) -> list[list[int]]:
    return [row[-1] for row in log.since(recording_id, 0, now_s=101.0)["rows"]]


def test_nothing_is_noted_until_somebody_asks_and_after_they_left() -> None:
    log = RecordingLog()
    log.note_end(ended([1, 2]), 99.0)
    assert log.since(ONE, 0, now_s=100.0)["rows"] == []
    log.note_end(ended([1, 2]), 100.0 + LISTEN_S)
    log.note_end(ended([1, 2]), 101.0 + LISTEN_S)
    assert len(log.since(ONE, 0, now_s=300.0)["rows"]) == 1


def test_what_nobody_comes_back_for_is_not_kept() -> None:
    log = listening()
    log.note_end(ended([1, 2]), 101.0)
    gone_s = 100.0 + LISTEN_S + KEEP_S
    log.note_end(ended([3, 4]), gone_s)
    assert len(log.since(ONE, 0, now_s=101.0)["rows"]) == 1
    log.note_end(ended([3, 4]), gone_s + 2.0)
    answer = log.since(ONE, 0, now_s=gone_s + 3.0)
    assert (answer["rows"], answer["num_lost"]) == ([], 3)


def test_who_begins_gets_nothing_that_was_noted_for_others() -> None:
    log = listening()
    log.note_end(ended([1, 2]), 101.0)
    answer = log.since(OTHER, None, now_s=101.0)
    assert (answer["rows"], answer["next"], answer["num_lost"]) == ([], 1, 0)
    log.note_end(ended([3, 4]), 102.0)
    assert len(log.since(OTHER, answer["next"], now_s=102.0)["rows"]) == 1


def test_a_row_has_times_and_lengths() -> None:
    log = listening()
    log.note_end(ended(list(range(100))), 101.0)
    answer = log.since(ONE, 0, now_s=101.0)
    row = dict(zip(answer["columns"], answer["rows"][0], strict=True))
    assert len(row.pop("blocks")) == -(-100 // BLOCK_TOKENS)
    assert row == {
        "at_s": 12.5,
        "prompt_tokens": 100,
        "cached_tokens": 5,
        "output_tokens": 3,
        "class": "online",
    }
    assert answer["next"] == 1


def test_prompts_that_begin_alike_share_ids_as_far_as_they_do() -> None:
    log = listening()
    shared = list(range(BLOCK_TOKENS))
    log.note_end(ended([*shared, 1]), 101.0)
    log.note_end(ended([*shared, 2]), 101.0)
    log.note_end(ended([*shared, 1], salt="another tenant"), 101.0)
    one, two, three = blocks_of(log)
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert not set(one) & set(three)


def test_ids_of_two_recordings_or_servers_tell_nothing_of_each_other() -> None:
    logs = [listening(), listening()]
    for log in logs:
        log.note_end(ended([1, 2, 3]), 101.0)
    found = [*blocks_of(logs[0]), *blocks_of(logs[0], OTHER), *blocks_of(logs[1])]
    assert len({blocks[0] for blocks in found}) == 3


def test_a_request_without_answer_is_left_out() -> None:
    log = listening()
    log.note_end(ended([1, 2], outputs=0), 101.0)
    assert blocks_of(log) == []


@pytest.mark.parametrize(("name", "value"), [("CAPACITY", 3), ("MAX_BLOCKS_KEPT", 3)])
def test_what_is_kept_is_bounded_and_what_was_lost_is_counted(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(recording, name, value)
    log = listening()
    for token in range(5):
        log.note_end(ended([token]), 101.0)
    answer = log.since(ONE, 1, now_s=102.0)
    assert (len(answer["rows"]), answer["num_lost"], answer["next"]) == (3, 1, 5)


def test_what_ended_while_nobody_listened_is_counted_as_lost() -> None:
    log = listening()
    for now_s in (101.0, 101.0 + LISTEN_S, 102.0 + LISTEN_S):
        log.note_end(ended([1]), now_s)
    log.since(OTHER, 0, now_s=300.0)
    log.note_end(ended([1]), 301.0)
    answer = log.since(ONE, 0, now_s=302.0)
    assert (len(answer["rows"]), answer["num_lost"], answer["next"]) == (2, 2, 4)


def test_a_restarted_server_tells_that_its_numbers_are_of_another_log() -> None:
    before, after = listening(), listening()
    before.note_end(ended([1]), 101.0)
    after.note_end(ended([1]), 101.0)
    names = [log.since(ONE, 0, now_s=102.0)["log"] for log in (before, before, after)]
    assert names[0] == names[1] != names[2]
