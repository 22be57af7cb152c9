"""Lines that share a prompt prefix come one after the other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batches.lines.job_line import (
    CHAT_ANSWER_TOKENS,
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    MOST_REQUESTS,
    BatchLine,
)
from echo_sgl.batches.lines.prefix_order import (
    CHUNK_BYTES,
    MAX_OUTPUT_TOKENS,
    MAX_PART_TOKENS,
    estimated_tokens,
    prefix_key,
    prompt_bytes,
)


def completion(prompt: Any, **body: Any) -> BatchLine:
    return BatchLine("id", COMPLETIONS_URL, {"model": "m", "prompt": prompt, **body})


def chat(*contents: Any, **body: Any) -> BatchLine:
    messages = [{"role": "user", "content": content} for content in contents]
    return BatchLine("id", CHAT_URL, {"model": "m", "messages": messages, **body})


def key_of(line: BatchLine) -> bytes:
    return prefix_key(line, prompt_bytes(line))


def tokens_of(line: BatchLine) -> int:
    return estimated_tokens(line, len(prompt_bytes(line)))


def shared(left: bytes, right: bytes) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in pairs)


TEXTS = st.lists(st.sampled_from(["a" * CHUNK_BYTES, "b" * CHUNK_BYTES, "c"]), max_size=6)


@given(st.lists(TEXTS.map("".join), min_size=1, max_size=20))
def test_sorting_by_key_keeps_every_group_with_a_common_prefix_together(texts: list[str]) -> None:
    ordered = sorted(texts, key=lambda text: key_of(completion(text)))
    for num_chunks in range(6):
        end = num_chunks * CHUNK_BYTES
        prefixes = [text[:end] for text in ordered if len(text) >= end]
        groups = [prefix for prefix, _ in itertools.groupby(prefixes)]
        assert len(groups) == len(set(groups))


def test_keys_share_as_many_chunks_as_the_prompts() -> None:
    document = "d" * 10 * CHUNK_BYTES
    left, right = (key_of(completion(document + end * CHUNK_BYTES)) for end in "xy")
    assert shared(left, right) // 4 == 11  # 10 chunks after the namespace


def test_a_key_takes_a_sixteenth_of_its_prompt() -> None:
    assert len(key_of(completion("x" * 64_000))) == 4 + 64_000 // 16


@pytest.mark.parametrize(
    "other",
    [
        completion("text", lora_path="adapter"),
        completion("text", cache_salt="salt"),
        completion("text", extra_key="key"),
        completion("text", model="n"),
        BatchLine("id", EMBEDDINGS_URL, {"model": "m", "input": "text"}),
    ],
)
def test_requests_that_never_share_cache_are_apart_from_the_first_byte(other: BatchLine) -> None:
    assert key_of(other)[:4] != key_of(completion("text"))[:4]


def test_tools_stand_before_the_turns_of_a_chat() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt_bytes(chat("hello", tools=tools)).startswith(b'[{"type":"function"')


def test_text_parts_of_a_message_count_as_its_text() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert prompt_bytes(chat(parts)) == prompt_bytes(chat("one two"))


def test_token_ids_are_ordered_by_their_ids() -> None:
    keys = [key_of(completion([*range(64), last])) for last in (1, 2)]
    assert shared(*keys) >= 4 * 4
    assert keys[0] != keys[1]


@pytest.mark.parametrize("prompt", [None, 3, [], [{}], [None, ["x"]], {"text": 3}, [-1, 2**40]])
def test_any_prompt_that_json_can_hold_has_a_key(prompt: Any) -> None:
    assert key_of(completion(prompt))
    assert key_of(chat(prompt))


def test_a_line_is_estimated_by_its_prompt_and_its_output_limit() -> None:
    line = completion("x" * 400, max_tokens=50)
    assert tokens_of(line) == 400 // 4 + 1 + 50
    newer = chat("", max_tokens=1, max_completion_tokens=70)
    assert estimated_tokens(newer, 0) == 71


def embedding(given: Any, **body: Any) -> BatchLine:
    return BatchLine("id", EMBEDDINGS_URL, {"model": "m", "input": given, **body})


def test_every_answer_counts_and_the_answers_to_a_prompt_share_it() -> None:
    text = "x" * 400
    assert tokens_of(completion(text, max_tokens=50, n=16)) == 100 + 1 + 16 * 50
    assert tokens_of(completion([text, text], max_tokens=50, n=16)) == 200 + 2 + 32 * 50
    assert tokens_of(chat("", n=2)) == tokens_of(chat("")) + CHAT_ANSWER_TOKENS
    assert tokens_of(completion(text, max_tokens=50, best_of=16)) == 100 + 1 + 50


def test_an_embedding_generates_nothing() -> None:
    assert tokens_of(embedding(["x" * 400] * 3, n=9, max_tokens=50)) == 300 + 3 + 3
    assert tokens_of(embedding(list(range(100)))) == 100 + 1 + 1


@pytest.mark.parametrize("given", [30, 30.0, "30"])
def test_a_number_is_read_as_the_engine_does(given: object) -> None:
    assert tokens_of(completion("", max_tokens=given, n=2)) == 1 + 2 * 30
    assert tokens_of(completion("", max_tokens=2, n=given)) == 1 + 2 * 30


@pytest.mark.parametrize("given", [0, -3, None, "many", "1" * 5000, [2], {}, True, 0.5])
def test_what_the_engine_refuses_as_n_counts_as_one_answer(given: object) -> None:
    assert completion("", n=given).num_requests == 1


def test_no_line_is_more_than_the_database_can_hold() -> None:
    line = completion(["x"] * 1000, n=2**64 - 1, max_tokens=2**64 - 1)
    assert line.num_requests == MOST_REQUESTS
    assert tokens_of(line) < 2**63


@pytest.mark.parametrize(
    ("line", "num_prompts"),
    [
        (completion("one"), 1),
        (completion([1, 2, 3]), 1),
        (completion(["one", "two"]), 2),
        (completion([[1, 2], [3]]), 2),
        (completion([]), 1),
        (chat("one", "two"), 1),
        (embedding("one"), 1),
        (embedding([1, 2, 3]), 1),
        (embedding(["one", "two"]), 2),
        (embedding([{"text": "one"}, {"image": "two"}]), 2),
    ],
)
def test_a_list_of_prompts_is_so_many_and_one_of_token_ids_is_one(
    line: BatchLine, num_prompts: int
) -> None:
    assert line.num_prompts == num_prompts


def test_a_picture_counts_as_what_a_model_makes_of_it_and_not_by_its_bytes() -> None:
    text = {"type": "text", "text": "x" * 40_000}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    words = tokens_of(chat([text], max_tokens=1))
    assert tokens_of(chat([picture, text, picture], max_tokens=1)) == words + 2 * MAX_PART_TOKENS
    link = {"type": "image_url", "image_url": {"url": "http://host/a.png"}}
    assert words < tokens_of(chat([link, text], max_tokens=1)) < words + 30
    assert tokens_of(chat("A" * 400_000, max_tokens=1)) > 100_000


@pytest.mark.parametrize("prompt", [[[1], [2, 3]], [[[1]], [[2], [3]]], [[], [1, 2, 3]]])
def test_nested_token_ids_count_as_their_ids_in_a_row(prompt: Any) -> None:
    assert prompt_bytes(completion(prompt)) == prompt_bytes(completion([1, 2, 3]))


@pytest.mark.parametrize("limit", [MAX_OUTPUT_TOKENS, 2**63 - 1, 2**64 - 1])
def test_an_absurd_output_limit_is_estimated_as_the_longest_one_that_any_engine_has(
    limit: int,
) -> None:
    assert estimated_tokens(completion("", max_tokens=limit), 0) == MAX_OUTPUT_TOKENS + 1
