"""Contexts that are joined are those of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.decodes.contexts import NOBODY, Contexts

tokens = st.lists(st.integers(1, 5000), max_size=6)


@given(tokens, tokens, tokens)
def test_joined_contexts_are_those_of_all(one: list[int], two: list[int], three: list[int]) -> None:
    joined = Contexts.of(one).joined(Contexts.of(two), Contexts.of(three))
    assert joined == Contexts.of([*one, *two, *three])


@given(tokens, st.integers(0, 5000))
def test_what_each_has_made_since_counts_for_all_of_them(some: list[int], more: int) -> None:
    assert Contexts.of(some).longer(more) == Contexts.of([one + more for one in some])


@given(tokens.filter(bool), st.integers(1, 5000), st.data())
def test_one_more_or_less_is_as_if_all_were_looked_at(
    some: list[int], more: int, data: st.DataObject
) -> None:
    assert Contexts.of(some).with_one(more) == Contexts.of([*some, more])
    assert NOBODY.with_one(more) == Contexts.of([more])
    less = list(some)
    less.remove(gone := data.draw(st.sampled_from(some)))
    without = Contexts.of(some).without(gone)
    is_extreme = gone in (max(some), min(some))
    assert without == (Contexts.of(less) if not less or not is_extreme else None)
