"""All of Echo's series on a `/metrics` page: sums over labels, growth since an earlier page."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from echo_sgl.cli.watching.scrape import PREFIX, quantile

Labels = frozenset[tuple[str, str]]
_GROWING = ("counter", "histogram")


@dataclass(frozen=True, slots=True)
class Samples:
    """Values by series name (without `echo_sgl_`) and labels; `growing` names the counts."""

    values: Mapping[tuple[str, Labels], float] = field(default_factory=dict)
    growing: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Samples:
        """Errors: `ValueError` when it is no Prometheus text."""
        values: dict[tuple[str, Labels], float] = {}
        growing: set[str] = set()
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(PREFIX):
                continue
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                values[name, frozenset(sample.labels.items())] = float(sample.value)
                if family.type in _GROWING:
                    growing.add(name)
        return cls(values, frozenset(growing))

    def __bool__(self) -> bool:
        return bool(self.values)

    def since(self, earlier: Samples) -> Samples:
        """Counts less those of `earlier`; gauges as they are.

        A count that went down means that the server was restarted: all then count from 0, also
        those that are higher again.
        """
        growth = {
            key: value - earlier.values.get(key, 0.0)
            for key, value in self.values.items()
            if key[0] in self.growing
        }
        if any(value < 0 for value in growth.values()):
            return self
        return Samples({**self.values, **growth}, self.growing)

    def find(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and values of the series of that name which carry these labels."""
        wanted = labels.items()
        for (found, given), value in self.values.items():
            if found == name and wanted <= given:
                yield dict(given), value

    def total(self, name: str, **labels: str) -> float:
        """Their sum; NaN when there is none."""
        values = [value for _, value in self.find(name, **labels)]
        return sum(values) if values else math.nan

    def largest(self, name: str, **labels: str) -> float:
        """The largest of them; NaN when there is none."""
        return max((value for _, value in self.find(name, **labels)), default=math.nan)

    def least(self, name: str, **labels: str) -> float:
        """The least of them; NaN when there is none."""
        return min((value for _, value in self.find(name, **labels)), default=math.nan)

    def quantile(self, name: str, share: float, **labels: str) -> float:
        """Of a histogram, summed over all other labels; NaN without observations."""
        buckets: defaultdict[float, float] = defaultdict(float)
        for found, value in self.find(f"{name}_bucket", **labels):
            buckets[float(found["le"])] += value
        return quantile(buckets, share)
