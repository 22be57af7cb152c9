"""Memory for the next chunk of a prompt: decodes grow and others start while it waits for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from echo_sgl.engine.admission.prefill_adder import EchoPrefillAdder
from eval.servers.server import Server
from tests.engine.tight import num_running
from tests.engine.traffic import (
    FLEX,
    completion,
    documents,
    is_idle,
    pooled,
    send_all,
    until,
    wait_until,
)
from tests.servers import COMMON_ARGS, NAMED, STRICT

LONG = "long"


class Request(SimpleNamespace):
    """Equal only to itself, as SGLang's."""

    __hash__, __eq__ = object.__hash__, object.__eq__


def chunk(num_tokens: int, *, done: int = 0, offline: bool = False) -> SimpleNamespace:
    """A request with so many tokens, of which `done` are computed."""
    return Request(
        rid=LONG,
        full_untruncated_fill_ids=range(num_tokens),
        seqlen=num_tokens,
        prefix_len=done,
        extend_end=done,
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=8),
        echo_terms=SimpleNamespace(is_offline=offline),
        beam_group=None,
        to_finish=None,
    )


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> EchoPrefillAdder:
    """SGLang's part of it adds as much of a prompt as its chunk limit allows."""

    def add_chunked_req(self: PrefillAdder, req: SimpleNamespace) -> SimpleNamespace | None:
        left = len(req.full_untruncated_fill_ids) - req.prefix_len
        req.extend_end = req.prefix_len + min(left, self.chunked_req_limit)
        self.can_run_list.append(req)
        return req if self.chunked_req_limit < left else None

    monkeypatch.setattr(PrefillAdder, "add_chunked_req", add_chunked_req)
    one = object.__new__(EchoPrefillAdder)
    one.page_size, one.rem_chunk_tokens, one.chunked_req_limit = 1, 256, None
    one.can_run_list, one.preempt_list, one.refused = [], [], []
    one._refuse_for_memory = lambda req: one.refused.append(req.rid)
    one.memory_budget = SimpleNamespace(remaining_current=1000, total_offset=0)
    one._retract_one = lambda: False
    one.ceil_paged_tokens = lambda tokens: -(-tokens // one.page_size) * one.page_size
    return one


@pytest.mark.parametrize(
    ("free_tokens", "page_size", "given"),
    [(1000, 1, 256), (257, 1, 256), (101, 1, 100), (100, 16, 80), (273, 16, 256)],
)
def test_a_chunk_is_cut_to_the_memory_there_is(adder, free_tokens, page_size, given):
    adder.page_size, adder.memory_budget.remaining_current = page_size, free_tokens
    req = chunk(600, offline=True)
    assert adder._add_fitting_chunk(req) is req
    assert req.extend_end == given and not adder.chunk_waits
    assert adder.memory_budget.total_offset == 0  # online ones may take what an offline one needs


def test_who_starts_after_an_online_chunk_leaves_room_for_its_rest(adder):
    assert adder._add_fitting_chunk(chunk(600)) is not None
    assert adder.memory_budget.total_offset == 600 - 256
    assert adder._add_fitting_chunk(chunk(700, done=500)) is None
    assert adder.memory_budget.total_offset == 600 - 256


def test_an_online_chunk_takes_the_memory_of_offline_requests(adder):
    adder.memory_budget.remaining_current = 11

    def retract_one() -> bool:
        adder.memory_budget.remaining_current += 100
        return True

    adder._retract_one = retract_one
    offline, online = chunk(600, offline=True), chunk(600)
    adder._add_fitting_chunk(offline)
    assert offline.extend_end == 10
    adder.chunked_req_limit = None
    adder._add_fitting_chunk(online)
    assert online.extend_end == 256


def test_without_room_nobody_starts_or_leaves(adder):
    """SGLang would count a chunk that it did not run."""
    adder.memory_budget.remaining_current = 1
    req = chunk(600)
    assert adder._add_fitting_chunk(req) is req
    assert not adder.can_run_list and adder.refused == [LONG]
    adder._makes_place = lambda req: pytest.fail("a place for nothing")
    adder.control = SimpleNamespace(parked=[], without_turn=[], refuse=lambda *args, **facts: None)
    adder.running_batch = SimpleNamespace(reqs=[])
    assert adder.add_one_req(chunk(5), True, None) is AddReqResult.OTHER
    assert not adder.preempt_to_schedule(chunk(5))


@pytest.mark.parametrize("left_tokens", [0, -2])
def test_a_mixed_step_that_decodes_fill_has_no_chunk(adder, left_tokens):
    """Decodes that sat out come back between two chunks; SGLang's own never grow that many."""
    adder.rem_chunk_tokens = left_tokens
    req = chunk(600)
    assert adder._add_fitting_chunk(req) is req
    assert adder.chunk_waits and not adder.can_run_list


def test_what_a_victim_was_to_generate_is_known_before_it_forgets_it(adder):
    """Of one that came without token ids SGLang forgets what it generated."""
    victim = chunk(100, offline=True)
    victim.output_ids, victim.sampling_params = (
        [1] * 2000,
        SimpleNamespace(max_new_tokens=2500, ignore_eos=False),
    )
    victim.finished = lambda: False
    del adder._retract_one

    def retract_one(batch: object, running: list[SimpleNamespace]) -> SimpleNamespace:
        running[0].output_ids = []
        return running[0]

    adder.new_token_ratio, adder.memory_budget.total_offset = 0.5, 250
    adder.running_batch = SimpleNamespace(reqs=[victim])
    adder.control = SimpleNamespace(retract_one=retract_one)
    assert adder._retract_one()
    assert adder.memory_budget.total_offset == 0


@pytest.fixture
def narrow_server(server_for) -> Server:
    """It starts nearly all that come: how long their answers become is not counted."""
    small = ("--max-total-tokens", "2000", "--chunked-prefill-size", "64")
    hopeful = ("--schedule-conservativeness", "0.05")
    return server_for((*COMMON_ARGS, *NAMED, *small, *hopeful), config="echo", env=STRICT)


@pytest.mark.server
@pytest.mark.parametrize("extra", [{"echo": True, "logprobs": 1}, {}], ids=["scored", "plain"])
def test_a_prompt_between_chunks_and_answers_that_grow_share_a_full_pool(narrow_server, extra):
    """Before, the scheduler died of it in most runs, looking for memory for the next chunk."""

    async def play(number: int) -> list[int]:
        text = documents(1, 200, seed=number)[0]
        burst = [completion(f"{number}: {one}", 200, ignore_eos=False) for one in range(15)]
        answers = asyncio.create_task(send_all(narrow_server, burst))
        await until(lambda: answers.done() or num_running(narrow_server) > 12, "a burst decodes")
        long = await send_all(narrow_server, [completion(text, 1, **extra, **FLEX)])
        return [answer.status_code for answer in [*long, *await answers]]

    for number in range(5):
        assert set(asyncio.run(play(number))) == {200}
    wait_until(lambda: is_idle(narrow_server) and pooled(narrow_server) == 0, "all have ended")
