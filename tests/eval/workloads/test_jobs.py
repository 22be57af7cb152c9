"""Offline jobs: refused lines, text sets, the demo's own job, prompts of an exact length."""

from __future__ import annotations

import ast
import gzip
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo_sgl.errors import EchoError
from eval.workloads import DATA_DIR, WorkloadError
from eval.workloads.jobs import (
    batch_line,
    limit_answers,
    read_job,
    shuffled,
    text_set_files,
    text_set_lines,
    write_job,
)
from eval.workloads.prompts import (
    SyntheticText,
    Tokenizer,
    TracePrompts,
    count_tokens,
    cut_to_tokens,
    load_tokenizer,
)
from eval.workloads.stdlib_job import (
    MAX_DOCUMENT_TOKENS,
    MIN_DOCUMENT_TOKENS,
    StdlibJob,
    defined_names,
)
from eval.workloads.traces import Arrival

GOOD = batch_line("a", {"model": "m", "prompt": "p", "max_tokens": 5})


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> SyntheticText:
    return SyntheticText(tokenizer, seed=0)


def text_set(tmp_path: Path, prefixes: list[Any], requests: list[Any]) -> tuple[Path, Path]:
    for kind, rows in (("prefixes", prefixes), ("requests", requests)):
        data = b"".join(orjson.dumps(row) + b"\n" for row in rows)
        (tmp_path / f"set.{kind}.jsonl.gz").write_bytes(gzip.compress(data))
    return text_set_files(str(tmp_path / "set"))


def test_a_written_job_reads_back_equal(tmp_path: Path) -> None:
    lines = [GOOD, GOOD | {"custom_id": "b"}]
    write_job(tmp_path / "deep" / "job.jsonl", lines)
    assert read_job(tmp_path / "deep" / "job.jsonl") == lines


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"{", "line 2: not JSON"),
        (b"[1]", "line 2: a JSON object is needed, this is '[1]'"),
        (b"{}", "line 2: no key 'custom_id'"),
        (orjson.dumps(GOOD), "line 2: custom_id 'a' was used by an earlier line"),
        (orjson.dumps(GOOD | {"custom_id": 7}), "custom_id is 7; it must be a str"),
        (orjson.dumps(GOOD | {"custom_id": "b", "url": "/v1/x"}), "url is '/v1/x'; allowed are"),
        (orjson.dumps(GOOD | {"custom_id": "b", "body": "x"}), "body is 'x'; it must be a dict"),
        (orjson.dumps(GOOD | {"custom_id": "b", "body": {"stream": True}}), "body.stream is set"),
        (
            orjson.dumps(GOOD | {"custom_id": "b", "url": "/v1/chat/completions"}),
            "line 2: body.messages is None; /v1/chat/completions needs it",
        ),
        (
            orjson.dumps(GOOD | {"custom_id": "b", "body": {"messages": []}}),
            "line 2: body.prompt is None; /v1/completions needs it",
        ),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, bad: bytes, said: str) -> None:
    path = tmp_path / "job.jsonl"
    path.write_bytes(orjson.dumps(GOOD) + b"\n" + bad + b"\n")
    with pytest.raises(WorkloadError) as caught:
        read_job(path)
    assert said in str(caught.value) and isinstance(caught.value, EchoError)


def test_a_job_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf" + orjson.dumps(batch_line("q-1", {"model": "m", "prompt": "x"}))
    for name, data in (("job.jsonl", text), ("job.jsonl.GZ", gzip.compress(text))):
        (tmp_path / name).write_bytes(data)
        assert [line["custom_id"] for line in read_job(tmp_path / name)] == ["q-1"]


def test_an_empty_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.jsonl").write_text("\n")
    with pytest.raises(WorkloadError, match="holds no line"):
        read_job(tmp_path / "job.jsonl")


