"""Offline jobs as OpenAI batch lines: read from files, or made from text sets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from echo_sgl.batches.lines.job_line import CHAT_URL, INPUT_FIELDS, whole_number
from eval.workloads import WorkloadError, find_data, read_lines
from eval.workloads.prompts import Tokenizer, part_of_tokens

COMPLETIONS_URL = "/v1/completions"
JOB_URLS = (COMPLETIONS_URL, CHAT_URL)
TEXT_SET_SUFFIXES = (".prefixes.jsonl.gz", ".requests.jsonl.gz")

BatchLine = dict[str, Any]


def batch_line(custom_id: str, body: Mapping[str, Any], url: str = COMPLETIONS_URL) -> BatchLine:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": dict(body)}


def read_job(path: Path) -> list[BatchLine]:
    """Read OpenAI batch lines (jsonl, may be gzip'd).

    Errors: `WorkloadError` names the file, the line, the key and what is allowed.
    """
    lines: dict[str, BatchLine] = {}
    for where, line in _objects(path):
        custom_id = _value(where, line, "custom_id", str)
        if custom_id in lines:
            raise WorkloadError(f"{where}: custom_id {custom_id!r} was used by an earlier line")
        if (url := _value(where, line, "url", str)) not in JOB_URLS:
            raise WorkloadError(f"{where}: url is {url!r}; allowed are {', '.join(JOB_URLS)}")
        body = _value(where, line, "body", dict)
        if body.get("stream"):
            raise WorkloadError(f"{where}: body.stream is set; a job's answers do not stream")
        wanted = INPUT_FIELDS[url]
        if not isinstance(given := body.get(wanted), list if url == CHAT_URL else str | list):
            raise WorkloadError(f"{where}: body.{wanted} is {given!r:.60}; {url} needs it")
        lines[custom_id] = line
    if not lines:
        raise WorkloadError(f"{path} holds no line")
    return list(lines.values())


def write_job(path: Path, lines: Iterable[BatchLine]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def text_set_files(name: str) -> tuple[Path, Path]:
    """The files of a text set: by its name, or by the path in front of the two suffixes."""
    prefixes, requests = (find_data(name + suffix) for suffix in TEXT_SET_SUFFIXES)
    return prefixes, requests


def text_set_lines(
    files: tuple[Path, Path],
    tokenizer: Tokenizer,
    *,
    model: str,
    document_tokens: int,
    document_parts: int = 1,
) -> list[BatchLine]:
    """One line per request of a text set, its document cut to `document_tokens` (0: whole).

    With more `document_parts`, each request is also asked of the next so many tokens of its
    document and of those after them: a longer job out of few documents. Answers get the length
    that the set records (`out_tokens`), whatever the model would say.
    Errors: `WorkloadError` names the file, the line, the key and the bad value.
    """
    prefixes = {
        _value(where, row, "prefix_id", str): _value(where, row, "prefix", str)
        for where, row in _objects(files[0])
    }
    if not document_tokens:
        return [_text_set_line(where, row, prefixes, model) for where, row in _objects(files[1])]
    lines: list[BatchLine] = []
    requests = list(_objects(files[1]))
    for part in range(document_parts):
        texts = {
            key: part_of_tokens(tokenizer, text, part, document_tokens)
            for key, text in prefixes.items()
        }
        lines += [
            _text_set_line(where, row, texts, model, part=part)
            for where, row in requests
            if part == 0 or texts.get(row.get("prefix_id", ""))
        ]
    return lines


def shuffled(lines: Sequence[BatchLine], seed: int) -> list[BatchLine]:
    """A job as many users would have mixed it: order by seed, the same for every arm."""
    mixed = list(lines)
    random.Random(seed).shuffle(mixed)
    return mixed


def limit_answers(lines: Sequence[BatchLine], max_tokens: int) -> list[BatchLine]:
    """The same lines with at most `max_tokens` generated tokens each (0: as they are)."""
    if not max_tokens:
        return list(lines)
    return [line | {"body": _limited(line["body"], max_tokens)} for line in lines]


def _limited(body: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """By the name that it has already: of two, SGLang goes by the newer one."""
    names = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    own = {name: min(max_tokens, whole_number(body[name]) or max_tokens) for name in names}
    return {**body, **(own or {"max_tokens": max_tokens})}


def _text_set_line(
    where: str, row: Mapping[str, Any], prefixes: Mapping[str, str], model: str, *, part: int = 0
) -> BatchLine:
    prefix_id = _value(where, row, "prefix_id", str)
    if prefix_id not in prefixes:
        raise WorkloadError(f"{where}: prefix_id {prefix_id!r} is not in the prefixes file")
    out_tokens = _value(where, row, "out_tokens", int)
    if out_tokens < 0:
        raise WorkloadError(f"{where}: out_tokens is {out_tokens}; it must be 0 or more")
    body = {
        "model": model,
        "prompt": prefixes[prefix_id] + _value(where, row, "suffix", str),
        "max_tokens": max(1, out_tokens),
        "temperature": 0,
        "ignore_eos": True,
    }
    name = _value(where, row, "id", str)
    return batch_line(f"{name}/{part}" if part else name, body)


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every JSON object of a jsonl file with the words that say where it stands."""
    for number, text in read_lines(path):
        where = f"{path} line {number}"
        if not text.strip():
            continue
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise WorkloadError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise WorkloadError(f"{where}: a JSON object is needed, this is {text.strip()[:40]!r}")
        yield where, row


def _value(where: str, row: Mapping[str, Any], key: str, wanted: type) -> Any:
    if key not in row:
        raise WorkloadError(f"{where}: no key {key!r}; there are {', '.join(row) or 'none'}")
    value = row[key]
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise WorkloadError(f"{where}: {key} is {value!r:.60}; it must be a {wanted.__name__}")
    return value
