"""Conversations: prefixes that grow, cuts that keep them, files that are refused."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest

from echo_sgl.sim.trace_files import MAX_LINE_CHARS
from eval.workloads import DATA_DIR, WorkloadError
from eval.workloads.prompts import Tokenizer, count_tokens, load_tokenizer
from eval.workloads.sessions import (
    KNOWN,
    SessionLimits,
    cut_session,
    find_reader,
    load_sessions,
    read_calls,
    read_chats,
    read_delta,
    read_sessions,
    read_tau,
)

LIMITS = SessionLimits(max_prompt_tokens=40, max_answer_tokens=4, think_s=1.0)
has_data = pytest.mark.skipif(
    not all((DATA_DIR / name).is_file() for name in KNOWN.values()),
    reason="the real workloads are not here",
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


def write(tmp_path: Path, rows: list[Any]) -> Path:
    path = tmp_path / "set.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(orjson.dumps(row) + b"\n" for row in rows)))
    return path


def call(session: str, keep_chars: int, tail: str, output: str = "done") -> dict[str, Any]:
    return {"session": session, "keep_chars": keep_chars, "input_tail": tail, "output": output}


TAU = [
    {"system_prompt": "be kind"},
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "book it"},
            {"role": "assistant", "tool_calls": [{"name": "book"}]},
            {"role": "tool", "content": "booked"},
        ]
    },
]


def test_each_assistant_message_is_a_turn_whose_prompt_is_all_before_it(tmp_path: Path) -> None:
    [(name, calls)] = read_tau(write(tmp_path, TAU))
    assert name == "tau-0"
    start = "system: be kind\nuser: hi\nassistant:"
    assert calls == [
        (start, "hello"),
        (f"{start} hello\nuser: book it\nassistant:", '[{"name":"book"}]'),
    ]


def test_a_delta_coded_call_goes_on_from_its_own_session(tmp_path: Path) -> None:
    rows = [call("a", 0, "one two"), call("b", 0, "other"), call("a", 4, "three", "end")]
    sessions = dict(read_delta(write(tmp_path, rows)))
    assert sessions == {
        "a": [("one two", "done"), ("one three", "end")],
        "b": [("other", "done")],
    }


CHATS = {
    "LMSYS": {"conversation": [{"role": "user", "content": "hi"},
                               {"role": "assistant", "content": "hello"},
                               {"role": "user", "content": "go on"}], "turn": 1},
    "ShareGPT": {"id": "x", "conversations": [{"from": "human", "value": "hi"},
                                              {"from": "gpt", "value": "hello"},
                                              {"from": "human", "value": "go on"}]},
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_a_published_chat_is_a_session_of_the_turns_that_were_answered(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path, [CHATS[name], CHATS[name]])
    assert find_reader(path) is read_chats
    user = {"LMSYS": "user", "ShareGPT": "human"}[name]
    assert list(read_chats(path)) == [
        (f"chat-{number}", [(f"{user}: hi\nassistant:", "hello")]) for number in range(2)
    ]


@pytest.mark.parametrize("turns", ["hi", ["hi"], None, {"role": "user"}])
def test_a_chat_without_turns_is_refused(tmp_path: Path, turns: object) -> None:
    path = write(tmp_path, [{"conversation": turns}])
    with pytest.raises(WorkloadError, match=r"line 1: conversation or .*; a list of turns"):
        list(read_chats(path))


def test_whole_calls_of_agents_are_put_together_by_session(tmp_path: Path) -> None:
    """As LMCache publishes them."""
    rows = [
        {"timestamp": 1, "session_id": name, "input": prompt, "output": "done"}
        for name, prompt in [("a", "one"), ("b", "other"), ("a", "one two")]
    ]
    path = write(tmp_path, rows)
    assert find_reader(path) is read_calls
    assert dict(read_calls(path)) == {
        "a": [("one", "done"), ("one two", "done")],
        "b": [("other", "done")],
    }


def test_of_many_conversations_the_first_are_taken_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eval.workloads.sessions.MAX_SESSIONS", 2)
    path = write(tmp_path, [CHATS["LMSYS"]] * 3)
    assert [name for name, _ in read_sessions(read_chats, path)] == ["chat-0", "chat-1"]
    assert "only the first 2 conversations are taken" in capsys.readouterr().err


def test_a_long_line_is_not_held_to_find_out_what_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    path.write_text("[" + "{}," * 3_000_000 + "{}]")
    tracemalloc.start()
    assert find_reader(path) is None
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * 4 * MAX_LINE_CHARS


def test_a_session_is_cut_to_its_first_turns(tokenizer: Tokenizer) -> None:
    words = " apple" * 10
    calls = [("start" + words * number, "an answer of more than four tokens") for number in (1, 2)]
    calls += [("start" + words * 40, "too long"), ("start", "short again, but after the cut")]
    limits = dataclasses.replace(LIMITS, max_prompt_tokens=count_tokens(tokenizer, calls[1][0]))
    session = cut_session("s", calls, tokenizer, limits)
    assert [turn.prompt for turn in session.turns] == [calls[0][0], calls[1][0]]
    assert [turn.output_tokens for turn in session.turns] == [4, 4]
    assert all(0.5 <= turn.think_s <= 1.5 for turn in session.turns)
    assert cut_session("s", calls, tokenizer, limits) == session
    assert cut_session("t", calls, tokenizer, limits) != session


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"system": "x"}], "line 1: system_prompt is None; a string is needed"),
        ([{"system_prompt": "x"}, {"messages": "y"}], "line 2: messages is 'y'; a list is needed"),
        ([{"system_prompt": "x"}, ["y"]], "line 2: a JSON object is needed"),
        ([], "system_prompt is None"),
    ],
)
def test_a_bad_trajectory_is_refused(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        list(read_tau(write(tmp_path, rows)))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([call("a", 1, "x")], "line 1: keep_chars is 1; the input before has 0"),
        ([call("a", 0, "x"), call("a", 2, "y")], "line 2: keep_chars is 2"),
        ([{"session": "a", "keep_chars": 0, "output": ""}], "line 1: input_tail is None"),
        ([{"keep_chars": 0}], "line 1: session is None; a string is needed"),
    ],
)
def test_a_bad_call_is_refused(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        list(read_delta(write(tmp_path, rows)))
    assert said in str(caught.value)


def test_text_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("{\n")
    with pytest.raises(WorkloadError, match="line 1: not JSON"):
        list(read_delta(path))


def test_an_unknown_set_is_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(WorkloadError, match=r"sessions 'chat': .*; known are tau, miniswe"):
        load_sessions(["chat"], tokenizer, LIMITS, 1)


def test_a_file_of_conversations_is_known_by_its_first_line(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    assert find_reader(write(tmp_path, TAU)) is read_tau
    path = write(tmp_path, [call("a", 0, "one two")])
    assert find_reader(path) is read_delta
    [session] = load_sessions([str(path)], tokenizer, LIMITS, 3)
    assert [turn.prompt for turn in session.turns] == ["one two"]


@pytest.mark.parametrize("text", ["t_s,context_tokens\n", '{"timestamp": 1}\n', "[1]\n", ""])
def test_a_file_of_something_else_is_none(tmp_path: Path, tokenizer: Tokenizer, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert find_reader(path) is None
    with pytest.raises(WorkloadError, match=r"no conversations.* system_prompt, session"):
        load_sessions([str(path)], tokenizer, LIMITS, 1)


@has_data
@pytest.mark.parametrize("names", [["tau"], ["miniswe"], ["tau", "miniswe"]])
def test_the_real_sets_give_sessions_that_share_what_they_should(
    names: list[str], tokenizer: Tokenizer
) -> None:
    limits = SessionLimits(max_prompt_tokens=2600, max_answer_tokens=16, think_s=0.5)
    sessions = load_sessions(names, tokenizer, limits, 6)
    assert sessions == load_sessions(names, tokenizer, limits, 6)
    assert len(sessions) == 6 and len({session.name for session in sessions}) == 6
    for session in sessions:
        prompts = [turn.prompt for turn in session.turns]
        assert all(count_tokens(tokenizer, prompt) <= 2600 for prompt in prompts)
        # A turn goes on where the prompt before it ended.
        assert all(b.startswith(a) for a, b in itertools.pairwise(prompts))
    kinds = {session.name.startswith("tau-") for session in sessions}
    assert kinds == {name == "tau" for name in names}


@has_data
def test_too_small_a_limit_leaves_no_session_and_says_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(WorkloadError, match="first prompt of at most 40 tokens; allow longer"):
        load_sessions(["tau"], tokenizer, LIMITS, 3)
