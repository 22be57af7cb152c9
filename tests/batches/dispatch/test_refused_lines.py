"""Lines that a server refuses: whose fault it is, and what others have to bear of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial

import pytest

from echo_sgl.batches.dispatch import dispatcher, refusals
from echo_sgl.batches.dispatch.dispatcher import Dispatcher
from echo_sgl.batches.dispatch.line_engine import AsgiEngine
from eval.servers import stub_server
from tests.batches.client import Stub, job, line, until
from tests.batches.faults import FullModel, GivingBackModel, HoldingModel, async_, jobs_of

Live = Callable[..., None]


def test_a_job_whose_lines_are_refused_takes_no_place_from_others(
    live_sqlite: Live, made: list[Dispatcher]
) -> None:
    async def life(stub: Stub) -> None:
        model = stub.model
        assert isinstance(model, HoldingModel)
        refused = await stub.create(job([f"refuse {10**6 + index}" for index in range(20)]))
        await until(async_(lambda: [one.pace.limit for one in jobs_of(made[0])] == [1.0]))
        held = await stub.create(job(["hold"] * 8))
        await until(async_(lambda: model.num_held == 8))
        await stub.client.batches.cancel(refused.id)
        model.released.set()
        assert (await stub.ended(held.id)).status == "completed"

    live_sqlite(life, model=HoldingModel(), window_lines=8)


@pytest.fixture
def short_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "backoff_s", lambda *given, **bounds: 0.03)


def test_a_line_that_is_refused_whatever_else_is_answered_fails_with_the_reason(
    live_sqlite: Live, short_back_off: None, made: list[Dispatcher]
) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.create(job(["refuse 1000000", *["p"] * 2000]))
        await until(async_(lambda: bool(jobs_of(made[0]))))
        active = jobs_of(made[0])[0]
        ended = await stub.ended(batch.id)
        assert active.pace.limit == math.inf  # it shrank in vain
        assert len(await stub.records(ended.output_file_id)) == 2000
        failed = (await stub.records(ended.error_file_id))["line-0"]["response"]
        assert failed["status_code"] == 503
        assert failed["body"]["error"]["message"] == "made up: refuse 1000000"

    live_sqlite(life, window_lines=16)


@pytest.mark.parametrize("most", [1, 3])
def test_no_line_fails_on_a_server_that_takes_few_at_a_time(
    live_sqlite: Live, short_back_off: None, most: int
) -> None:
    async def life(stub: Stub) -> None:
        batches = [await stub.create(job(["p"] * 200)) for _ in range(2)]
        for batch in batches:
            ended = await stub.ended(batch.id)
            assert ended.error_file_id is None
            assert len(await stub.records(ended.output_file_id)) == 200
        assert isinstance(stub.model, FullModel)
        assert stub.model.num_refused > 0

    live_sqlite(life, model=FullModel(most), window_lines=16, max_line_attempts=1)


def test_lines_that_were_all_refused_for_a_while_are_all_answered(
    live_sqlite: Live, short_back_off: None
) -> None:
    async def life(stub: Stub) -> None:
        prompts = [f"refuse {index}" for index in range(5, 15)]
        ended = await stub.ended((await stub.create(job(prompts))).id)
        assert len(await stub.records(ended.output_file_id)) == 10

    live_sqlite(life, window_lines=16, max_line_attempts=1)


def test_a_job_of_lines_that_are_all_refused_for_good_ends_with_the_reason(
    live_sqlite: Live, short_back_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "LASTING_S", 0.5)

    async def life(stub: Stub) -> None:
        prompts = [f"refuse {10**6 + index}" for index in range(40)]
        ended = await stub.ended((await stub.create(job(prompts))).id)
        assert (ended.status, ended.output_file_id) == ("completed", None)
        failed = (await stub.records(ended.error_file_id))["line-7"]["response"]
        assert failed["body"]["error"]["message"] == "made up: refuse 1000007"

    live_sqlite(life, window_lines=16)


@pytest.mark.parametrize(
    ("reason", "left"),
    [("The server's weights are being updated; send this again.", 16), ("It is full.", 8)],
)
def test_a_job_goes_on_beside_few_others_only_where_a_server_had_no_room(
    live_sqlite: Live, short_back_off: None, made: list[Dispatcher], reason: str, left: int
) -> None:
    async def life(stub: Stub) -> None:
        model = stub.model
        assert isinstance(model, GivingBackModel)
        batch = await stub.create(job(["p"] * 100))
        await until(async_(lambda: model.num_running == 16))
        model.give_back(reason)
        await until(async_(lambda: model.num_running == left))
        await asyncio.sleep(0.2)
        assert model.num_running == left
        model.released.set()
        assert len(await stub.records((await stub.ended(batch.id)).output_file_id)) == 100

    live_sqlite(life, model=GivingBackModel(), window_lines=16)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """How many requests may wait in servers that are started from now on."""

    def has_room_for(num_requests: int) -> None:
        engine = partial(AsgiEngine, max_requests=num_requests)
        monkeypatch.setattr(stub_server, "AsgiEngine", engine)

    return has_room_for


def asking(num_answers: int) -> bytes:
    return line(f"{num_answers}", body={"model": "stub", "prompt": "p", "n": num_answers})


def test_jobs_send_no_more_than_may_wait_in_the_server_though_their_window_is_larger(
    live_sqlite: Live, room: Callable[[int], None]
) -> None:
    """What fills all of it would be refused for as long as lines of others go on."""
    room(4)

    async def life(stub: Stub) -> None:
        model = stub.model
        assert isinstance(model, FullModel)
        many = await stub.create(job(["p"] * 100))
        await until(async_(lambda: model.num_running > 0))
        ended = await stub.ended((await stub.create(asking(4))).id)
        assert list(await stub.records(ended.output_file_id)) == ["4"]
        assert (await stub.ended(many.id)).error_file_id is None
        assert model.num_refused == 0

    live_sqlite(life, model=FullModel(4), window_lines=16)


def test_a_line_of_more_answers_than_may_wait_in_the_server_fails_the_check(
    live_sqlite: Live, room: Callable[[int], None]
) -> None:
    room(3)

    async def life(stub: Stub) -> None:
        ended = await stub.ended((await stub.create(asking(3) + b"\n" + asking(4))).id)
        assert ended.status == "failed" and ended.errors and ended.errors.data
        [error] = ended.errors.data
        assert (error.code, error.line, error.param) == ("too_many_answers", 2, "body.n")
        assert stub.model.bodies == []

    live_sqlite(life)


def test_it_fails_alone_where_the_server_had_more_room_when_it_was_checked(
    live_sqlite: Live, room: Callable[[int], None]
) -> None:
    batch_ids: list[str] = []

    async def checked(stub: Stub) -> None:
        stub.model.opened.clear()
        batch = await stub.create(asking(3) + b"\n" + asking(4))
        await stub.until(batch.id, lambda found: found.status == "in_progress")
        batch_ids.append(batch.id)

    async def again(stub: Stub) -> None:
        ended = await stub.ended(batch_ids[0])
        assert ended.status == "completed"
        assert list(await stub.records(ended.output_file_id)) == ["3"]
        failed = (await stub.records(ended.error_file_id))["4"]
        assert failed["error"]["code"] == "too_many_answers"

    room(4)
    live_sqlite(checked)
    room(3)
    live_sqlite(again)
