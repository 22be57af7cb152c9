"""Who gives memory up on a simulated server, in which order; as in the engine."""

from __future__ import annotations

import random
from array import array

import pytest

from echo_sgl.sim.prefill import PrefillPass
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.scheduler import SimScheduler
from echo_sgl.sim.server import simulate
from echo_sgl.sim.workload import SimRequest, Trace, empty_trace
from echo_sgl.types import Task
from tests.sim.workloads import server

CAPACITY = 2000


@pytest.fixture
def scheduler() -> SimScheduler:
    config = server(kv_tokens=CAPACITY, max_running_requests=2)
    return SimScheduler(config, SimResults(), lambda request: 50)


def request(number: int, task: Task, tokens: int, shared: int = 0) -> SimRequest:
    blocks, sizes = array("q", (1000 + number,)), array("q", (tokens - shared,))
    if shared:
        blocks, sizes = array("q", (1, *blocks)), array("q", (shared, *sizes))
    return SimRequest(
        number,
        task,
        arrival_s=float(number),
        prompt_tokens=tokens,
        blocks=blocks,
        sizes=sizes,
        max_new_tokens=100,
    )


def prefilled(scheduler: SimScheduler, one: SimRequest, tokens: int) -> SimRequest:
    """So many of its prompt's tokens are computed."""
    scheduler.kv.match(one)
    scheduler.kv.compute(one, tokens - one.computed_tokens)
    scheduler.kv.cache(one)
    return one


def decoding(scheduler: SimScheduler, one: SimRequest) -> SimRequest:
    prefilled(scheduler, one, one.prompt_tokens)
    one.first_token_s, one.outputs_at_join = one.arrival_s + 0.1, 1
    scheduler.join(one)
    return one


def test_an_unfinished_offline_prefill_gives_its_room_before_a_decode_does(
    scheduler: SimScheduler,
) -> None:
    online = decoding(scheduler, request(0, Task.ONLINE, 900))
    scheduler.chunked = prefilled(scheduler, request(1, Task.OFFLINE, 1500), 1100)
    scheduler.make_decode_room()
    assert list(scheduler.online) == [online] and scheduler.chunked is None
    assert len(scheduler.pool) == 1 and not scheduler.results.num_retractions
    assert scheduler.results.num_prefill_parks == 1
    assert scheduler.new_token_ratio.current == 0.7


@pytest.mark.parametrize(
    ("task", "beside", "done"),
    [
        (Task.ONLINE, Task.OFFLINE, [1412]),  # the offline decode leaves
        (Task.OFFLINE, Task.ONLINE, [1359, 1359]),  # cut to what is free, then it waits
    ],
)
def test_a_chunk_is_held_against_the_memory_that_decodes_left(
    scheduler: SimScheduler, task: Task, beside: Task, done: list[int]
) -> None:
    decoding(scheduler, request(0, Task.ONLINE, 440))
    decoding(scheduler, request(1, beside, 200))
    scheduler.chunked = prefilled(scheduler, request(2, task, 1412), 1300)
    for computed_tokens in done:
        long = scheduler.chunked
        PrefillPass(scheduler).run()
        assert long is not None and long.computed_tokens == computed_tokens


def test_decodes_that_lack_room_lose_the_offline_one_that_started_last(
    scheduler: SimScheduler,
) -> None:
    online = decoding(scheduler, request(0, Task.ONLINE, 400))
    first = decoding(scheduler, request(1, Task.OFFLINE, 500))
    decoding(scheduler, request(2, Task.OFFLINE, 1100))
    scheduler.make_decode_room()
    assert list(scheduler.online) == [online] and list(scheduler.offline) == [first]
    assert len(scheduler.pool) == 1 and scheduler.results.num_retractions == 1
    # Both that are left made one token of the hundred that they may; room for 20 more is kept.
    assert scheduler.new_token_ratio.current == pytest.approx(42 / 201)


def test_an_online_request_that_lost_its_memory_waits_its_turn(scheduler: SimScheduler) -> None:
    one = decoding(scheduler, request(0, Task.ONLINE, 900))
    two = decoding(scheduler, request(3, Task.ONLINE, 1100))
    waiting = request(1, Task.ONLINE, 50)
    scheduler.waiting.add(waiting)
    scheduler.make_decode_room()
    assert list(scheduler.online) == [one]
    assert list(scheduler.waiting) == [waiting, two]  # by when their next tokens are due


def test_what_requests_share_is_freed_once(scheduler: SimScheduler) -> None:
    first = decoding(scheduler, request(0, Task.OFFLINE, 700, shared=600))
    second = decoding(scheduler, request(1, Task.OFFLINE, 800, shared=600))
    assert scheduler.kv.held_tokens([first, second]) == 600 + 100 + 200
    # The other one holds what they share.
    assert scheduler.kv.held_tokens([second]) == 200


