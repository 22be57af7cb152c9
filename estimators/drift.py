"""Notices that a stream of errors is not what it used to be."""

from __future__ import annotations

import statistics

# Of normally distributed values.
MAD_TO_STD = 1.4826


class DriftDetector:
    """Counts lasting shifts of a value's mean, up or down; single outliers do not count.

    Values are averaged in blocks, because the errors of steps that follow each other are
    alike. The first `REFERENCE` blocks say what is normal, a lone one of them as little as
    any. Later ones are taken as standard scores, clipped so that a lone block cannot reach the
    threshold, and summed up beyond what is tolerated, in either direction. A sum above the
    threshold is a drift, and what is normal is learned anew. Shifts within `MIN_STD` (2 %, for
    log ratios) are never a drift.

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
        self._num_in_block = 0
        self._block_sum = self._mean = self._std = self._up = self._down = 0.0
        self._reference: list[float] = []

    def shift(self, by: float) -> None:
        """Values are told from another zero from now on, and the same is normal as before."""
        self._mean += by
        self._block_sum += by * self._num_in_block
        self._reference = [mean + by for mean in self._reference]

    def observe(self, value: float) -> bool:
        """Take in a value; True when it completes a drift. O(1)."""
        self._num_in_block += 1
        self._block_sum += value
        if self._num_in_block < self.BLOCK:
            return False
        mean = self._block_sum / self.BLOCK
        self._num_in_block, self._block_sum = 0, 0.0
        if self._std:
            return self._judge(mean)
        self._reference.append(mean)
        if len(self._reference) == self.REFERENCE:
            self._settle()
        return False

    def _settle(self) -> None:
        """What is normal: mean and deviation of the first blocks, clipped about their median."""
        median = statistics.median(self._reference)
        spread = MAD_TO_STD * statistics.median(abs(one - median) for one in self._reference)
        most = self.CLIP * max(self.MIN_STD, spread)
        means = [min(max(one, median - most), median + most) for one in self._reference]
        self._mean = statistics.fmean(means)
        self._std = max(self.MIN_STD, statistics.stdev(means, self._mean))
        self._reference = []

    def _judge(self, mean: float) -> bool:
        score = min(max((mean - self._mean) / self._std, -self.CLIP), self.CLIP)
        self._up = max(0.0, self._up + score - self.TOLERATED)
        self._down = max(0.0, self._down - score - self.TOLERATED)
        if max(self._up, self._down) <= self.THRESHOLD:
            return False
        self.restart()
        self.num_drifts += 1
        return True
