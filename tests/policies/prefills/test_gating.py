"""OOCO's gating: a larger batch against prompts that are computed again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchRow, BatchShape
from echo_sgl.policies.decodes.contexts import Contexts
from echo_sgl.policies.prefills.gating import Gating, gate_opens
from echo_sgl.sim.fleet.rules import decode_row, prefill_row, saturated_batch_size
from tests.policies.plans import Clockwork, Unknown, begin, planner
from tests.sim.fleets import DEVICE

SATURATED = saturated_batch_size(DEVICE)


def opens(num: int, tokens: int, *, lost_share: float, outputs: float = 100.0) -> bool:
    return gate_opens(
        DEVICE,
        decode_row(num, tokens),
        400,
        prefill_s=DEVICE.predict_s(prefill_row([400])),
        expected_outputs=outputs,
        lost_share=lost_share,
    )


def prefills(*rows: tuple[int, int]) -> BatchShape:
    shape = BatchShape()
    for new, cached in rows:
        shape.add_prefill(new, cached)
    return shape


class Flat(Clockwork):
    """Any number of decodes takes as long as one: each more is free. A prompt takes 400 ms."""

    def predict_s(self, step: BatchRow) -> float:
        return 0.4 if step.num_prefills else 0.010


def test_who_would_decode_alone_is_prefilled() -> None:
    assert opens(0, 0, lost_share=1.0)


def test_a_small_batch_is_worth_a_prefill_and_a_large_one_is_not_when_work_gets_lost() -> None:
    """OOCO 3.4.2: the gain of a larger batch against computing the prompt again."""
    assert opens(2, 800, lost_share=0.9)
    assert not opens(4 * SATURATED, 4 * SATURATED * 400, lost_share=0.9)


def test_more_lost_work_closes_the_gate() -> None:
    states = [opens(8, 3200, lost_share=share, outputs=10.0) for share in (0.0, 0.2, 1.0)]
    assert states[0] is True
    assert states[-1] is False
    assert states == sorted(states, reverse=True)


@given(st.integers(1, 40), st.integers(1, 500), st.floats(0.0, 1.0))
def test_where_decodes_are_free_a_start_saves_a_step_for_each_that_it_fills(num, outputs, share):
    """(n + 1) / n of a step for n + 1 tokens one by one, a step for all: 1 / n is saved each."""
    saved_s, lost_s = outputs * 0.010 / num, share * 0.4
    if abs(saved_s - lost_s) < 1e-9:
        return
    is_open = gate_opens(
        Flat(), decode_row(num, num), 9, prefill_s=0.4, expected_outputs=outputs, lost_share=share
    )
    assert is_open == (saved_s > lost_s)


def test_the_context_of_who_starts_is_what_it_finds_in_the_cache_too() -> None:
    class ByContext(Flat):
        def predict_s(self, step):
            return 0.0 if step.num_prefills else 1e-5 * step.decode_tokens

    gating = Gating()
    for _ in range(9):
        gating.note_started(prefills((5, 495), (15, 1485)))
        gating.note_lost()
    gating.note_answer(5)
    assert gating.num_open(ByContext(), decode_row(2, 1998), 1) == 0
    assert gating.num_open(ByContext(), decode_row(2, 2002), 1) == 1


def taught(*, num_lost: int, is_on: bool = True) -> Gating:
    """Twenty starts of 400 tokens and as many answers of 20."""
    gating = Gating(is_on)
    for number in range(20):
        gating.note_started(prefills((300, 100)))
        gating.note_answer(20)
        if number < num_lost:
            gating.note_lost()
    return gating


def is_open(gating: Gating) -> bool:
    return gating.num_open(Flat(), decode_row(9, 9), 1) == 1


def test_nothing_that_was_never_lost_closes_it() -> None:
    """However little a larger batch saves: nobody would start for as long as others decode."""

    class Dear(Flat):
        def predict_s(self, step):
            return 0.1 * step.num_decodes**2

    gating = taught(num_lost=0)
    assert gating.num_open(Dear(), decode_row(9, 9), 3) == 3
    gating.note_lost()
    assert gating.num_open(Dear(), decode_row(9, 9), 3) == 0


def test_a_start_is_a_prompt_as_long_as_those_were_with_their_prefixes() -> None:
    asked = []

    class Asked(Flat):
        def predict_s(self, step):
            asked.append(step)
            return super().predict_s(step)

    gating = Gating()
    gating.note_started(prefills((300, 100), (100, 300)))
    gating.note_lost()
    gating.note_answer(10)
    gating.num_open(Asked(), decode_row(9, 9), 1)
    assert [step.max_prefill_tokens for step in asked if step.num_prefills] == [400]


def test_it_is_open_until_somebody_has_started_and_answered() -> None:
    gating = Gating()
    for _ in range(30):
        gating.note_lost()
    assert is_open(gating)
    gating.note_started(prefills((300, 100)))
    gating.note_lost()
    assert is_open(gating)
    gating.note_answer(1)
    assert not is_open(gating)


def test_one_short_answer_before_all_others_does_not_keep_it_closed() -> None:
    gating = Gating()
    gating.note_answer(1)
    for _ in range(20):
        gating.note_started(prefills((300, 100)))
        gating.note_answer(200)
    gating.note_lost()
    assert gating.facts["expected_tokens"] > 180


def test_lost_starts_close_it_and_kept_ones_open_it_again() -> None:
    gating = taught(num_lost=20)
    assert gating.lost_share > 0.9
    assert not is_open(gating)
    for _ in range(200):
        gating.note_started(prefills((300, 100)))
    assert gating.lost_share < 0.05
    assert is_open(gating)


def test_a_pass_of_several_starts_counts_as_so_many() -> None:
    one_by_one, at_once = taught(num_lost=5), taught(num_lost=5)
    for _ in range(4):
        one_by_one.note_started(prefills((300, 100)))
    at_once.note_started(prefills(*[(300, 100)] * 4))
    assert abs(one_by_one.lost_share - at_once.lost_share) < 0.01
    assert 0.0 < at_once.lost_share < taught(num_lost=5).lost_share


def test_a_pass_that_starts_nobody_changes_nothing() -> None:
    gating = taught(num_lost=5)
    before = gating.facts
    gating.note_started(BatchShape())
    assert gating.facts == before


def test_answers_fade() -> None:
    gating = taught(num_lost=0)
    assert gating.facts["expected_tokens"] == 20
    for _ in range(300):
        gating.note_answer(100)
    assert 99 < gating.facts["expected_tokens"] <= 100


def test_switched_off_it_is_always_open() -> None:
    assert is_open(taught(num_lost=20, is_on=False))


def test_it_opens_for_as_many_as_pay_one_after_the_other() -> None:
    """20 tokens save 200 ms beside one, 100 beside two: 95 ms are lost by one start in four."""
    gating = taught(num_lost=5)
    lost_s = gating.lost_share * 0.4
    paying = int(20 * 0.010 / lost_s)
    assert 1 < paying < 8
    for num in range(1, paying + 1):
        assert gating.num_open(Flat(), decode_row(num, 50 * num), 9) == paying + 1 - num
    assert gating.num_open(Flat(), decode_row(paying + 1, 50), 9) == 0
    assert gating.num_open(Flat(), decode_row(1, 50), 1) == 1
    assert gating.num_open(Flat(), decode_row(1, 50), 0) == 0


def worth(plan, *, online: int, offline: int, parked: int = 0, most: int = 3) -> int:
    plan.gating = taught(num_lost=10, is_on=plan.gating.is_on)
    begin(plan, decodes=online, due_in_s=1.0)
    return plan.num_worth_starting(Contexts.of([50] * offline), parked, most)


def test_a_planner_asks_for_all_that_decode() -> None:
    """Half of the starts are lost: 190 ms, and 20 tokens save 200 ms beside one, 100 beside 2."""
    plan = planner(Flat(), gate=True)
    assert worth(plan, online=0, offline=1) == 1
    assert worth(plan, online=0, offline=9) == 0
    assert worth(plan, online=8, offline=1) == 0


def test_nobody_starts_while_many_that_have_started_sit_out() -> None:
    for model in (Flat(), Unknown()):
        plan = planner(model)
        assert worth(plan, online=9, offline=6, parked=2) == 3
        assert worth(plan, online=9, offline=5, parked=2) == 0
        assert worth(plan, online=0, offline=0, parked=1) == 0
        assert worth(planner(model, parked_share=1.0), online=9, offline=0, parked=9) == 3


def test_where_no_offline_request_decodes_the_gate_is_open() -> None:
    plan = planner(Flat(), gate=True, parked_share=1.0)
    assert worth(plan, online=9, offline=0) == worth(plan, online=0, offline=0) == 3
    assert worth(plan, online=9, offline=0, parked=1) == 0
    assert worth(plan, online=0, offline=1, parked=1) == 1


def test_one_lost_start_is_forgotten() -> None:
    """Else nobody would start where a longer prompt makes each token dearer."""
    gating = taught(num_lost=1)
    for _ in range(40):
        gating.note_started(prefills((300, 100)))
    assert 0 < gating.lost_share < 0.02
    assert is_open(gating)


def test_a_planner_without_the_setting_or_an_estimate_gates_nobody() -> None:
    assert worth(planner(Flat()), online=9, offline=9) == 3
    assert worth(planner(Unknown(), gate=True), online=9, offline=9) == 3