def test_nobody_leaves_a_place_to_a_request_that_lacks_memory_too(
    scheduler: SimScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding(scheduler, request(0, Task.ONLINE, 700))
    decoding(scheduler, request(1, Task.ONLINE, 700))
    asked: list[SimRequest] = []
    monkeypatch.setattr(scheduler, "gives_way", lambda one: bool(asked.append(one)))
    small, large = request(2, Task.ONLINE, 100), request(3, Task.ONLINE, 600)
    for one in (small, large):
        assert not PrefillPass(scheduler)._makes_place(one)
    assert asked == [small]


def test_a_line_that_lacks_memory_though_it_is_alone_holds_up_nobody() -> None:
    """Beside an online answer of hundreds of tokens there is room for short lines, not for it."""
    lines = (500, 50, 50, 50)
    offline = Trace(
        Task.OFFLINE,
        array("d", (0.5,)) * len(lines),
        array("q", lines),
        array("q", (5,)) * len(lines),
        max_new_tokens=500,
    )
    online = Trace(
        Task.ONLINE, array("d", (0.0,)), array("q", (900,)), array("q", (400,)), max_new_tokens=500
    )
    config = server({"offline": {"order": "fcfs"}}, kv_tokens=CAPACITY)
    soon = simulate(config, online, offline, until_s=3.0)
    assert (soon.online_done, soon.offline_done) == (0, 3)
    assert simulate(config, online, offline).offline_done == 4


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_prompt_that_is_cached_in_full_starts_on_an_idle_server_whatever_it_may_answer(
    page_tokens: int,
) -> None:
    blocks = [array("q", range(20))] * 2
    prompts, answers = array("q", (20 * 64,)) * 2, array("q", (10,)) * 2
    online = Trace(
        Task.ONLINE, array("d", (0.0, 30.0)), prompts, answers, blocks=blocks, max_new_tokens=4096
    )
    results = simulate(server(kv_tokens=CAPACITY, page_tokens=page_tokens), online)
    assert results.online_done == 2 and not results.unfinished
    assert results.online_cached_tokens == 20 * 64 - page_tokens


def test_of_a_prompt_that_is_cached_in_full_the_last_token_is_not_promised_to_it(
    scheduler: SimScheduler,
) -> None:
    kv, first = scheduler.kv, prefilled(scheduler, request(0, Task.ONLINE, 700), 700)
    kv.release(first)
    again, beside = request(0, Task.ONLINE, 700), request(0, Task.ONLINE, 700)
    assert (kv.match(again), kv.overlocked_tokens(again)) == (699, 1)
    # Who shares all of it keeps it from eviction as well.
    kv.match(beside)
    assert kv.overlocked_tokens(again) == kv.overlocked_tokens(beside) == 0
    kv.unmatch(again)
    kv.unmatch(beside)
    other = request(1, Task.ONLINE, 900)
    assert (kv.match(other), kv.overlocked_tokens(other)) == (0, 0)


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_an_answer_that_may_be_longer_than_the_pool_is_cut_and_its_prompt_decides(
    page_tokens: int,
) -> None:
    config = server(kv_tokens=400, page_tokens=page_tokens)
    longest = next(tokens for tokens in range(400, 0, -1) if config.takes_prompt(tokens))
    prompts = array("q", (100, longest, longest + 1))
    answers = array("q", (9000,)) * 3
    lines = Trace(Task.OFFLINE, array("d", (0.0,)) * 3, prompts, answers, max_new_tokens=9000)
    results = simulate(config, empty_trace(Task.ONLINE), lines)
    assert (results.offline_done, results.offline_refused) == (2, 1)
    cut = sum(config.most_output_tokens(tokens) for tokens in prompts[:2])
    assert results.offline_output_tokens == cut < 400


@pytest.mark.parametrize("seed", [0, 23, 36, 55])
def test_where_memory_is_full_of_answers_that_are_done_their_room_is_waited_for(seed: int) -> None:
    """All that decode end with the step that runs, and nobody's next token would fit."""
    rng = random.Random(seed)
    times = sorted(rng.choice([rng.uniform(0, 20), 10.0 + rng.random()]) for _ in range(300))
    prompts = array("q", (rng.randint(100, 900) for _ in range(300)))
    answers = array("q", (12,)) * 300
    online = Trace(
        *(Task.ONLINE, array("d", times), prompts, answers),
        max_new_tokens=12,
        allowed_tokens=answers,
        ignores_eos=True,
    )
    for enable_mixed_chunk in (False, True):
        sizes = {"kv_tokens": 8000, "chunked_prefill_tokens": 4096}
        config = server({}, **sizes, enable_mixed_chunk=enable_mixed_chunk)
        assert simulate(config, online).online_done == 300
