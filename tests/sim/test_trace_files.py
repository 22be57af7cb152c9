"""Traces in each known format, and what is said about those that cannot be simulated."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from echo_sgl.sim.server import simulate
from echo_sgl.sim.trace_columns import TraceFileError
from echo_sgl.sim.trace_files import read_trace_file
from echo_sgl.types import Task
from tests.sim.workloads import server

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_IMAGES = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-15 00:00:01.250000,0,374,44
2024-10-15 00:00:02.500000,2,1396,109
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 2]}
"""
BAILIAN = """{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 20, \
"output_length": 5, "type": "text", "turn": 1, "hash_ids": [7, 8]}
{"chat_id": 2, "parent_chat_id": 1, "timestamp": 63.6, "input_length": 40, "output_length": 4, \
"type": "text", "turn": 2, "hash_ids": [7, 9, 10]}
"""
SPLITWISE = """request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,\
token_size
0,2,0,1,1,4096,32
1,2,0,3.5,1,2048,8
"""
VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
"""


def written(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "name", "form", "times"),
    [
        (AZURE, "t.csv", "Azure", [0.0, 4.314579]),
        (BURST_GPT, "t.csv", "BurstGPT", [0.0, 40.0]),
        (MOONCAKE, "t.jsonl", "Mooncake", [0.0, 2.0]),
        ("t_s,context_tokens,generated_tokens\n0,3,4\n1.5,5,6\n", "t.csv", "plain", [0.0, 1.5]),
        (SPLITWISE, "t.csv", "SplitWise", [0.0, 2.5]),
        (VIDUR, "t.csv", "Vidur", [0.0, 4.314579]),
        (BAILIAN, "t.jsonl", "Qwen-Bailian", [0.0, 2.5]),
        (MOONCAKE, "t.ndjson", "Mooncake", [0.0, 2.0]),
        ("\ufeff\n " + MOONCAKE, "T.JSONL", "Mooncake", [0.0, 2.0]),
        (AZURE, "t.json.csv", "Azure", [0.0, 4.314579]),
        (AZURE_IMAGES, "t.csv", "Azure", [0.0, 1.25]),
    ],
)
def test_a_known_format_is_told_by_its_columns(
    tmp_path: Path, text: str, name: str, form: str, times: list[float]
) -> None:
    read = read_trace_file(written(tmp_path, text, name))
    assert read.format == form
    assert list(read.trace.at_s) == pytest.approx(times, abs=1e-5)
    assert read.warnings == ()


def test_hash_ids_are_prefixes_that_requests_share(tmp_path: Path) -> None:
    trace = read_trace_file(written(tmp_path, MOONCAKE, "t.jsonl")).trace
    first, second = trace.request(0), trace.request(1)
    assert list(first.sizes) == [512, 188]
    assert first.blocks[0] == second.blocks[0] == 0
    assert first.blocks[1] != second.blocks[1]


@pytest.mark.parametrize("wide", [(1 << 64) - 1, 1 << 62, -1, -(1 << 63)])
def test_hashes_of_64_bits_name_blocks(tmp_path: Path, wide: int) -> None:
    text = MOONCAKE.replace("[0,", f"[{wide},")
    trace = read_trace_file(written(tmp_path, text, "t.jsonl")).trace
    first, second = trace.request(0), trace.request(1)
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]
    assert 0 <= first.blocks[0] < 1 << 62
    assert simulate(server(), trace).online_cached_tokens == 512


def test_a_block_of_which_prompts_have_unlike_shares_is_not_shared(tmp_path: Path) -> None:
    """Else a simulated pool would count it with the size of who came first."""
    prompts = (700, 1024, 700)
    rows = (
        {"timestamp": 60_000 * i, "input_length": tokens, "output_length": 2, "hash_ids": [0, 1]}
        for i, tokens in enumerate(prompts)
    )
    path = written(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl")
    trace = read_trace_file(path).trace
    results = simulate(server(), trace)
    assert results.online_prompt_tokens == sum(prompts)
    assert results.online_cached_tokens == 512 + 699


def test_blocks_are_as_long_as_the_format_has_them(tmp_path: Path) -> None:
    trace = read_trace_file(written(tmp_path, BAILIAN, "t.jsonl")).trace
    assert list(trace.request(1).sizes) == [16, 16, 8]


def test_prompts_without_hashes_are_unlike_each_other(tmp_path: Path) -> None:
    trace = read_trace_file(written(tmp_path, AZURE)).trace
    assert trace.request(0).blocks != trace.request(1).blocks


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_columns_may_be_apart_by_what_spreadsheets_write(tmp_path: Path, delimiter: str) -> None:
    read = read_trace_file(written(tmp_path, AZURE.replace(",", delimiter)))
    assert read.format == "Azure" and list(read.trace.prompt_tokens) == [374, 396]


def test_numbers_of_rows_that_pandas_wrote_are_left_out(tmp_path: Path) -> None:
    head, first, second = AZURE.splitlines()
    path = written(tmp_path, f",{head},\n0,{first},\n1,{second},\n")
    assert list(read_trace_file(path).trace.output_tokens) == [44, 109]


def test_an_array_is_refused_with_what_to_do(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in MOONCAKE.splitlines()]
    for text in (json.dumps(rows), json.dumps(rows, indent=1), json.dumps(rows * 50_000)):
        with pytest.raises(TraceFileError, match=r"line 1: an array begins; .* jq -c '\.\[\]'"):
            read_trace_file(written(tmp_path, text, "t.json"))


def test_a_zipped_trace_is_unpacked(tmp_path: Path) -> None:
    for name, text in (("trace.csv.gz", AZURE), ("TRACE.GZ", MOONCAKE)):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()))
        assert len(read_trace_file(path).trace) == 2


def test_a_recording_has_both_classes_and_one_is_taken(tmp_path: Path) -> None:
    lines = [
        {"format": "echo-recording", "version": 1, "block_tokens": 4},
        {"at_s": 5.0, "prompt_tokens": 6, "output_tokens": 2, "class": "online", "blocks": [7, 8]},
        {"at_s": 6.0, "prompt_tokens": 3, "output_tokens": 2, "class": "offline", "blocks": [7]},
    ]
    path = written(tmp_path, "\n".join(map(json.dumps, lines)), "t.jsonl")
    read = read_trace_file(path)
    assert list(read.trace.prompt_tokens) == [6]
    assert read.warnings == ("1 requests of the other class left out",)
    assert list(read_trace_file(path, task=Task.OFFLINE).trace.prompt_tokens) == [3]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", r"line 1: the columns are a, b; known formats are Azure"),
        ("t_s,context_tokens,generated_tokens,x\n", "line 1: unknown columns x; plain has"),
        ("t_s,context_tokens,generated_tokens\n0,5,5\n1,5\n", "line 3: 2 values for 3 columns"),
        ("t_s,context_tokens,generated_tokens\n5,5,5\n1,5,5\n", "line 3: t_s goes back by 4 s"),
        ("t_s,context_tokens,generated_tokens\n0,0,5\n", "line 2: context_tokens is 0"),
        ("t_s,context_tokens,generated_tokens\n0,5,0\n", "line 2: generated_tokens is 0"),
        ("t_s,context_tokens,generated_tokens\n0,,5\n", "line 2: context_tokens is ''"),
        ("t_s,context_tokens,generated_tokens\nnan,5,5\n", "line 2: t_s is 'nan'"),
        ("t_s,context_tokens,generated_tokens\n0,2.5,5\n", "line 2: context_tokens is '2.5'"),
        ("t_s,context_tokens,generated_tokens\n0,-3,5\n", "line 2: context_tokens is '-3'"),
        ("t_s,context_tokens,generated_tokens\n", "holds no online request"),
        ("", "line 1: the columns are none"),
        ("t_s,context_tokens,generated_tokens\ninf,5,5\n", "line 2: t_s is 'inf'"),
        ("t_s,context_tokens,generated_tokens\n0,1e999,5\n", "line 2: context_tokens is '1e999'"),
        ("t_s,context_tokens,generated_tokens\n0,472.5,5\n", "line 2: context_tokens is '472.5'"),
        ("t_s,context_tokens,generated_tokens\n0,nan,5\n", "line 2: context_tokens is 'nan'"),
        ("t_s,context_tokens,generated_tokens\n0,inf,5\n", "line 2: context_tokens is 'inf'"),
        ("t_s,context_tokens,generated_tokens\n0,5,5\n,,\n", "line 3: t_s is ''"),
        (
            "t_s,context_tokens,generated_tokens,t_s\n0,5,5,9\n",
            "line 1: columns t_s are there more than once; keep one of each",
        ),
    ],
)
def test_a_bad_csv_is_refused_by_its_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(TraceFileError, match=problem):
        read_trace_file(written(tmp_path, text))


@pytest.mark.parametrize("row", ["0,{text},5", "{text},5,5", "0,5,5,{text}"])
def test_what_a_message_shows_of_a_file_is_short(tmp_path: Path, row: str) -> None:
    text = "t_s,context_tokens,generated_tokens\n" + row.format(text="1" * 100_000)
    with pytest.raises(TraceFileError, match="line 2: ") as refusal:
        read_trace_file(written(tmp_path, text))
    assert len(str(refusal.value)) < 200 + len(str(tmp_path))


def test_what_is_not_packed_in_spite_of_its_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="cannot be read"):
        read_trace_file(written(tmp_path, AZURE, "t.csv.gz"))


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(AZURE.encode()))
    packed[10:20] = b"\xff" * 10
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(packed)
    with pytest.raises(TraceFileError, match="cannot be read"):
        read_trace_file(path)


def test_whole_floats_are_counts_of_tokens(tmp_path: Path) -> None:
    text = "t_s,context_tokens,generated_tokens\n0,472.0,18.0\n"
    trace = read_trace_file(written(tmp_path, text)).trace
    assert (list(trace.prompt_tokens), list(trace.output_tokens)) == ([472], [18])


def test_empty_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    text = "\n  \nt_s,context_tokens,generated_tokens\n0,5,5\n\n  \t \n1,5,5\n   \n"
    assert list(read_trace_file(written(tmp_path, text)).trace.at_s) == [0.0, 1.0]


@pytest.mark.parametrize("version", [2, 0, "1", None, [1]])
def test_a_recording_of_a_version_not_known_is_refused(tmp_path: Path, version: object) -> None:
    text = recording("online").replace('"version": 1', f'"version": {json.dumps(version)}')
    problem = f"line 1: version of the recording is {version!r}; known are 1"
    with pytest.raises(TraceFileError, match=re.escape(problem)):
        read_trace_file(written(tmp_path, text, "t.jsonl"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 3: not JSON"),
        ("[1]", "line 3: not a JSON object"),
        ('{"timestamp": 4000, "input_length": 5}', "line 3: output_length is None"),
        (MOONCAKE.splitlines()[1].replace("[0, 2]", "[0]"), "line 3: hash_ids has 1 entries"),
        (MOONCAKE.splitlines()[1].replace("[0, 2]", '[0, "x"]'), "line 3: hash_ids is"),
        (MOONCAKE.splitlines()[1].replace("}", ', "y": 1}'), "line 3: unknown keys y"),
        (MOONCAKE.splitlines()[1].replace("600", "true"), "line 3: input_length is True"),
    ],
)
def test_bad_json_lines_are_refused_by_their_line(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(TraceFileError, match=problem):
        read_trace_file(written(tmp_path, MOONCAKE + line + "\n", "t.jsonl"))


def test_failed_requests_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, BURST_GPT + "50,GPT-4,10,0,10,API log\n")
    with pytest.raises(TraceFileError, match="--skip-empty"):
        read_trace_file(path)
    read = read_trace_file(path, skip_empty=True)
    assert len(read.trace) == 2
    assert read.warnings == ("1 requests without prompt or answer left out",)


def test_a_trace_of_nothing_else_says_what_was_left_out(tmp_path: Path) -> None:
    text = "t_s,context_tokens,generated_tokens\n0,5,0\n1,0,5\n"
    problem = r"holds no online request; 2 requests without prompt or answer left out$"
    with pytest.raises(TraceFileError, match=problem):
        read_trace_file(written(tmp_path, text), skip_empty=True)
    path = written(tmp_path, recording("offline"), "t.jsonl")
    with pytest.raises(TraceFileError, match=r"; 1 requests of the other class left out$"):
        read_trace_file(path)


def recording(*classes: object) -> str:
    head = {"format": "echo-recording", "version": 1, "block_tokens": 4}
    row = {"at_s": 5.0, "prompt_tokens": 6, "output_tokens": 2}
    return "\n".join(map(json.dumps, [head, *({**row, "class": one} for one in classes)]))


@pytest.mark.parametrize("given", ["ofline", "Online", "", None, 1, ["online"]])
def test_a_class_that_does_not_exist_is_refused_by_its_line(tmp_path: Path, given: object) -> None:
    path = written(tmp_path, recording("online", given), "t.jsonl")
    problem = f"line 3: class is {given!r}; it must be online or offline, or left out"
    with pytest.raises(TraceFileError, match=re.escape(problem)):
        read_trace_file(path)


def test_a_row_that_names_no_class_is_of_the_class_that_is_read(tmp_path: Path) -> None:
    row = {"at_s": 5.0, "prompt_tokens": 6, "output_tokens": 2}
    path = written(tmp_path, f"{recording('online')}\n{json.dumps(row)}\n", "t.jsonl")
    assert len(read_trace_file(path).trace) == 2
    assert len(read_trace_file(path, task=Task.OFFLINE).trace) == 1
