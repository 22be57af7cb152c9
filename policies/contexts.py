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
            return cls(0, 0, 0, 0)
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
        """These and one more; not for none."""
        return Contexts(
            self.num + 1,
            self.tokens + tokens,
            max(self.longest, tokens),
            min(self.shortest, tokens),
        )

    def joined(self, *others: Contexts) -> Contexts:
        """These and all others."""
        some = [one for one in (self, *others) if one.num]
        if not some:
            return self
        nums, tokens, longest, shortest = zip(*some, strict=True)
        return Contexts(sum(nums), sum(tokens), max(longest), min(shortest))
