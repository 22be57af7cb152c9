"""Contexts that are joined are those of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.contexts import Contexts

tokens = st.lists(st.integers(1, 5000), max_size=6)


@given(tokens, tokens, tokens)
def test_joined_contexts_are_those_of_all(one: list[int], two: list[int], three: list[int]) -> None:
    joined = Contexts.of(one).joined(Contexts.of(two), Contexts.of(three))
    assert joined == Contexts.of([*one, *two, *three])
