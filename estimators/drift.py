"""Notices that a stream of errors is not what it used to be."""

from __future__ import annotations

import math


class DriftDetector:
    """Counts lasting shifts of a value's mean, up or down; single outliers do not count.

    Values are averaged in blocks, because the errors of steps that follow each other are
    alike. The first `REFERENCE` blocks say what is normal. Later ones are taken as standard
    scores, clipped so that a lone block cannot reach the threshold, and summed up beyond
    what is tolerated, in either direction. A sum above the threshold is a drift, and what is
    normal is learned anew. Shifts within `MIN_STD` (2 %, for log ratios) are never a drift.

    Source: Page (1954), the two-sided cumulative sum behind the Page-Hinkley test.
    """

    BLOCK, REFERENCE = 10, 30
    TOLERATED, THRESHOLD, CLIP = 1.0, 10.0, 4.0
    MIN_STD = 0.02

    def __init__(self) -> None:
        self.num_drifts = 0
        self.restart()

    def restart(self) -> None:
        """Learn anew what is normal; the count of drifts stays."""
        self._num_in_block = self._num_blocks = 0
        self._block_sum = self._mean = self._square_sum = self._up = self._down = 0.0

    def shift(self, by: float) -> None:
        """Values are told from another zero from now on, and the same is normal as before."""
        self._mean += by
        self._block_sum += by * self._num_in_block

    def observe(self, value: float) -> bool:
        """Take in a value; True when it completes a drift. O(1)."""
        self._num_in_block += 1
        self._block_sum += value
        if self._num_in_block < self.BLOCK:
            return False
        mean = self._block_sum / self.BLOCK
        self._num_in_block, self._block_sum = 0, 0.0
        if self._num_blocks < self.REFERENCE:
            self._learn(mean)
            return False
        return self._judge(mean)

    def _learn(self, mean: float) -> None:
        """Welford's running mean and sum of squared deviations."""
        self._num_blocks += 1
        delta = mean - self._mean
        self._mean += delta / self._num_blocks
        self._square_sum += delta * (mean - self._mean)

    def _judge(self, mean: float) -> bool:
        std = max(self.MIN_STD, math.sqrt(self._square_sum / (self.REFERENCE - 1)))
        score = min(max((mean - self._mean) / std, -self.CLIP), self.CLIP)
        self._up = max(0.0, self._up + score - self.TOLERATED)
        self._down = max(0.0, self._down - score - self.TOLERATED)
        if max(self._up, self._down) <= self.THRESHOLD:
            return False
        self.restart()
        self.num_drifts += 1
        return True
