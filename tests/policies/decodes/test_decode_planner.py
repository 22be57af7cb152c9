"""Which offline decodes a planner lets join, with and without a limit that can be predicted."""

from __future__ import annotations

import pytest

from echo_sgl.batch_shape import BatchShape
from echo_sgl.policies.decodes.contexts import NOBODY, Contexts
from tests.policies.plans import NOW_S, Attention, Clockwork, Unknown, begin, decode, planner


def test_while_nothing_is_known_nobody_who_sits_out_is_left_out_for_good():
    """What would tell how long a step takes is a step."""
    plan = begin(planner(Unknown()), decodes=3, due_in_s=9.0)
    parked = {"shortest_parked": 100, "parked_since_s": NOW_S}
    assert not plan.is_settled(Contexts.of([100]), **parked)
    assert not plan.is_settled(NOBODY, **parked)


@pytest.mark.parametrize("clock", [Clockwork, Unknown])
def test_without_a_limit_all_who_have_started_decode_and_chunks_are_whole(clock):
    plan = begin(planner(clock(), limit="off", max_decodes=4), decodes=3, due_in_s=0.0)
    assert plan.all_decode(Contexts.of([100] * 9))
    chosen = plan.choose_decodes(lambda: [decode(n, is_running=n > 1) for n in range(9)])
    assert len(chosen) == 9
    facts = {"cached_tokens": 0, "max_tokens": 1000, "page_size": 1}
    assert plan.offline_chunk_tokens(BatchShape(), **facts) == 1000


@pytest.mark.parametrize("context", [1, 200])
def test_the_longest_context_of_a_step_may_be_that_of_an_online_decode(context):
    """Two of 100 tokens beside one of so many: 30 ms, and what they attend to."""
    takes_s = 0.03 + 1e-4 * (200 + context + max(100, context))
    for spare_s, fits in ((1e-6, True), (-1e-6, False)):
        plan = begin(planner(Attention()), decodes=2, due_in_s=takes_s + spare_s)
        assert plan.all_decode(Contexts.of([context])) is fits
        assert plan.with_decode_s(context) == pytest.approx(takes_s)
