"""How many requests a step decodes at most."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable


class BatchSize(ABC):
    """A limit on the decodes of a step, and what it leaves to offline ones.

    With `captured_batch_sizes` offline decodes never lift a step with online decodes above the
    largest size that CUDA graphs were captured for: behind it a step runs without graph, takes
    longer, so that more requests gather, and comes back only when they have gone
    (SGLang issue 33483). Units: requests.
    `learns`: each step has to be observed.
    """

    learns = False

    def __init__(self, *, captured_batch_sizes: Iterable[int] = ()) -> None:
        self._largest_captured = max(captured_batch_sizes, default=None)

    @property
    @abstractmethod
    def limit(self) -> int:
        """The most requests, online and offline, that the next step decodes."""

    def observe(self, exceeded: bool) -> None:
        """Note whether the online work of a step was predicted to take longer than it may."""

    def offline_room(self, num_online: int) -> int:
        """How many offline decodes may join `num_online` online ones; never negative."""
        limit = self.limit
        if num_online and self._largest_captured is not None:
            limit = min(limit, self._largest_captured)
        return max(0, limit - num_online)


class FixedBatchSize(BatchSize):
    """Always the same. Errors: `ValueError` when `maximum` is below 1."""

    def __init__(self, maximum: int, *, captured_batch_sizes: Iterable[int] = ()) -> None:
        super().__init__(captured_batch_sizes=captured_batch_sizes)
        if maximum < 1:
            raise ValueError(f"maximum is {maximum}; a step must be allowed at least 1 request")
        self._maximum = maximum

    @property
    def limit(self) -> int:
        return self._maximum


class AdaptiveBatchSize(BatchSize):
    """Doubles with every step in which online work fits, and falls back to `base` when not.

    As a congestion window does: it finds out how much goes well, and gives all of it up at the
    first sign of trouble. `base` is 128 in the paper.

    Source: BROS 4.2, adaptive batch sizing; what is observed is the early return of algorithm 1,
    lines 11-12. Errors: `ValueError` unless 1 <= base <= maximum.
    """

    learns = True

    def __init__(
        self, *, base: int, maximum: int, captured_batch_sizes: Iterable[int] = ()
    ) -> None:
        super().__init__(captured_batch_sizes=captured_batch_sizes)
        if not 1 <= base <= maximum:
            raise ValueError(
                f"base is {base} and maximum is {maximum}; allowed is 1 <= base <= maximum: "
                "the batch size starts at base and grows to maximum"
            )
        self._base, self._maximum = base, maximum
        self._limit = base

    @property
    def limit(self) -> int:
        return self._limit

    def observe(self, exceeded: bool) -> None:
        self._limit = self._base if exceeded else min(2 * self._limit, self._maximum)


def create_batch_size(
    name: str, *, base: int, maximum: int, captured_batch_sizes: Iterable[int] = ()
) -> BatchSize:
    """Build a batch size by its config name; only "adaptive" looks at `base`.

    Errors: `ValueError` names the known ones.
    """
    if name == "adaptive":
        return AdaptiveBatchSize(
            base=base, maximum=maximum, captured_batch_sizes=captured_batch_sizes
        )
    if name == "fixed":
        return FixedBatchSize(maximum, captured_batch_sizes=captured_batch_sizes)
    raise ValueError(f"batch size is {name!r}; known are fixed, adaptive")
