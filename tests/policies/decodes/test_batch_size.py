"""How many requests a step decodes: growth, back-off and the largest CUDA graph."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.decodes.batch_size import create_batch_size

NAMES = ("fixed", "adaptive")
observations = st.lists(st.booleans(), max_size=30)


@pytest.mark.parametrize("name", NAMES)
@given(st.integers(1, 64), st.integers(0, 1000), observations, st.integers(0, 2000))
def test_the_limit_stays_between_base_and_maximum(name, base, more, exceeded, num_online):
    size = create_batch_size(name, base=base, maximum=base + more)
    for one in exceeded:
        size.observe(one)
        assert base <= size.limit <= base + more
        assert size.offline_room(num_online) == max(0, size.limit - num_online)


@given(st.integers(1, 64), st.integers(0, 1000), observations)
def test_adaptive_is_the_base_doubled_for_every_step_since_the_last_that_was_exceeded(
    base, more, exceeded
):
    size = create_batch_size("adaptive", base=base, maximum=base + more)
    for one in exceeded:
        size.observe(one)
    since = exceeded[::-1].index(True) if True in exceeded else len(exceeded)
    assert size.limit == min(base * 2**since, base + more)


def test_adaptive_starts_at_the_base_doubles_and_falls_back():
    size = create_batch_size("adaptive", base=8, maximum=50)
    limits = [size.limit]
    for exceeded in (False, False, False, False, True, False):
        size.observe(exceeded)
        limits.append(size.limit)
    assert limits == [8, 16, 32, 50, 50, 8, 16]


def test_fixed_does_not_move():
    size = create_batch_size("fixed", base=8, maximum=50)
    for exceeded in (False, True):
        size.observe(exceeded)
        assert size.limit == 50


@pytest.mark.parametrize("name", NAMES)
@given(st.integers(1, 64), st.integers(1, 300), st.sets(st.integers(1, 256), min_size=1))
def test_offline_decodes_never_lift_an_online_step_above_the_largest_graph(
    name, num_online, maximum, captured
):
    size = create_batch_size(name, base=1, maximum=maximum, captured_batch_sizes=captured)
    for _ in range(9):
        size.observe(False)
    room = size.offline_room(num_online)
    assert room == 0 or num_online + room <= max(captured)
    assert num_online + room <= max(maximum, num_online)


def test_without_online_decodes_the_graphs_do_not_limit():
    size = create_batch_size("fixed", base=1, maximum=64, captured_batch_sizes=[1, 2, 4, 8])
    assert size.offline_room(0) == 64
    assert size.offline_room(1) == 7
    assert size.offline_room(9) == 0


@pytest.mark.parametrize(("base", "maximum"), [(0, 8), (9, 8), (-1, -1)])
def test_bounds_that_leave_no_size_are_refused(base, maximum):
    with pytest.raises(ValueError, match=f"base is {base} and maximum is {maximum}"):
        create_batch_size("adaptive", base=base, maximum=maximum)


def test_a_step_without_requests_is_refused():
    with pytest.raises(ValueError, match="maximum is 0"):
        create_batch_size("fixed", base=1, maximum=0)


def test_an_unknown_batch_size_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'tcp'; known are fixed, adaptive"):
        create_batch_size("tcp", base=1, maximum=2)