def test_a_text_set_gives_prefix_plus_suffix_with_the_recorded_answer_length(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    files = text_set(
        tmp_path,
        [{"prefix_id": "p", "prefix": "one two three four five six seven"}],
        [{"id": "p/0", "prefix_id": "p", "suffix": " why?", "out_tokens": 9},
         {"id": "p/1", "prefix_id": "p", "suffix": " how?", "out_tokens": 0}],
    )  # fmt: skip
    whole = text_set_lines(files, tokenizer, model="m", document_tokens=0)
    assert [line["custom_id"] for line in whole] == ["p/0", "p/1"]
    assert whole[0]["body"]["prompt"] == "one two three four five six seven why?"
    assert [line["body"]["max_tokens"] for line in whole] == [9, 1]
    cut = text_set_lines(files, tokenizer, model="m", document_tokens=3)
    start = cut[0]["body"]["prompt"].removesuffix(" why?")
    assert "one two three four five six seven".startswith(start)
    assert count_tokens(tokenizer, start) == 3


def test_more_parts_of_a_document_make_a_longer_job_of_whole_parts(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    long, short = "one two three four five six seven eight", "one"
    prefixes = [{"prefix_id": "l", "prefix": long}, {"prefix_id": "s", "prefix": short}]
    requests = [
        {"id": f"{name}0", "prefix_id": name, "suffix": "?", "out_tokens": 2} for name in "ls"
    ]
    files = text_set(tmp_path, prefixes, requests)
    lines = text_set_lines(files, tokenizer, model="m", document_tokens=3, document_parts=99)
    num_parts = count_tokens(tokenizer, long) // 3
    assert [line["custom_id"] for line in lines] == ["l0", "s0"] + [
        f"l0/{part}" for part in range(1, num_parts)
    ]
    longs = [line["body"]["prompt"].removesuffix("?") for line in lines if line is not lines[1]]
    assert long.startswith("".join(longs)) and num_parts > 1
    one = text_set_lines(files, tokenizer, model="m", document_tokens=3)
    assert lines[:2] == one


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "x", "prefix_id": "q", "suffix": "s", "out_tokens": 1}, "prefix_id 'q' is not in"),
        ({"id": "x", "prefix_id": "p", "suffix": "s"}, "no key 'out_tokens'"),
        ({"id": "x", "prefix_id": "p", "suffix": "s", "out_tokens": -1}, "out_tokens is -1"),
        ({"id": "x", "prefix_id": "p", "suffix": "s", "out_tokens": True}, "must be a int"),
    ],
)
def test_a_bad_row_of_a_text_set_is_refused_with_its_line(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], said: str
) -> None:
    files = text_set(tmp_path, [{"prefix_id": "p", "prefix": "x"}], [row])
    with pytest.raises(WorkloadError) as caught:
        text_set_lines(files, tokenizer, model="m", document_tokens=0)
    assert "set.requests.jsonl.gz line 1" in str(caught.value) and said in str(caught.value)


def test_a_text_set_that_is_nowhere_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"no file nothing\.prefixes"):
        text_set_files("nothing")


@pytest.mark.skipif(not DATA_DIR.is_dir(), reason="the real workloads are not here")
@pytest.mark.parametrize(
    ("name", "num_lines"),
    [("qmsum_val", 272), ("loogle_shortdep_qa", 69), ("bbh_dev", 4000), ("humaneval", 164)],
)
def test_a_real_text_set_reads_whole(tokenizer: Tokenizer, name: str, num_lines: int) -> None:
    lines = text_set_lines(text_set_files(name), tokenizer, model="m", document_tokens=500)
    assert len(lines) == len({line["custom_id"] for line in lines}) == num_lines
    assert all(line["body"]["prompt"] and line["body"]["max_tokens"] >= 1 for line in lines)


def test_answers_are_limited_and_never_lengthened() -> None:
    lines = [batch_line("a", {"max_tokens": 5}), batch_line("b", {"max_tokens": 50}),
             batch_line("c", {})]  # fmt: skip
    assert [line["body"]["max_tokens"] for line in limit_answers(lines, 10)] == [5, 10, 10]
    assert limit_answers(lines, 0) == lines


