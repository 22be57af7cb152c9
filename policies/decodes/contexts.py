"""Decodes as sums: what a step's time depends on, without a look at each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Contexts(NamedTuple):
    """Decodes that are known by the number, sum and extremes of their contexts, in tokens."""

    num: int
    tokens: int
    longest: int
    shortest: int

    @classmethod
    def of(cls, context_tokens: Sequence[int]) -> Contexts:
        if not context_tokens:
            return NOBODY
        return cls(
            len(context_tokens), sum(context_tokens), max(context_tokens), min(context_tokens)
        )

    def longer(self, tokens: int) -> Contexts:
        """These, with so many tokens more each."""
        if not self.num:
            return self
        return Contexts(
            self.num,
            self.tokens + tokens * self.num,
            self.longest + tokens,
            self.shortest + tokens,
        )

    def with_one(self, tokens: int) -> Contexts:
        """These and one more."""
        if not self.num:
            return Contexts(1, tokens, tokens, tokens)
        return Contexts(
            self.num + 1,
            self.tokens + tokens,
            max(self.longest, tokens),
            min(self.shortest, tokens),
        )

    def without(self, tokens: int) -> Contexts | None:
        """These but for one; None where only a look at all others tells their extremes."""
        if self.num == 1:
            return NOBODY
        if tokens in (self.longest, self.shortest):
            return None
        return Contexts(self.num - 1, self.tokens - tokens, self.longest, self.shortest)

    def joined(self, *others: Contexts) -> Contexts:
        """These and all others."""
        some = [one for one in (self, *others) if one.num]
        if not some:
            return self
        nums, tokens, longest, shortest = zip(*some, strict=True)
        return Contexts(sum(nums), sum(tokens), max(longest), min(shortest))


NOBODY = Contexts(0, 0, 0, 0)
