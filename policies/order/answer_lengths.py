"""How long answers will be: as long as others were, and none longer than it may be."""

from __future__ import annotations

import math

from sortedcontainers import SortedDict

# What one answer weighs in the mean, once there were as many as make this the weight of each.
LEAST_WEIGHT = 0.02


class AnswerLengths:
    """The mean length of the answers that ended.

    All weigh the same until there were 1 / `LEAST_WEIGHT`, from then on the newer ones more: the
    first says no more than the second. Units: tokens.
    """

    def __init__(self) -> None:
        self._mean_tokens, self._num_answers = 0.0, 0

    @property
    def mean_tokens(self) -> float | None:
        """None before the first has ended."""
        return self._mean_tokens if self._num_answers else None

    @property
    def expected_tokens(self) -> int | None:
        """The mean as whole tokens, rounded up; None before the first has ended."""
        return math.ceil(self._mean_tokens) if self._num_answers else None

    def note(self, num_tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self._num_answers += 1
        weight = max(1 / self._num_answers, LEAST_WEIGHT)
        self._mean_tokens += weight * (num_tokens - self._mean_tokens)


class ExpectedAnswers:
    """The tokens of many answers that have not begun, each with a limit of its own.

    `add` and `remove` cost O(log n) in the limits that differ, `total` as much as there are
    such limits between what is expected now and what was when it was asked last: however many
    answers there are, no more than the tokens that lie between. Units: tokens.
    """

    def __init__(self) -> None:
        self._num_by_limit: SortedDict[int, int] = SortedDict()
        self._all_limits_tokens = 0
        # Of the answers whose limits are no higher than what is expected, and how many are above.
        self._expected_tokens = self._below_tokens = self._num_above = 0

    def add(self, limit_tokens: int) -> None:
        self._change(limit_tokens, 1)

    def remove(self, limit_tokens: int) -> None:
        """Errors: `KeyError` if none has that limit."""
        if limit_tokens not in self._num_by_limit:
            raise KeyError(limit_tokens)
        self._change(limit_tokens, -1)
        if not self._num_by_limit[limit_tokens]:
            del self._num_by_limit[limit_tokens]

    def _change(self, limit_tokens: int, number: int) -> None:
        self._num_by_limit[limit_tokens] = self._num_by_limit.get(limit_tokens, 0) + number
        self._all_limits_tokens += number * limit_tokens
        if limit_tokens > self._expected_tokens:
            self._num_above += number
        else:
            self._below_tokens += number * limit_tokens

    def total(self, expected_tokens: int | None) -> int:
        """Of all, if each has as many as are expected, or its limit; None: all their limits."""
        if expected_tokens is None:
            return self._all_limits_tokens
        if expected_tokens != self._expected_tokens:
            self._expect(expected_tokens)
        return self._below_tokens + self._num_above * expected_tokens

    def _expect(self, expected_tokens: int) -> None:
        """Move the limits between what was expected and what is to the other side."""
        first, last = sorted((self._expected_tokens, expected_tokens))
        sign = 1 if expected_tokens > self._expected_tokens else -1
        for limit_tokens in self._num_by_limit.irange(first, last, inclusive=(False, True)):
            number = sign * self._num_by_limit[limit_tokens]
            self._below_tokens += number * limit_tokens
            self._num_above -= number
        self._expected_tokens = expected_tokens
