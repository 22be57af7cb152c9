"""SGLang's order of its queue while offline requests stand behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import CacheAwarePolicy

from echo_sgl.batch_shape import BatchShape
from echo_sgl.engine.admission.queue_order import EchoSchedulePolicy

CHUNK_TOKENS = 256


class Request(SimpleNamespace):
    """Equal only to itself, as SGLang's."""

    __hash__, __eq__ = object.__hash__, object.__eq__


def request(num_tokens: int, *, offline: bool) -> Any:
    return Request(
        origin_input_ids=range(num_tokens),
        full_untruncated_fill_ids=range(num_tokens),
        output_ids=[],
        num_matched_prefix_tokens=0,
        prefix_len=0,
        echo_terms=SimpleNamespace(is_offline=offline),
    )


@pytest.mark.parametrize(("is_offline", "chunk_tokens"), [(True, 256), (False, 156)])
def test_shortest_prefill_first_leaves_room_for_those_that_may_start(is_offline, chunk_tokens):
    """Beside a request between chunks no offline one starts."""
    policy = object.__new__(EchoSchedulePolicy)
    policy.policy, policy.decodes = CacheAwarePolicy.SHORTEST_PREFILL_FIRST, BatchShape()
    policy.planner = SimpleNamespace(online_chunk_tokens=lambda shape, max_tokens, **_: max_tokens)
    short = request(100, offline=is_offline)
    policy.offered = (short,) if is_offline else ()
    long = request(1000, offline=False)
    limit = policy.shortest_prefill_chunk_limit(long, [short], CHUNK_TOKENS, 1)
    assert min(limit, CHUNK_TOKENS) == chunk_tokens
