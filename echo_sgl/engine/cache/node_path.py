"""The tokens on the way to a node of the tree, and the namespace that they are in."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, overload


class NodePath(Sequence[int]):
    """The tokens from the root to the end of a node, put together when a range is asked for.

    Most questions about a path are answered by the first token that no prompt has: copying the
    document before it would cost more than the answer.
    """

    def __init__(self, node: Any) -> None:
        parts = []
        while node.parent is not None:
            parts.append(node.key.raw_token_ids())
            node = node.parent
        parts.reverse()
        self._parts: list[array[int]] = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> array[int]: ...
    def __getitem__(self, index: int | slice) -> int | array[int]:
        if isinstance(index, slice):
            return self._tokens[index]
        if not 0 <= index < len(self):
            raise IndexError(f"token {index} of a path of {len(self)}; allowed is 0 to the last")
        part = bisect_right(self._ends, index)
        return self._parts[part][index - self._ends[part]]

    @cached_property
    def _tokens(self) -> array[int]:
        tokens = array("q")
        for part in self._parts:
            tokens.extend(part)
        return tokens


def namespace_of(key: Any) -> str:
    """Prompts in different namespaces never share KV cache; takes requests and tree keys."""
    return f"{key.extra_key or ''}\0{key.cache_salt or ''}"
