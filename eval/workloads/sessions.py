"""Conversations of several turns: each prompt is the one before, what was answered, and more.

The answers in a prompt are the recorded ones, not the server's, so that every server is
asked the same. A session is cut to its first turns: leaving out the middle of a
conversation would change its prefix, which is what a cache is measured by.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from echo_sgl.sim.trace_files import MAX_LINE_CHARS
from eval.workloads import WorkloadError, find_data, read_lines
from eval.workloads.prompts import Tokenizer, count_tokens
from eval.workloads.traces import tell_once

Row = Mapping[str, Any]
Call = tuple[str, str]  # whole prompt, answer
Reader = Callable[[Path], Iterator[tuple[str, list[Call]]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its whole prompt, the answer's length, and the wait before it is sent."""

    prompt: str
    output_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one conversation in order; each waits for the answer to the one before."""

    name: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session is cut to. `think_s` is the mean of what lies between two turns."""

    max_prompt_tokens: int
    max_answer_tokens: int
    think_s: float
    seed: int = 0


def read_tau(path: Path) -> Iterator[tuple[str, list[Call]]]:
    """Name and (prompt, answer) pairs of each trajectory of a tau-bench file.

    Errors: `WorkloadError` names the file, the line and the key.
    """
    rows = _rows(path)
    where, head = next(rows, (str(path), {}))
    system = f"system: {_text(where, head, 'system_prompt')}\n"
    for number, (where, row) in enumerate(rows):
        if not isinstance(messages := row.get("messages"), list):
            raise WorkloadError(f"{where}: messages is {messages!r:.60}; a list is needed")
        yield f"tau-{number}", list(_tau_turns(system, messages))


def read_delta(path: Path) -> Iterator[tuple[str, list[Call]]]:
    """Name and (prompt, answer) pairs of each session of a file of delta-coded agent calls.

    Errors: `WorkloadError` names the file, the line and the key.
    """
    sessions: dict[str, list[Call]] = {}
    for where, row in _rows(path):
        calls = sessions.setdefault(_text(where, row, "session"), [])
        keep_chars = row.get("keep_chars")
        before = calls[-1][0] if calls else ""
        if not isinstance(keep_chars, int) or not 0 <= keep_chars <= len(before):
            raise WorkloadError(
                f"{where}: keep_chars is {keep_chars!r}; the input before has {len(before)}"
            )
        prompt = before[:keep_chars] + _text(where, row, "input_tail")
        calls.append((prompt, _text(where, row, "output")))
    yield from sessions.items()


def read_calls(path: Path) -> Iterator[tuple[str, list[Call]]]:
    """Name and (prompt, answer) pairs of each session of a file of agents' whole calls.

    Errors: `WorkloadError` names the file, the line and the key.
    """
    sessions: dict[str, list[Call]] = {}
    for where, row in _rows(path):
        call = _text(where, row, "input"), _text(where, row, "output")
        sessions.setdefault(_text(where, row, "session_id"), []).append(call)
    yield from sessions.items()


def read_chats(path: Path) -> Iterator[tuple[str, list[Call]]]:
    """Name and (prompt, answer) pairs of each conversation, one a line, as chats are published.

    Errors: `WorkloadError` names the file and the line.
    """
    for number, (where, row) in enumerate(_rows(path)):
        turns = next((row[key] for key in CHAT_KEYS if key in row), None)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise WorkloadError(
                f"{where}: {' or '.join(CHAT_KEYS)} is {turns!r:.60}; a list of turns is needed"
            )
        yield f"chat-{number}", list(_tau_turns("", [_message(turn) for turn in turns]))


# LMSYS-Chat and WildChat; ShareGPT.
CHAT_KEYS = ("conversation", "conversations")
ANSWERER = {"gpt": "assistant", "chatgpt": "assistant"}  # as ShareGPT names it
READERS: dict[tuple[str, ...], Reader] = {  # by keys of the first line
    ("system_prompt",): read_tau,
    ("session",): read_delta,
    ("session_id", "input", "output"): read_calls,
    **{(key,): read_chats for key in CHAT_KEYS},
}
# Their prompts are held as texts; and no run gets through as many.
MAX_SESSIONS = 5000
KNOWN = {"tau": "taubench_airline_dev.jsonl.gz", "miniswe": "lmcache_miniswe.delta.jsonl.gz"}


def find_reader(path: Path) -> Reader | None:
    """What reads a file of conversations, by the keys of its first line; None: it holds none.

    Errors: `WorkloadError` when the file cannot be read.
    """
    _, first = next(read_lines(path, max_chars=MAX_LINE_CHARS), (1, ""))
    try:
        keys = orjson.loads(first) if first.startswith("{") else {}
    except orjson.JSONDecodeError:
        return None
    return next((reader for names, reader in READERS.items() if keys.keys() >= {*names}), None)


