"""What the demo prints, from records made by hand."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from echo_sgl.types import Task
from eval.demo.report import ArmResult, difference, faults, print_results
from eval.demo.run import (
    ACCELERATOR_SIZE,
    ARM_TITLES,
    CPU_SIZE,
    SYSTEM_PROMPT,
    DemoSize,
    chat_requests,
)
from eval.load.records import Status
from eval.workloads.prompts import load_tokenizer
from tests.eval.figures.test_summary import offline, online

STOCK = ArmResult(
    "stock",
    "stock SGLang",
    [online(0, first_token_s=2.0, last_token_s=2.4), *(offline(n + 1.0) for n in range(100))],
)
ECHO = ArmResult("echo", "SGLang + Echo", [online(0), *(offline((n + 1) / 2) for n in range(100))])


def printed(results: list[ArmResult], width: int = 80) -> str:
    out = io.StringIO()
    print_results(results, Console(file=out, width=width))
    return out.getvalue()


def test_the_table_has_a_row_per_arm_and_class_with_its_figures() -> None:
    rows = [" ".join(line.split()) for line in printed([STOCK, ECHO]).splitlines()]
    # requests, prompt tokens, cached, hit ratio, TTFT p50 p99, TPOT p50 p99, offline tokens/s
    assert "stock online 1 40 10 25.0% 2.00 2.00 100 100" in rows
    assert "stock offline 100 9,000 0 0.0% - - - - 100" in rows
    assert "echo online 1 40 10 25.0% 0.10 0.10 50 50" in rows
    assert "echo offline 100 9,000 0 0.0% - - - - 200" in rows


def test_the_table_is_whole_in_a_terminal_of_80_columns() -> None:
    big = [online(0, prompt_tokens=1999, cached_tokens=1999, first_token_s=142.0,
                  last_token_s=145.0) for _ in range(500)]  # fmt: skip
    wide = ArmResult("stock", "stock SGLang", [*big, *STOCK.records])
    text = printed([wide, ECHO], width=80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_difference_is_told_whichever_way_it_went() -> None:
    assert "answered 100 in 100 s -> 100 in 50 s" in difference(STOCK, ECHO)
    assert "(p99) 2.00 s -> 0.10 s" in difference(STOCK, ECHO)
    assert "answered 100 in 50 s -> 100 in 100 s" in difference(ECHO, STOCK)


def test_what_went_wrong_is_said_and_nothing_when_all_went_well() -> None:
    assert faults([STOCK, ECHO]) == []
    bad = ArmResult(
        "echo",
        "SGLang + Echo",
        [online(status=Status.ERROR), online(sent_s=1.0), offline(1, status=Status.CANCELLED)],
    )
    told = "\n".join(faults([STOCK, bad]))
    assert "SGLang + Echo: 1 of 2 online requests failed" in told
    assert "SGLang + Echo: 1 of 2 online requests were sent late" in told
    assert "SGLang + Echo: 1 of 1 offline requests were not answered" in told
    assert "note: SGLang + Echo: 1 of 2 online requests failed" in printed([STOCK, bad])


def test_an_arm_without_any_answer_still_gives_a_table() -> None:
    empty = ArmResult("echo", "SGLang + Echo", [offline(5.0, status=Status.CANCELLED)])
    assert "-> 0 in 5 s" in printed([STOCK, empty], width=400)


@pytest.mark.parametrize("size", [CPU_SIZE, ACCELERATOR_SIZE])
def test_the_demo_job_is_as_large_as_promised(size: DemoSize) -> None:
    assert size.num_documents >= 12 and size.questions_per_document >= 20
    assert list(ARM_TITLES) == ["stock", "echo"]


def test_the_chat_is_equal_for_every_arm_and_lasts_as_long_as_an_arm_may_take(
    tiny_model: Path,
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    chat = list(chat_requests(CPU_SIZE, tokenizer))
    assert chat == list(chat_requests(CPU_SIZE, tokenizer))
    times_s = [at_s for at_s, _ in chat]
    assert times_s == sorted(times_s)
    assert CPU_SIZE.limit_s * 0.8 < times_s[-1] < CPU_SIZE.limit_s
    bodies = [orjson.loads(request.content) for _, request in chat]
    assert {body["messages"][0]["content"] for body in bodies} == {SYSTEM_PROMPT}
    assert len({body["messages"][1]["content"] for body in bodies}) == len(bodies)
    assert {request.task for _, request in chat} == {Task.ONLINE}
    assert all(body["stream"] and body["stream_options"]["include_usage"] for body in bodies)
