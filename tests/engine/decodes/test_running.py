"""The running requests counted on from step to step are those that looking them up would find."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from echo_sgl.batch_shape import BatchShape, decode_row
from echo_sgl.engine.decodes.running import Running, offline_of
from echo_sgl.engine.requests.terms import RequestTerms
from echo_sgl.policies.decodes.contexts import Contexts
from echo_sgl.policies.limits.step_limit import ENDING_TOKENS, Promise
from echo_sgl.types import Task

PROMISE = Promise(1.0, 0.1)


@dataclass(eq=False)
class Decoding:
    """What `Running` asks of SGLang's `Req`."""

    echo_terms: RequestTerms
    prompt_tokens: int
    output_ids: list[int] = field(default_factory=lambda: [1])
    is_over: bool = False
    sampling_params: Any = None
    to_finish: Any = None
    beam_group: Any = None
    session: Any = None
    finished_reason: Any = None
    lora_id: Any = None
    rid: str = ""
    num_looks: int = 0

    @property
    def seqlen(self) -> int:
        return self.prompt_tokens + len(self.output_ids)

    def finished(self) -> bool:
        self.num_looks += 1
        return self.is_over


def decoding(
    task: Task, prompt_tokens: int = 10, promise: Promise = PROMISE, max_tokens: int = 400
) -> Any:
    allowed = SimpleNamespace(max_new_tokens=max_tokens)
    terms = RequestTerms(task, promise, 0.0, math.inf)
    return Decoding(terms, prompt_tokens, sampling_params=allowed)


def facts(running: Running, reqs: Any) -> tuple[Any, ...]:
    return running.online.row(), running.offline, running.row_of(reqs)


def step(reqs: list[Any]) -> None:
    for req in reqs:
        req.output_ids.append(1)


@pytest.mark.parametrize("promises", [[PROMISE], [PROMISE, Promise(0.5, 0.02)]])
def test_counting_on_finds_what_looking_up_finds(promises: list[Promise]) -> None:
    rng = random.Random(0)
    running, reqs = Running((), 0.0), []
    for number in range(400):
        now_s = 0.05 * number
        if rng.random() < 0.3:  # somebody comes, as SGLang's batches take them in: a new list
            reqs = [
                *reqs,
                decoding(
                    rng.choice(list(Task)),
                    rng.randrange(90),
                    rng.choice(promises),
                    rng.choice([20, 100, 400]),
                ),
            ]
        if reqs and rng.random() < 0.2:
            leaving = rng.choice(reqs)
            leaving.is_over = True
            running.note_end(leaving)
            running.advance(reqs, now_s)  # it ended and is still in the batch
            reqs = [req for req in reqs if req is not leaving]
        running.advance(reqs, now_s)
        assert facts(running, reqs) == facts(fresh := Running(reqs, now_s), reqs)
        assert running.decode_due_s == pytest.approx(fresh.decode_due_s)
        assert running.endings == fresh.endings
        assert running.row_of(reqs) == decode_row([req.seqlen for req in reqs])
        some = reqs[::2]  # the others were parked since
        assert running.row_of(some) == decode_row([req.seqlen for req in some])
        assert running.row_of([*some, decoding(Task.OFFLINE)]) is None
        if rng.random() < 0.8:  # else the step prefilled, and these got nothing
            step(reqs)


def test_slack_goes_by_the_online_decode_that_is_due_first() -> None:
    """Two that had their first tokens at 0.5 s; nothing is ever due of an offline one."""
    patient, hasty = decoding(Task.ONLINE), decoding(Task.ONLINE, promise=Promise(0.5, 0.02))
    offline = decoding(Task.OFFLINE, promise=Promise(0.1, 0.001))
    running = Running([patient, hasty, offline], 0.5)
    assert running.decode_due_s == pytest.approx(0.52)
    step([patient, hasty, offline])
    running.advance([patient, hasty, offline], 0.51)
    assert running.decode_due_s == pytest.approx(0.54)
    running.note_end(hasty)
    running.advance([patient, offline], 0.51)
    assert running.decode_due_s == pytest.approx(0.5 + 2 * 0.1)
    step([patient, offline])
    running.advance([patient, offline], 0.6)
    assert running.decode_due_s == pytest.approx(0.5 + 3 * 0.1)
    running.advance([offline], 0.7)
    assert running.decode_due_s == math.inf


def test_before_its_first_token_is_seen_a_decode_is_due_as_who_waits() -> None:
    req = decoding(Task.ONLINE)
    req.output_ids.clear()
    running = Running([decoding(Task.ONLINE, promise=Promise(9.0, 9.0)), req], 0.0)
    assert running.decode_due_s == 1.0


