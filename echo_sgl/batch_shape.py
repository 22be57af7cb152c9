"""What one step of the engine runs, as the numbers that its execution time depends on.

add_prefill(new=4, cached=3):   key      0 1 2 3 4 5 6
                                query 3  # # # # . . .
                                query 4  # # # # # . .    half the square 7^2 minus the
                                query 5  # # # # # # .    square 3^2: `prefill_area` / 2
                                query 6  # # # # # # #
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class StepKind(StrEnum):
    """What a step runs; errors and bands are kept apart by it."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class BatchRow(NamedTuple):
    """One step as it is stored and fitted: a row of sums, all at least 0.

    `prefill_area`: sum of (p + l)^2 - p^2 over prefills of l new tokens behind p cached ones,
    twice what attention computes (Echo eq. 6). `decode_tokens`: sum of the context lengths.
    `max_prefill_tokens`: the highest p + l.
    Units: tokens, tokens^2. Shapes: scalars; in a fit, arrays with one entry per step.
    """

    num_prefills: int
    prefill_tokens: int
    cached_tokens: int
    prefill_area: int
    num_decodes: int
    decode_tokens: int
    max_decode_tokens: int
    max_prefill_tokens: int = 0

    @property
    def kind(self) -> StepKind:
        return _kind(self.num_prefills, self.num_decodes)


class BatchShape:
    """A step that is being put together: one request more, or the last one taken back, in O(1).

    Has the attributes of `BatchRow`, so that a model predicts from either. `undo` is exact:
    the sums are integers, and a request carries the maximum that held before it came.
    """

    __slots__ = (*BatchRow._fields, "_added")

    def __init__(self) -> None:
        self.num_prefills = self.prefill_tokens = self.cached_tokens = self.prefill_area = 0
        self.num_decodes = self.decode_tokens = 0
        self.max_decode_tokens = self.max_prefill_tokens = 0
        # Of a prefill (new, cached), of a decode (0, context); and the maximum before.
        self._added: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._added)

    @property
    def kind(self) -> StepKind:
        return _kind(self.num_prefills, self.num_decodes)

    def add_prefill(self, new_tokens: int, cached_tokens: int = 0) -> None:
        """Add a request that computes `new_tokens` behind a cached prefix.

        Errors: `ValueError` when there is nothing to compute or the prefix is negative.
        """
        if new_tokens < 1 or cached_tokens < 0:
            raise ValueError(
                f"prefill of {new_tokens} new behind {cached_tokens} cached tokens; "
                "new must be at least 1 and cached at least 0"
            )
        self._added.append((new_tokens, cached_tokens, self.max_prefill_tokens))
        self.num_prefills += 1
        self.prefill_tokens += new_tokens
        self.cached_tokens += cached_tokens
        self.prefill_area += new_tokens * (new_tokens + 2 * cached_tokens)
        self.max_prefill_tokens = max(self.max_prefill_tokens, new_tokens + cached_tokens)

    def add_decode(self, context_tokens: int) -> None:
        """Add a request that computes one token, which attends to `context_tokens`.

        Errors: `ValueError` when the context is empty; the new token itself belongs to it.
        """
        if context_tokens < 1:
            raise ValueError(f"decode with {context_tokens} tokens of context; it must be >= 1")
        self._added.append((0, context_tokens, self.max_decode_tokens))
        self.num_decodes += 1
        self.decode_tokens += context_tokens
        self.max_decode_tokens = max(self.max_decode_tokens, context_tokens)

    def undo(self) -> None:
        """Take back the request added last. Errors: `IndexError` when there is none."""
        new_tokens, tokens, longest_before = self._added.pop()
        if new_tokens:
            self.num_prefills -= 1
            self.prefill_tokens -= new_tokens
            self.cached_tokens -= tokens
            self.prefill_area -= new_tokens * (new_tokens + 2 * tokens)
            self.max_prefill_tokens = longest_before
        else:
            self.num_decodes -= 1
            self.decode_tokens -= tokens
            self.max_decode_tokens = longest_before

    def row(self) -> BatchRow:
        """The step as it is now; what is added later does not change it."""
        return BatchRow(
            self.num_prefills,
            self.prefill_tokens,
            self.cached_tokens,
            self.prefill_area,
            self.num_decodes,
            self.decode_tokens,
            self.max_decode_tokens,
            self.max_prefill_tokens,
        )


class SummedShape(BatchShape):
    """A step that starts from the sums of some decodes instead of from single requests."""

    __slots__ = ()

    def __init__(self, num_decodes: int, decode_tokens: int, max_decode_tokens: int) -> None:
        super().__init__()
        self.num_decodes, self.decode_tokens = num_decodes, decode_tokens
        self.max_decode_tokens = max_decode_tokens

    def __len__(self) -> int:
        return self.num_decodes + self.num_prefills


Step = BatchShape | BatchRow


def decode_row(contexts: Sequence[int]) -> BatchRow | None:
    """A step of decodes with these contexts, in tokens, made at once; None without any."""
    if not contexts:
        return None
    return BatchRow(0, 0, 0, 0, len(contexts), sum(contexts), max(contexts))


def rows_of(steps: Iterable[Step]) -> FloatArray:
    """Steps as an array for `fit`. Shapes: (steps, columns), columns in `BatchRow`'s order."""
    rows = [step.row() if isinstance(step, BatchShape) else step for step in steps]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(BatchRow._fields))


def _kind(num_prefills: int, num_decodes: int) -> StepKind:
    if num_prefills:
        return StepKind.MIXED if num_decodes else StepKind.PREFILL
    if num_decodes:
        return StepKind.DECODE
    raise ValueError("a step without requests has no kind; add a prefill or a decode first")