def read_sessions(reader: Reader, path: Path) -> list[tuple[str, list[Call]]]:
    """The first `MAX_SESSIONS` of a file; that there are more is said on stderr."""
    sessions = reader(path)
    first = list(itertools.islice(sessions, MAX_SESSIONS))
    if next(sessions, None):
        tell_once(f"warning: {path}: only the first {MAX_SESSIONS:,} conversations are taken")
    return first


def load_sessions(
    names: Sequence[str], tokenizer: Tokenizer, limits: SessionLimits, num_sessions: int
) -> list[Session]:
    """Up to `num_sessions` sessions of the sets, taken in turns, each set shuffled by seed.

    `names`: of `KNOWN`, or files of either kind, by path or by name among the real workloads.
    Errors: `WorkloadError` for an unknown set, and when no first turn fits the limit.
    """
    mixed = _in_turns([_one_set(name, tokenizer, limits) for name in names], num_sessions)
    if not mixed:
        raise WorkloadError(
            f"no session of {', '.join(names)} has a first prompt of at most "
            f"{limits.max_prompt_tokens} tokens; allow longer ones"
        )
    return mixed


def cut_session(
    name: str, calls: Sequence[Call], tokenizer: Tokenizer, limits: SessionLimits
) -> Session:
    """The first turns whose prompts fit; the think times depend on the seed and the name."""
    rng = random.Random(f"{limits.seed}/{name}")
    turns: list[Turn] = []
    for prompt, answer in calls:
        if count_tokens(tokenizer, prompt) > limits.max_prompt_tokens:
            break
        output_tokens = min(limits.max_answer_tokens, max(1, count_tokens(tokenizer, answer)))
        turns.append(Turn(prompt, output_tokens, limits.think_s * rng.uniform(0.5, 1.5)))
    return Session(name, tuple(turns))


def _one_set(name: str, tokenizer: Tokenizer, limits: SessionLimits) -> Iterator[Session]:
    """The set's sessions that have a turn, lazily: counting tokens takes time."""
    sessions = _read(name)
    random.Random(limits.seed).shuffle(sessions)
    cut = (cut_session(key, calls, tokenizer, limits) for key, calls in sessions)
    return (session for session in cut if session.turns)


def _read(name: str) -> list[tuple[str, list[Call]]]:
    try:
        path = find_data(KNOWN.get(name, name))
    except WorkloadError as error:
        raise WorkloadError(
            f"unknown sessions {name!r}: {error}; known are {', '.join(KNOWN)}"
        ) from error
    if (reader := find_reader(path)) is None:
        raise WorkloadError(
            f"{path} holds no conversations: its first line is no JSON object with one of the keys "
            + ", ".join(" and ".join(names) for names in READERS)
        )
    return read_sessions(reader, path)


def _in_turns(sets: list[Iterator[Session]], num_sessions: int) -> list[Session]:
    """One of each set after the other; a set that has run out is left out."""
    taken: list[Session] = []
    while sets and len(taken) < num_sessions:
        source = sets.pop(0)
        if session := next(source, None):
            taken.append(session)
            sets.append(source)
    return taken


def _tau_turns(system: str, messages: Sequence[Row]) -> Iterator[Call]:
    """The prompt ends where the answer begins, so that the next one goes on from there."""
    text = system
    for message in messages:
        role, content = message.get("role"), _content(message)
        if role == "assistant":
            yield f"{text}assistant:", content
        text += f"{role}: {content}\n"


def _content(message: Row) -> str:
    """What was said, or the tool calls as JSON where nothing was; a list of parts as JSON, too."""
    said = message.get("content") or message.get("tool_calls")
    return said if isinstance(said, str) else orjson.dumps(said).decode()


def _message(turn: Row) -> Row:
    """A turn of a chat with OpenAI's names."""
    if "from" not in turn:
        return turn
    role = str(turn["from"])
    return {"role": ANSWERER.get(role, role), "content": turn.get("value")}


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    for number, text in read_lines(path):
        where = f"{path} line {number}"
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise WorkloadError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise WorkloadError(f"{where}: a JSON object is needed, this is {text.strip()[:40]!r}")
        yield where, row


def _text(where: str, row: Row, key: str) -> str:
    if not isinstance(value := row.get(key), str):
        raise WorkloadError(f"{where}: {key} is {value!r:.60}; a string is needed")
    return value