def test_only_who_came_or_ended_is_looked_up() -> None:
    reqs = [decoding(Task.ONLINE), decoding(Task.OFFLINE), decoding(Task.OFFLINE)]
    running = Running(reqs, 0.0)
    looked_up = [req.num_looks for req in reqs]
    step(reqs)
    running.advance(reqs, 0.1)
    reqs.append(decoding(Task.OFFLINE))  # as SGLang merges batches: the same list, longer
    running.advance(reqs, 0.2)
    left = [reqs[0], *reqs[2:]]
    running.advance(left, 0.3)
    assert [req.num_looks for req in reqs[:3]] == looked_up
    running.note_end(left[1])
    running.advance(left, 0.4)
    assert [req.num_looks for req in left] == [looked_up[0], looked_up[2] + 1, 1]


def test_who_comes_without_a_token_is_looked_up_until_it_has_one() -> None:
    stays, comes = decoding(Task.OFFLINE, 10), decoding(Task.OFFLINE, 20)
    comes.output_ids.clear()  # under overlap it joins before its first token is seen
    running = Running([stays], 0.0)
    running.advance([stays, comes], 0.1)
    assert running.offline == Contexts.of([11, 20])
    step([comes])
    running.advance([stays, comes], 0.2)
    assert running.offline == Contexts.of([11, 21])
    step([stays, comes])
    running.advance([stays, comes], 0.3)
    assert running.offline == Contexts.of([12, 22])


def test_whoever_else_an_order_brings_is_found() -> None:
    reqs = [decoding(Task.OFFLINE, tokens) for tokens in (10, 20, 30)]
    running = Running(reqs, 0.0)
    step(reqs)
    running.advance(reqs[::-1], 0.1)
    assert running.offline == Contexts.of([12, 22, 32])
    running.advance([], 0.2)
    assert running.offline == Contexts.of([])


def test_a_first_token_is_noticed_in_the_step_in_which_it_is_seen() -> None:
    req = decoding(Task.ONLINE)
    req.output_ids.clear()  # under overlap it joins before its first token is seen
    running = Running([req], 1.0)
    assert req.echo_terms.first_token_s is None
    step([req])
    running.advance([req], 2.0)
    assert req.echo_terms.first_token_s == 2.0


def test_a_step_without_who_is_about_to_end_has_its_offline_requests_nevertheless() -> None:
    """Overlapped, SGLang leaves out whose last token is on its way, after it was looked at."""
    ends, stays, offline = decoding(Task.ONLINE), decoding(Task.ONLINE, 30), decoding(Task.OFFLINE)
    running = Running([ends, stays, offline], 0.0)
    batch = SimpleNamespace(reqs=[stays, offline])
    row = running.row_of(batch.reqs)
    assert row is not None
    online, num_offline = running.online_part(batch, row)
    assert (online.row(), num_offline) == (decode_row([31]), 1)


def test_who_has_ended_decodes_while_it_is_in_the_batch() -> None:
    over, stays, gone = (decoding(Task.OFFLINE, tokens) for tokens in (10, 30, 50))
    over.is_over = True
    running = Running([over, stays, gone], 0.0)
    assert running.row_of([over, stays]) == decode_row([11, 31])
    assert running.offline == Contexts.of([31, 51])


def test_the_online_part_of_a_mixed_step_is_its_online_prefills_and_decodes() -> None:
    reqs = [decoding(task) for task in (Task.ONLINE, Task.OFFLINE, Task.OFFLINE, Task.ONLINE)]
    batch = SimpleNamespace(reqs=reqs, extend_lens=[7, 5, 1, 1], prefix_lens=[3, 0, 40, 30])
    shape = BatchShape()
    shape.add_prefill(7, 3)
    shape.add_prefill(5, 0)
    expected = BatchShape()
    expected.add_prefill(7, 3)
    for context_tokens in (41, 31):
        shape.add_decode(context_tokens)
    expected.add_decode(31)
    online, num_offline = Running((), 0.0).online_part(batch, shape.row())
    assert (online.row(), num_offline) == (expected.row(), 2)


def test_who_is_to_end_may_not_sit_out() -> None:
    stays, ends = decoding(Task.OFFLINE, 10), decoding(Task.OFFLINE, 20)
    ends.to_finish = "aborted"
    assert offline_of([stays, ends, decoding(Task.ONLINE)]) == [stays]
    assert Running([stays, ends], 0.0).offline == Contexts.of([11])


def test_who_has_few_tokens_left_is_told_until_it_ends() -> None:
    reqs = [decoding(Task.ONLINE, max_tokens=ENDING_TOKENS + 2), decoding(Task.OFFLINE)]
    running = Running(reqs, 3.0)
    assert running.endings == (), "one token of so many is there"
    for number in range(ENDING_TOKENS):
        step(reqs)
        running.advance(reqs, 3.0 + 0.01 * number)
        [ending] = running.endings
        assert ending.num_left == ENDING_TOKENS - number
        # The TTFT has 1 s, the last of 18 tokens 17 TPOTs more.
        assert ending.due_s == pytest.approx(1.0 + 1.7)


def test_without_a_promise_nobody_ends_late() -> None:
    reqs = [decoding(Task.ONLINE, promise=Promise(), max_tokens=3)]
    assert Running(reqs, 0.0).endings == ()
