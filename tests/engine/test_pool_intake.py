"""Who waits where, decided on SGLang's own scheduler without a model behind it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_drainer import LoRADrainer
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.schedule_batch import Req

from echo_sgl.engine import offers
from echo_sgl.engine.decodes.parking import has_prompt_logprobs
from echo_sgl.engine.scheduler import EchoScheduler

OFFERED = tuple(f"offered {number}" for number in range(8))


# What a chunk that is set aside gives up is given to nobody here.
MEMORY = ("req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache", "hisparse_coordinator")


def scheduler(**fields: Any) -> Any:
    one = object.__new__(EchoScheduler)
    vars(one).update(fields)
    return one


@pytest.mark.parametrize(("num_online", "is_aborted"), [(3, False), (4, True)])
def test_requests_that_a_pass_offers_do_not_fill_the_queue(num_online, is_aborted, monkeypatch):
    monkeypatch.setattr(sglang_scheduler, "_make_abort_req", lambda req, **given: given)
    aborted: list[Any] = []
    online = [f"online {number}" for number in range(num_online)]
    one = scheduler(
        max_queued_requests=4,
        enable_priority_scheduling=False,
        waiting_queue=[*online, *OFFERED],
        policy=SimpleNamespace(offered=OFFERED),
        send_abort_output=lambda abort, req: aborted.append(req),
    )
    trace = SimpleNamespace(abort=lambda **info: None)
    new = SimpleNamespace(
        rid="new",
        http_worker_ipc=None,
        time_stats=SimpleNamespace(trace_ctx=trace),
    )
    assert one._abort_on_queued_limit(new) is is_aborted
    assert aborted == [new] * is_aborted
    assert one.waiting_queue == [*online, *OFFERED]


def test_who_was_shed_is_offered_again_only_after_the_pass():
    victims = iter(["first", "second", None])
    pooled: list[Any] = []
    one = scheduler(
        _shed=[],
        _parked_chunks=[],
        _kept_positions=[],
        weighing=None,
        chunked_req=None,
        kv_limits=SimpleNamespace(is_within=False, excess_tokens=lambda num: 100),
        step_control=SimpleNamespace(parked=[], retract_one=lambda batch, running: next(victims)),
        policy=SimpleNamespace(offered=()),
        _add_request_to_queue=lambda req, is_retracted: pooled.append((req, is_retracted)),
    )
    one._shed_offline(SimpleNamespace(reqs=[]))
    assert pooled == []
    one._take_back_offered(None)
    one._take_back_offered(None)
    assert pooled == [("first", True), ("second", True)]


def test_the_storage_is_asked_for_a_pooled_prompt_when_a_pass_first_looks_at_it():
    asked, stats = [], SimpleNamespace(set_wait_queue_entry_time=lambda: None)
    stats.wait_queue_entry_time = 0.0
    req = SimpleNamespace(rid="a", time_stats=stats)
    one = scheduler(
        _prefetch_kvcache=asked.append,
        processed_tokens_counter=0,
        waiting_queue=[],
        policy=SimpleNamespace(offered=()),
        model_config=SimpleNamespace(is_multimodal=False),
        deadline_watch=SimpleNamespace(terms=lambda req: (None, 1)),
        offline_pool=SimpleNamespace(add=lambda req, **given: None),
    )
    for num_asked in (1, 2):  # once more after it lost its memory
        one._pool(req, resumed=num_asked > 1)
        assert len(asked) == num_asked - 1
        one._queue_offered((req,))
        one._queue_offered((req,))
        assert len(asked) == num_asked


@pytest.mark.parametrize(("is_offline", "may_start"), [(True, True), (False, False)])
def test_no_adapter_is_drained_for_offline_requests_that_wait(is_offline, may_start, monkeypatch):
    def init(self: Any) -> None:
        self.lora_drainer = LoRADrainer(max_loras_per_batch=1, max_wait_time_secs=60.0)

    def request(adapter: str, *, offline: bool, waits_s: float = 0.0) -> Any:
        return SimpleNamespace(
            lora_id=adapter,
            output_ids=[],
            sampling_params=SimpleNamespace(max_new_tokens=100),
            time_stats=SimpleNamespace(wait_queue_entry_time=time.monotonic() - waits_s),
            echo_terms=SimpleNamespace(is_offline=offline),
        )

    monkeypatch.setattr(sglang_scheduler.Scheduler, "init_lora_drainer", init)
    one = scheduler()
    one.init_lora_drainer()
    running = request("used", offline=False)
    running.output_ids = [1] * 90
    for_long = request("another", offline=is_offline, waits_s=7200.0)
    one.lora_drainer.update_draining_state([for_long], [running])
    assert one.lora_drainer.can_schedule(request("used", offline=False)) is may_start


@pytest.mark.parametrize("is_within", [True, False])
def test_what_outgrew_the_reserve_is_shed_where_decodes_go_first_too(is_within):
    victims, pooled = iter(["one", None]), []
    one = scheduler(
        _shed=[],
        chunked_req=None,
        kv_limits=SimpleNamespace(is_within=is_within, excess_tokens=lambda num: 100),
        step_control=SimpleNamespace(parked=[], retract_one=lambda batch, running: next(victims)),
        _add_request_to_queue=lambda req, is_retracted: pooled.append(req),
    )
    running = SimpleNamespace(reqs=[], batch_is_full=True)
    one._shed_without_a_pass(running)
    assert pooled == ([] if is_within else ["one"])
    assert running.batch_is_full is is_within  # there is room for others now


def between_chunks(**fields: Any) -> Any:
    """An offline request whose prefill has begun."""
    terms = SimpleNamespace(is_offline=True)
    usual = {"echo_terms": terms, "to_finish": None, "return_logprob": False}
    counts = {"inflight_middle_chunks": 1, "retraction_count": 0}
    able = {"finished": lambda: False, "beam_group": None, "session": None}
    return SimpleNamespace(**usual | counts | able | {"positional_embed_overrides": None} | fields)


class Named:
    """A request by its id."""

    def __init__(self, rid: str) -> None:
        self.rid = rid


class ShortOfMemory:
    """A batch whose decodes have room once so much was given up."""

    def __init__(self, needed: int, num_decodes: int) -> None:
        self.needed, self.given, self.reqs = needed, [], ["a decode"] * num_decodes

    def check_decode_mem(self) -> bool:
        return len(self.given) >= self.needed


@pytest.mark.parametrize(
    ("needed", "given", "is_left"),
    [
        (0, [], True),
        (1, ["parked"], True),
        (2, ["parked", "chunk"], False),
        (3, ["parked", "chunk"], False),  # the rest SGLang takes from those that decode
    ],
)
def test_decodes_that_run_out_of_memory_take_it_from_who_does_not_decode(
    needed, given, is_left, monkeypatch
):
    batch, pooled, parked = ShortOfMemory(needed, num_decodes=2), [], ["parked"]
    monkeypatch.setattr(offers, "retract_all", lambda **given: batch.given.append("chunk"))
    counts = SimpleNamespace(num_prefill_parks=0)
    chunk = between_chunks()
    one = scheduler(
        chunked_req=chunk,
        waiting_queue=[],
        _parked_chunks=[],
        _pending_chunked_abort_req=None,
        **dict.fromkeys(MEMORY),
        step_control=SimpleNamespace(counts=counts, without_turn=()),
        _retract_parked=lambda batch: batch.given.append(parked.pop()) or True if parked else False,
        _pool=lambda req, resumed: pooled.append((req, resumed)),
    )
    one._free_for_decode(batch)
    assert batch.given == given
    assert (one.chunked_req is chunk) is is_left
    assert pooled == [(chunk, True)] * (not is_left)
    assert counts.num_prefill_parks == len(pooled)


@pytest.mark.parametrize(("num_decodes", "is_set_aside"), [(1, True), (2, False)])
def test_the_last_decode_does_not_end_for_want_of_what_an_online_prompt_holds(
    num_decodes, is_set_aside, monkeypatch
):
    """Of several SGLang takes back one; the only one it would end with an error."""
    batch, queued = ShortOfMemory(1, num_decodes), []
    monkeypatch.setattr(offers, "retract_all", lambda **given: batch.given.append("chunk"))
    chunk = between_chunks(echo_terms=SimpleNamespace(is_offline=False))
    one = scheduler(
        chunked_req=chunk,
        _parked_chunks=[],
        _pending_chunked_abort_req=None,
        **dict.fromkeys(MEMORY),
        step_control=SimpleNamespace(without_turn=()),
        _retract_parked=lambda batch: False,
        _add_request_to_queue=lambda req, is_retracted: queued.append(req),
    )
    one._free_for_decode(batch)
    assert queued == [chunk] * is_set_aside
    assert (one.chunked_req is None) is is_set_aside


@pytest.mark.parametrize(
    ("is_disabled", "fields", "is_set_aside"),
    [
        (False, {}, True),
        (True, {}, False),  # its chunks would be lost each time
        (False, {"positional_embed_overrides": "some"}, False),
        (False, {"to_finish": "abort"}, False),
    ],
)
def test_a_prefill_yields_to_online_requests_only_where_its_chunks_are_kept(
    is_disabled, fields, is_set_aside, monkeypatch
):
    monkeypatch.setattr(offers, "retract_all", lambda **given: None)
    one = scheduler(
        chunked_req=between_chunks(**fields),
        waiting_queue=["online"],
        _parked_chunks=[],
        _pending_chunked_abort_req=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        tree_cache=SimpleNamespace(disable=is_disabled),
        hisparse_coordinator=None,
    )
    one._park_offline_chunk()
    assert (one.chunked_req is None) is is_set_aside


@pytest.mark.parametrize(
    ("given", "aborted"),
    [
        ("q-1", ["q-1"]),
        ("q", []),
        ("", []),
        (None, ["compiling q-1", "q-1", "q-10", "q-11", "q-12"]),
    ],
)
def test_an_abort_reaches_one_id_and_leaves_all_ids_as_they_were(given, aborted, monkeypatch):
    everybody = {rid: Named(rid) for rid in ("q-1", "q-10", "q-11", "q-12")}
    compiling = Named("compiling q-1")
    found: list[str] = []

    def as_sglang(self: Any, recv_req: Any) -> None:
        found.extend(
            req.rid
            for req in (*everybody.values(), compiling)
            if recv_req.abort_all or req.rid.startswith(recv_req.rid)
        )

    monkeypatch.setattr(sglang_scheduler.Scheduler, "abort_request", as_sglang)
    one = scheduler(
        waiting_queue=[everybody["q-10"]],
        chunked_req=everybody["q-12"],
        grammar_manager=SimpleNamespace(grammar_queue=[compiling]),
        offline_pool=SimpleNamespace(remove=lambda rid: []),
        step_control=SimpleNamespace(parked=[], note_abandoned=lambda req: None),
        collect_inflight_reqs=lambda: {everybody["q-1"], everybody["q-11"]},
    )
    one.abort_request(SimpleNamespace(rid=given or "", abort_all=given is None))
    assert sorted(found) == aborted
    assert sorted(everybody) == sorted(req.rid for req in everybody.values())


def in_time(rid: str, since_s: float = 0.0, to_finish: Any = None) -> Any:
    """A request that runs for so many seconds."""
    stats = SimpleNamespace(forward_entry_time=time.perf_counter() - since_s)
    return SimpleNamespace(rid=rid, to_finish=to_finish, time_stats=stats)


@pytest.fixture
def timed_out(monkeypatch) -> Any:
    """The ids that a scheduler with these fields ends because they have run for a minute."""
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "60")
    monkeypatch.setattr(sglang_scheduler.Scheduler, "_poll_timeout_aborts", lambda self: ["other"])
    empty = {"chunked_req": None, "last_batch": None, "_pending_chunked_abort_req": None}

    def poll(*, parked: Any = (), without_turn: Any = (), **fields: Any) -> list[str]:
        control = SimpleNamespace(parked=parked, without_turn=without_turn)
        clock = SimpleNamespace(tick=lambda: [])
        one = scheduler(**empty | fields, echo_clock=clock, step_control=control)
        other, *aborts = one._poll_timeout_aborts()
        assert other == "other"
        assert all("running timeout" in abort.finished_reason["message"] for abort in aborts)
        return [abort.rid for abort in aborts]

    return poll


def test_who_sits_out_may_run_out_of_its_time_too(timed_out):
    sits_out = [in_time("late", 61.0), in_time("in time"), in_time("known", 61.0, "abort")]
    assert timed_out(parked=sits_out) == ["late"]
    assert timed_out(without_turn=sits_out) == ["late"]


def test_who_waits_for_a_chunk_may_run_out_of_its_time_too(timed_out):
    late = in_time("late", 61.0)
    assert timed_out(chunked_req=late) == ["late"]
    assert timed_out(chunked_req=late, last_batch=SimpleNamespace(reqs=[])) == ["late"]
    assert timed_out(chunked_req=late, last_batch=SimpleNamespace(reqs=[late])) == []  # by SGLang
    assert timed_out(chunked_req=late, _pending_chunked_abort_req=late) == []
    assert timed_out(chunked_req=in_time("in time")) == []


@pytest.mark.parametrize(
    ("ran_before_s", "waited_s", "runs_for_s"),
    [(None, 7200.0, 0.0), (7230.0, 7200.0, 30.0), (30.0, 60.0, 30.0)],
    ids=["its first start", "it ran, and came back", "it just started"],
)
def test_who_waited_in_the_pool_did_not_run_meanwhile(
    monkeypatch, ran_before_s, waited_s, runs_for_s
):
    now_s = 100_000.0
    monkeypatch.setattr(offers, "time", SimpleNamespace(perf_counter=lambda: now_s))
    first_s = 0.0 if ran_before_s is None else now_s - ran_before_s
    stats = SimpleNamespace(forward_entry_time=first_s, wait_queue_entry_time=now_s - waited_s)
    req = Named("starts")
    req.time_stats = stats
    one = scheduler(
        _shed=[],
        _parked_chunks=[],
        _kept_positions=[],
        weighing=None,
        waiting_queue=[req],
        policy=SimpleNamespace(offered=(req,)),
        offline_pool=SimpleNamespace(take=lambda req: None),
        _note_pass=lambda started, num_offered: None,
    )
    one._take_back_offered(SimpleNamespace(reqs=[req]))
    assert stats.forward_entry_time == (now_s - runs_for_s if first_s else 0.0)


@pytest.mark.parametrize(
    ("return_logprob", "start", "has_them"),
    [(False, 0, False), (True, -1, False), (True, 0, True), (True, 9, True), (True, 10, False)],
)
def test_a_prompts_logprobs_are_told_from_those_of_the_answer(return_logprob, start, has_them):
    req = object.__new__(Req)
    req.return_logprob, req.logprob_start_len = return_logprob, start
    req.origin_input_ids = list(range(10))
    assert has_prompt_logprobs(req) is has_them


class Running:
    """A batch of requests of which those named have finished."""

    def __init__(
        self, reqs: str = "", *, finished: str = "", is_extend: bool = False, chunked=None
    ):
        self.reqs = [_named(rid, is_finished=rid in finished) for rid in reqs]
        self.forward_mode = SimpleNamespace(is_extend=lambda: is_extend)
        self.chunked_req = next((req for req in self.reqs if req.rid == chunked), None)


def _named(rid: str, *, is_finished: bool) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, finished=lambda: is_finished)


@pytest.mark.parametrize(
    ("running", "last", "goes_on"),
    [
        (Running("ab", finished="a"), None, True),
        (Running("ab", finished="ab"), None, False),
        (Running(), Running("a"), False),  # decoded last, and nobody is left
        # A step that did both holds all who decode until they are merged again.
        (Running(), Running("ab", finished="a", is_extend=True), True),
        (Running(), Running("ab", finished="ab", is_extend=True), False),
        (Running(), Running("a", is_extend=True, chunked="a"), False),
    ],
)
def test_who_sits_out_is_called_back_only_if_nobody_else_goes_on(running, last, goes_on):
    one = scheduler(chunked_req=None)
    assert one._anybody_runs(running, last) is goes_on