@pytest.mark.parametrize(("given", "limited"), [("7", 7), (12.0, 10), ("many", 10)])
def test_a_limit_is_read_as_the_server_reads_it(given: object, limited: int) -> None:
    line = batch_line("q-1", {"model": "m", "prompt": "x", "max_tokens": given})
    assert limit_answers([line], 10)[0]["body"]["max_tokens"] == limited


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answers_limit_keeps_its_name(name: str) -> None:
    bodies = [{name: 50}, {name: None}, {}, {"max_tokens": 80, "max_completion_tokens": 3}]
    lines = [{"custom_id": "a", "body": body} for body in bodies]
    limited = [line["body"] for line in limit_answers(lines, 10)]
    assert limited[0] == {name: 10}
    assert limited[1]["max_tokens"] == limited[2]["max_tokens"] == 10
    assert limited[3] == {"max_tokens": 10, "max_completion_tokens": 3}


def test_shuffling_is_by_seed_and_loses_no_line() -> None:
    lines = [batch_line(str(number), {}) for number in range(50)]
    assert shuffled(lines, 1) == shuffled(lines, 1) != shuffled(lines, 2)
    assert sorted(line["custom_id"] for line in shuffled(lines, 1)) == sorted(map(str, range(50)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.integers(0, 5000), num_tokens=st.integers(1, 600))
def test_a_synthetic_text_has_exactly_the_asked_tokens(
    texts: SyntheticText, tokenizer: Tokenizer, index: int, num_tokens: int
) -> None:
    text = texts.text(index, num_tokens)
    assert count_tokens(tokenizer, text) == num_tokens


def test_equal_seeds_give_equal_texts_and_others_do_not(
    texts: SyntheticText, tokenizer: Tokenizer
) -> None:
    assert SyntheticText(tokenizer, seed=0).text(3, 50) == texts.text(3, 50)
    assert SyntheticText(tokenizer, seed=1).text(3, 50) != texts.text(3, 50)


def test_no_two_synthetic_texts_start_alike_unless_asked(
    texts: SyntheticText, tokenizer: Tokenizer
) -> None:
    encoded = [tokenizer.encode(texts.text(index, 20)) for index in range(1000)]
    assert len({tokens[0] for tokens in encoded}) == 1000
    start = texts.text(2000, 30)
    first, second = (texts.text(index, 50, shared_start=start) for index in (0, 1))
    assert first.startswith(start) and second.startswith(start) and first != second
    assert count_tokens(tokenizer, first) == count_tokens(tokenizer, second) == 50


def common_tokens(tokenizer: Tokenizer, *texts: str) -> int:
    """How many tokens two texts begin with together."""
    pairs = zip(*(tokenizer.encode(text) for text in texts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


BLOCKS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(blocks=st.tuples(BLOCKS, BLOCKS), size=st.floats(20, 60), left_out=st.integers(0, 15))
def test_prompts_of_a_trace_share_the_blocks_that_they_begin_with(
    texts: SyntheticText,
    tokenizer: Tokenizer,
    blocks: tuple[list[int], list[int]],
    size: float,
    left_out: int,
) -> None:
    """Ids of blocks are chained, as those of Mooncake are: an equal one follows equal ones."""
    chained = [
        tuple(hash(tuple(ids[: n + 1])) % (1 << 62) for n in range(len(ids))) for ids in blocks
    ]
    lengths = [round(len(ids) * size) - left_out for ids in chained]
    arrivals = [Arrival(0.0, *pair, size) for pair in zip(lengths, [1, 1], chained, strict=True)]
    prompts = TracePrompts(texts)
    made = [prompts.text(index, one) for index, one in enumerate(arrivals)]
    assert [count_tokens(tokenizer, text) for text in made] == lengths
    num_shared = len(set(chained[0]) & set(chained[1]))
    shared = min(round(num_shared * size), *lengths)
    assert shared <= common_tokens(tokenizer, *made) <= shared + 1


def test_a_prompt_of_many_blocks_is_counted_as_a_whole(
    texts: SyntheticText, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block, a minute goes by for each long prompt; and it would be the same text."""
    one = Arrival(0.0, 1990, 1, tuple(range(125)), 16)
    counted: list[int] = []
    monkeypatch.setattr(texts, "count", lambda text: counted.append(len(text)) or count(text))
    count = SyntheticText(tokenizer, seed=0).count
    prompts = TracePrompts(texts)
    text = prompts.text(0, one)
    assert sum(counted) <= 2 * len(text)
    assert count(text) == 1990
    ends = [(place, min(1990, 16 * (place + 1))) for place in range(125)]
    assert prompts._counted(one, ends, "") == text


def test_a_start_that_all_share_goes_before_the_blocks(
    texts: SyntheticText, tokenizer: Tokenizer
) -> None:
    start = texts.text(900, 30)
    prompts = TracePrompts(texts)
    arrivals = [Arrival(0.0, 80, 1, (1, 2 + n), 25) for n in range(2)]
    made = [prompts.text(n, one, shared_start=start) for n, one in enumerate(arrivals)]
    assert all(text.startswith(start) for text in made)
    assert common_tokens(tokenizer, *made) == 55
    assert [count_tokens(tokenizer, text) for text in made] == [80, 80]


def test_a_trace_that_tells_nothing_of_its_prompts_has_none_alike(
    texts: SyntheticText, tokenizer: Tokenizer
) -> None:
    prompts = TracePrompts(texts)
    made = [prompts.text(index, Arrival(0.0, 40, 1)) for index in range(2)]
    assert common_tokens(tokenizer, *made) == 0


def test_a_shared_start_longer_than_the_text_is_refused(texts: SyntheticText) -> None:
    with pytest.raises(WorkloadError, match="no text of 5 tokens"):
        texts.text(0, 5, shared_start=texts.text(1, 30))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=200), max_tokens=st.integers(1, 100))
def test_a_cut_text_is_a_start_of_the_whole(
    tokenizer: Tokenizer, text: str, max_tokens: int
) -> None:
    cut = cut_to_tokens(tokenizer, text, max_tokens)
    assert text.startswith(cut)
    assert len(tokenizer.encode(cut, add_special_tokens=False)) <= max_tokens


@pytest.fixture(scope="module")
def stdlib_lines(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return StdlibJob("m", num_documents=12, questions_per_document=20).lines(tokenizer)


def test_the_stdlib_job_asks_twenty_questions_about_twelve_documents(
    stdlib_lines: list[dict[str, Any]],
) -> None:
    per_document = Counter(line["custom_id"].split("/")[0] for line in stdlib_lines)
    assert len(per_document) == 12 and set(per_document.values()) == {20}
    assert len({line["body"]["prompt"] for line in stdlib_lines}) == 240


def test_the_stdlib_jobs_documents_are_the_interpreters_own_and_of_the_asked_size(
    stdlib_lines: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    for line in stdlib_lines:
        name = line["custom_id"].split("/")[0]
        document = line["body"]["prompt"].split("\n", 1)[1].rsplit("\n\n# Question:", 1)[0]
        module = Path(ast.__file__).with_name(name)
        assert module.read_text(encoding="utf-8").startswith(document)
        assert MIN_DOCUMENT_TOKENS <= count_tokens(tokenizer, document) <= MAX_DOCUMENT_TOKENS


def test_the_stdlib_jobs_questions_name_what_the_document_defines(
    stdlib_lines: list[dict[str, Any]],
) -> None:
    for line in stdlib_lines:
        document, question = line["body"]["prompt"].rsplit("# Question:", 1)
        names = {
            word.split("(")[0].rstrip(":")
            for before, word in itertools.pairwise(document.split())
            if before in ("def", "class")
        }
        assert names & set(question.replace("?", " ").replace(",", " ").replace(".", " ").split())


def test_the_stdlib_job_is_mixed_and_equal_for_equal_seeds(
    stdlib_lines: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    names = [line["custom_id"].split("/")[0] for line in stdlib_lines]
    neighbours = sum(first == second for first, second in itertools.pairwise(names))
    assert neighbours < len(names) / 4
    assert StdlibJob("m", num_documents=12).lines(tokenizer) == stdlib_lines
    assert StdlibJob("m", num_documents=12, seed=1).lines(tokenizer) != stdlib_lines


def test_more_documents_than_the_library_has_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(WorkloadError, match=r"5000 documents were asked for; .* ask for fewer"):
        StdlibJob("m", num_documents=5000).lines(tokenizer)


def test_defined_names_are_those_above_the_line_in_order() -> None:
    source = "class A:\n    def f(self): ...\n\nasync def g(): ...\ndef f(): ...\ndef late(): ...\n"
    assert defined_names(source, end_line=5) == ("A", "f", "g")
