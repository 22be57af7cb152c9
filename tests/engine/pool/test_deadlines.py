"""How far a deadline is told apart, and what the rate is measured from."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from echo_sgl.config import CONFIG_ENV
from echo_sgl.engine import settings
from echo_sgl.engine.pool.deadlines import WINDOW_PARTS, DeadlineWatch
from echo_sgl.engine.pool.offline_pool import OfflinePool
from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.offline_order import FcfsOrder
from echo_sgl.types import Work


@pytest.fixture(autouse=True)
def active_config(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text("")
    monkeypatch.setenv(CONFIG_ENV, str(path))
    settings.active_config.cache_clear()
    yield
    settings.active_config.cache_clear()


@pytest.fixture
def order() -> DeadlineOrder:
    return DeadlineOrder(FcfsOrder())


@pytest.fixture
def watch(order) -> DeadlineWatch:
    return DeadlineWatch(order)


def request(
    rid: str = "a", *, arrival_s: float = 1000.0, deadline_s: float | None = None, outputs: int = 0
) -> SimpleNamespace:
    params = {"service_tier": "flex", "echo_arrival_s": arrival_s}
    if deadline_s is not None:
        params["deadline_s"] = deadline_s
    prompt = array("q", range(100))
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=prompt,
        output_ids=array("q", range(outputs)),
        seqlen=len(prompt) + outputs,
        extra_key=None,
        cache_salt=None,
        sampling_params=SimpleNamespace(custom_params=params, max_new_tokens=50),
    )


def enter(pool: OfflinePool, watch: DeadlineWatch, req: SimpleNamespace) -> None:
    deadline_s, work = watch.terms(req)
    pool.add(req, entry_s=0.0, resumed=False, deadline_s=deadline_s, work=work)


def test_without_a_deadline_there_is_none(watch):
    assert watch.terms(request()) == (None, Work(100, 50))
    assert math.isinf(watch.laxity_s(request(), now_s=0.0))


@pytest.mark.parametrize("window_s", [1.0, 60.0, 3600.0, 86_400.0])
def test_a_deadline_is_never_taken_for_later_nor_for_much_earlier(watch, window_s):
    for arrival_s in (1000.0, 1000.3, 1234.5):
        deadline_s, _ = watch.terms(request(arrival_s=arrival_s, deadline_s=window_s))
        early_s = arrival_s + window_s - deadline_s
        assert 0 <= early_s < max(1.0, window_s / WINDOW_PARTS)


def test_lines_of_one_job_share_a_few_deadlines(watch):
    """A dispatcher names what is left of the window, a little less for each line."""
    deadlines = {
        watch.terms(request(arrival_s=1000 + n, deadline_s=3600 - n + 0.01 * (n % 7)))[0]
        for n in range(600)
    }
    assert len(deadlines) <= 2


def test_what_waits_is_expected_to_be_as_long_as_others_were(order, watch):
    """Also where they ended after it came."""
    enter(OfflinePool(order, capacity=9), watch, waits := request(deadline_s=64.0))
    assert order.book.work_until(1064.0, 1000.0) == 150
    for _ in range(3):
        watch.note_end(request(outputs=10))
    assert order.book.work_until(1064.0, 1000.0) == 110
    watch.note_end(request(outputs=50))
    assert order.book.work_until(1064.0, 1000.0) == 120
    assert watch.laxity_s(waits, 1000.0) == math.inf, "there is no rate"


def test_a_job_that_would_be_late_goes_ahead(order, watch):
    pool = OfflinePool(order, capacity=9)
    plain, hurried = request("plain"), request("hurried", deadline_s=100.0)
    for req in (plain, hurried):
        enter(pool, watch, req)
    for now_s in range(1000, 1010):
        watch.advance(float(now_s), lambda: True, list)
    assert [req.rid for req in pool.upcoming(2)] == ["hurried", "plain"]
    assert watch.laxity_s(hurried, 1010.0) < 0


def test_a_job_with_time_enough_waits_its_turn(order, watch):
    pool = OfflinePool(order, capacity=9)
    for req in (request("plain"), request("easy", deadline_s=1000.0)):
        enter(pool, watch, req)
    for now_s in range(1000, 1010):
        watch.note_end(request(outputs=10))
        watch.advance(float(now_s), lambda: True, list)
    assert [req.rid for req in pool.upcoming(2)] == ["plain", "easy"]


def test_steps_shorter_than_it_advances_are_taken_together(order):
    """The rate is the same however short the steps are in which the work was done."""
    for num_steps in (600, 6000):
        watch = DeadlineWatch(order)
        for number in range(num_steps):
            watch.note_end(request(outputs=10))
            watch.advance(1000.0 + number * 60.0 / num_steps, lambda: True, list)
        assert watch.rate_tokens_per_s == pytest.approx(num_steps * 110 / 60.0, rel=0.02)


def test_time_without_work_says_nothing_of_the_rate(watch):
    for number in range(100):
        watch.note_end(request(outputs=10))
        watch.advance(1000.0 + number, lambda: True, list)
    for number in range(30):
        watch.advance(1100.0 + number, lambda: False, list)
    watch.advance(1130.0, lambda: True, list)
    assert watch.rate_tokens_per_s == pytest.approx(110, rel=0.05)


def test_jobs_shorter_than_a_look_have_a_rate(watch):
    """110 tokens in half a second of work, again and again, with idle time between them."""
    for number in range(20):
        start_s = 1000.0 + 3.0 * number
        runs = request(outputs=0)
        for tenth in range(5):
            here = [runs] if tenth else []  # when work comes it waits
            watch.advance(start_s + 0.1 * tenth, lambda: True, lambda here=here: here)
        runs.output_ids, runs.seqlen = array("q", range(10)), 110
        watch.note_end(runs)
        watch.advance(start_s + 0.5, lambda: False, list)
        watch.advance(start_s + 1.5, lambda: False, list)
    assert watch.rate_tokens_per_s == pytest.approx(110 / 0.5, rel=0.05)


def test_an_aborted_answer_says_nothing_of_how_long_answers_are(order, watch):
    watch.note_end(request(outputs=30))
    for _ in range(100):
        aborted = request(outputs=0)
        aborted.finished_reason = FINISH_ABORT("gone")
        watch.note_end(aborted)
    assert order.book.answer_lengths.expected_tokens == 30


def test_what_runs_counts_before_it_ends_and_nothing_twice(watch):
    """Answers of many minutes: the rate is that of their tokens, not of their ends."""
    runs = request(outputs=0)
    for number in range(21):
        runs.output_ids = array("q", range(10 * number))
        runs.seqlen = 100 + 10 * number
        watch.advance(1000.0 + number, lambda: True, lambda: [runs])
    assert watch.rate_tokens_per_s == pytest.approx(10.0, rel=0.01)
    runs.seqlen += 10
    watch.note_end(runs)
    watch.advance(1021.0, lambda: True, list)
    assert watch.rate_tokens_per_s == pytest.approx(10.0, rel=0.01)


def test_a_job_of_which_all_has_started_is_late_too(watch):
    """50 tokens are left of it, at 10 a second and beside another that is due later."""
    hurried, easy = (request(deadline_s=window_s) for window_s in (24.0, 500.0))
    for number in range(21):
        easy.seqlen = 100 + 10 * number
        watch.advance(1000.0 + number, lambda: True, lambda: [hurried, easy])
    assert watch.urgent_deadline_s == 1024.0
    assert watch.laxity_s(hurried, 1020.0) == pytest.approx(-1.0, abs=0.2)
    assert watch.laxity_s(easy, 1020.0) > 0
    watch.advance(1021.0, lambda: True, lambda: [easy])
    assert watch.urgent_deadline_s is None


def test_what_lost_its_memory_is_work_that_is_left(order, watch):
    """Nobody else waits or runs: 40 of its 50 tokens are left when it goes back, at 1 a second."""
    lost = request("lost", deadline_s=45.0, outputs=0)
    for number in range(11):
        lost.output_ids, lost.seqlen = array("q", range(number)), 100 + number
        watch.advance(1000.0 + number, lambda: True, lambda: [lost])
    assert watch.urgent_deadline_s == 1045.0  # 40 tokens, 35 seconds
    pool = OfflinePool(order, capacity=9)
    deadline_s, work = watch.terms(lost)
    assert (deadline_s, work.left_tokens(None)) == (1045.0, 40)
    pool.add(lost, entry_s=0.0, resumed=True, deadline_s=deadline_s, work=work)
    watch.advance(1011.0, lambda: True, list)
    assert watch.urgent_deadline_s == 1045.0
    assert watch.laxity_s(lost, 1011.0) < 0
    pool.take(lost)
    watch.advance(1012.0, lambda: True, list)
    assert watch.urgent_deadline_s is None


def test_of_a_prompt_between_chunks_only_what_is_prefilled_is_done(watch):
    long = request(deadline_s=500.0)
    for number in range(11):
        long.extend_end = 5 * (number + 1)
        watch.advance(1000.0 + number, lambda: True, lambda: [long])
    assert watch.rate_tokens_per_s == pytest.approx(5.0, rel=0.01)
    # 45 of the prompt and the 50 of the answer are left, at 5 a second.
    assert watch.laxity_s(long, 1010.0) == pytest.approx(490 - 95 / 5, abs=4.0)
