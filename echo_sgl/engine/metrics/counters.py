"""Counts that the engine keeps anyway, shown as Prometheus counters."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class CounterTotals:
    """Brings Prometheus counters, which can only go up by so much, to totals counted elsewhere."""

    def __init__(self) -> None:
        self._seen: defaultdict[Any, int] = defaultdict(int)

    def bring(self, counter: Any, total: int) -> None:
        """Raise a counter, or one of its labelled children, to `total`."""
        if total != self._seen[counter]:
            counter.inc(total - self._seen[counter])
            self._seen[counter] = total
