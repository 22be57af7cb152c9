"""Comparing answers where two tokens are as likely as each other, on a real server."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.test_scheduler import mixed_bodies
from tests.engine.traffic import UntilTie, decided_texts, send_all, texts


def test_a_text_is_equal_to_what_goes_on_behind_the_tie_and_to_nothing_else():
    until_tie = UntilTie("in for")
    for text, is_equal in (("in for self", True), ("in far self", False), ("in fo", False)):
        assert ([text] == [until_tie]) is ([until_tie] == [text]) is is_equal
        assert ([text] != [until_tie]) is not is_equal


def test_answers_are_compared_as_far_as_the_likeliest_token_is_ahead(stock_server):
    """A hundredth in logprob stands for rounding, so that the demo model has ties."""
    bodies = mixed_bodies()
    decided = decided_texts(stock_server, bodies, least_lead=0.01)
    whole = texts(asyncio.run(send_all(stock_server, bodies)))
    assert whole == decided
    cut = [number for number, text in enumerate(decided) if isinstance(text, UntilTie)]
    assert 0 < len(cut) < len(bodies)
    assert all(len(str(decided[number])) < len(whole[number]) for number in cut)
    assert any(str(decided[number]) for number in cut)


def test_answers_that_rounding_alone_decides_are_refused(stock_server):
    with pytest.raises(AssertionError, match="other prompts"):
        decided_texts(stock_server, mixed_bodies(), least_lead=1e9)
