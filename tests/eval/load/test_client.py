"""The load generator against a real server: counts, tokens, windows, schedules, limits, errors."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from echo_sgl.types import OFFLINE_SERVICE_TIER, Task
from eval.arms import ARMS
from eval.corun.hold import held
from eval.corun.phases import empty_cache, together
from eval.load.client import Phase, Request, make_request
from eval.load.mix import Mix, online_body
from eval.load.records import Record, Status
from eval.options import CorunOptions
from eval.servers.server import LOCAL, Server, free_port
from eval.workloads.jobs import batch_line
from eval.workloads.prompts import SyntheticText, load_tokenizer
from eval.workloads.traces import Arrival

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT_TOKENS, SHARED_TOKENS, ANSWER_TOKENS = 120, 80, 12
METRICS_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def texts(tiny_model: Path) -> SyntheticText:
    return SyntheticText(load_tokenizer(str(tiny_model)), seed=0)


@pytest.fixture
def server(stock_server: Server) -> Server:
    empty_cache(stock_server)
    return stock_server


def completion(
    prompt: str, name: str, task: Task = Task.ONLINE, *, tokens: int = ANSWER_TOKENS,
    stream: bool = True,
) -> Request:  # fmt: skip
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    return make_request(name, task, COMPLETIONS, body, stream=stream)


def job(texts: SyntheticText, num_lines: int, *, tokens: int = ANSWER_TOKENS) -> list[Request]:
    """Lines that share a start and differ after it."""
    start = texts.text(1000, SHARED_TOKENS)
    return [
        completion(
            texts.text(index, PROMPT_TOKENS, shared_start=start), f"line-{index}", Task.OFFLINE,
            tokens=tokens, stream=False,
        )
        for index in range(num_lines)
    ]  # fmt: skip


def counters(server: Server) -> dict[str, float]:
    """Totals of the server's own token counters."""
    totals = dict.fromkeys(("prompt_tokens", "generation_tokens", "cached_tokens"), 0.0)
    text = LOCAL.get(f"{server.url}/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("sglang:")
        if name in totals:
            totals[name] += sum(s.value for s in family.samples if s.name.endswith("_total"))
    return totals


def wait_for_counters(server: Server, wanted: dict[str, float]) -> dict[str, float]:
    """The counters once they are as wanted: the server counts just after it has answered."""
    deadline_s = time.monotonic() + METRICS_TIMEOUT_S
    while (found := counters(server)) != wanted and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return found


def most_at_once(records: list[Record]) -> int:
    edges = [(r.scheduled_s, 1) for r in records] + [(r.end_s or 0.0, -1) for r in records]
    return max(itertools.accumulate(step for _, step in sorted(edges)))


@pytest.mark.server
def test_both_loads_together_are_counted_as_the_server_counts_them(
    server: Server, texts: SyntheticText
) -> None:
    lines = job(texts, 24)
    chats = [(0.1 * n, completion(texts.text(2000 + n, 50), f"chat-{n}")) for n in range(10)]
    before = counters(server)

    async def both() -> Phase:
        phase = Phase(server.url)
        await asyncio.gather(
            phase.closed_loop(lines, window=8, limit_s=300), phase.open_loop(chats, limit_s=300)
        )
        return phase

    records = asyncio.run(both()).records
    assert {r.error for r in records} == {""}
    assert sorted(r.id for r in records) == sorted(r.id for r in [*lines, *(c for _, c in chats)])
    offline = [r for r in records if r.task is Task.OFFLINE]
    online = [r for r in records if r.task is Task.ONLINE]
    assert {(r.prompt_tokens, r.completion_tokens) for r in offline} == {(120, ANSWER_TOKENS)}
    assert {(r.prompt_tokens, r.completion_tokens) for r in online} == {(50, ANSWER_TOKENS)}
    assert sum(r.cached_tokens for r in offline) >= SHARED_TOKENS * (len(offline) - 8)
    assert sum(r.cached_tokens for r in online) == 0
    sums = {
        "prompt_tokens": sum(r.prompt_tokens for r in records),
        "generation_tokens": sum(r.completion_tokens for r in records),
        "cached_tokens": sum(r.cached_tokens for r in records),
    }
    wanted = {name: before[name] + value for name, value in sums.items()}
    assert wait_for_counters(server, wanted) == wanted


@pytest.mark.server
@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_a_streamed_answers_times_are_in_order_and_its_gaps_span_it(
    server: Server, texts: SyntheticText, url: str
) -> None:
    body = {"model": "m", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    text = texts.text(0, 50)
    prompt = {"prompt": text} if url == COMPLETIONS else {
        "messages": [{"role": "user", "content": text}]
    }  # fmt: skip
    record = run_open(server, [(0.0, make_request("r", Task.ONLINE, url, body | prompt))])[0]
    assert record.status is Status.OK and record.completion_tokens == 30
    times = [record.scheduled_s, record.sent_s, record.first_token_s, record.last_token_s]
    times.append(record.end_s)
    known = [at_s for at_s in times if at_s is not None]
    assert len(known) == 5 and known == sorted(known)
    assert 1 <= len(record.gaps_s) <= 29
    assert record.first_token_s is not None and record.last_token_s is not None
    # Chat's first chunk has no text: the first gap starts a moment after the first token time.
    assert sum(record.gaps_s) <= record.last_token_s - record.first_token_s + 1e-9
    assert record.tpot_s is not None and record.ttft_s is not None


def run_open(
    server: Server, schedule: Iterator[tuple[float, Request]] | list[tuple[float, Request]],
    limit_s: float = 120.0, on_end: Callable[[Record], None] | None = None,
) -> list[Record]:  # fmt: skip
    async def run() -> list[Record]:
        phase = Phase(server.url, on_end)
        await phase.open_loop(schedule, limit_s=limit_s)
        return phase.records

    return asyncio.run(run())


def run_closed(
    server: Server, lines: list[Request], window: int, limit_s: float = 120.0
) -> list[Record]:
    async def run() -> list[Record]:
        phase = Phase(server.url)
        await phase.closed_loop(lines, window=window, limit_s=limit_s)
        return phase.records

    return asyncio.run(run())


@pytest.mark.server
def test_the_closed_loop_fills_its_window_and_never_exceeds_it(
    server: Server, texts: SyntheticText
) -> None:
    records = run_closed(server, job(texts, 20), window=4)
    assert len({r.id for r in records if r.status is Status.OK}) == 20
    assert most_at_once(records) == 4


@pytest.mark.server
def test_the_open_loop_does_not_wait_for_answers(server: Server, texts: SyntheticText) -> None:
    """The slow answer is far from its end when the quick one's makes us abort it."""
    ended: list[str] = []

    def note_end(record: Record) -> None:
        ended.append(record.id)
        if record.id == "quick":
            abort = {"abort_all": True}
            LOCAL.post(f"{server.url}/abort_request", json=abort).raise_for_status()

    slow = completion(texts.text(0, 50), "slow", tokens=3000)
    quick = completion(texts.text(1, 50), "quick", tokens=1)
    run_open(server, [(0.0, slow), (0.001, quick)], on_end=note_end)
    assert ended == ["quick", "slow"]


@pytest.mark.server
def test_an_endless_schedule_ends_at_the_limit_and_frees_the_server(
    server: Server, texts: SyntheticText
) -> None:
    bodies = (completion(texts.text(n, 50), f"r-{n}", tokens=3000) for n in itertools.count())
    records = run_open(server, ((0.1 * n, one) for n, one in enumerate(bodies)), limit_s=1.0)
    assert 0 < len(records) <= 10
    assert {r.status for r in records} == {Status.CANCELLED}
    assert all(r.end_s is not None for r in records)
    empty_cache(server)


@pytest.mark.server
def test_lines_left_at_the_limit_are_given_up_or_never_sent(
    server: Server, texts: SyntheticText
) -> None:
    records = run_closed(server, job(texts, 50, tokens=3000), window=2, limit_s=1.0)
    assert {r.status for r in records if r.status is not Status.OK} == {Status.CANCELLED}
    assert len(records) < 50


@pytest.mark.server
def test_a_client_that_is_kept_from_sending_is_reported_as_late(
    server: Server, texts: SyntheticText
) -> None:
    def held_up() -> Iterator[tuple[float, Request]]:
        yield 0.0, completion(texts.text(0, 20), "first")
        time.sleep(0.5)  # what a busy client does to its own event loop
        yield 0.1, completion(texts.text(1, 20), "second")

    records = run_open(server, held_up())
    assert [r.status for r in records] == [Status.OK, Status.OK]
    assert next(r for r in records if r.id == "second").late


@pytest.mark.server
def test_a_refused_request_is_an_error_with_the_servers_words(
    server: Server, texts: SyntheticText
) -> None:
    records = run_closed(server, [completion("x", "bad", tokens=-5)], window=1)
    assert records[0].status is Status.ERROR
    assert records[0].error.startswith("HTTP 400") and "max_" in records[0].error


@pytest.mark.slow
@pytest.mark.server
def test_a_held_server_begins_when_it_has_all_lines(
    echo_server: Server, texts: SyntheticText
) -> None:
    """Slow for what else runs: if the lines came late, the plugs would end by themselves."""

    async def run() -> tuple[int, list[Record]]:
        phase = Phase(echo_server.url)
        async with held(echo_server, 5):
            lines = [replace(one, content=flex(one)) for one in job(texts, 5, tokens=200)]
            sending = asyncio.create_task(phase.closed_loop(lines, window=5, limit_s=60))
        num_ended = sum(record.end_s is not None for record in phase.records)
        await sending
        return num_ended, phase.records

    num_ended, records = asyncio.run(run())
    assert num_ended == 0
    assert [r.status for r in records] == [Status.OK] * 5


def flex(request: Request) -> bytes:
    """The body of the same request as an offline one."""
    return orjson.dumps({**orjson.loads(request.content), "service_tier": OFFLINE_SERVICE_TIER})


def test_a_server_that_is_not_there_is_an_error_per_request() -> None:
    async def run() -> list[Record]:
        phase = Phase(f"http://127.0.0.1:{free_port()}")
        lines = [completion("x", str(number)) for number in range(3)]
        await phase.closed_loop(lines, window=2, limit_s=30)
        return phase.records

    records = asyncio.run(run())
    assert [r.status for r in records] == [Status.ERROR] * 3
    assert all("ConnectorError" in r.error for r in records)


@pytest.mark.server
def test_a_job_goes_on_for_as_long_as_online_requests_might_have_come(
    server: Server, texts: SyntheticText
) -> None:
    """The only one comes at once: whoever answers it sooner has no less time for the job."""
    body = online_body(texts.text(0, PROMPT_TOKENS), 1)
    lines = [batch_line(f"line-{n}", online_body(texts.text(n, 40), 4)) for n in range(1, 5000)]
    options = CorunOptions(duration_s=3.0, lead_s=0.1, drain_s=30.0, window=2)
    mix = Mix([Arrival(0.0, PROMPT_TOKENS, 1)], [body], lines)
    records, (start_s, end_s) = asyncio.run(together(server, ARMS["stock"], mix, options))
    [online] = [one for one in records if one.task is Task.ONLINE]
    ends_s = [one.end_s for one in records if one.task is Task.OFFLINE and one.end_s is not None]
    assert online.status is Status.OK and online.end_s is not None
    assert end_s - start_s == pytest.approx(3.0)
    timer_s = 0.01  # an event loop's timers may fire a little early
    assert max(ends_s) >= max(end_s, online.end_s) - timer_s
