"""The cache that online requests used lately: what a sweep of offline work must not flush."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Use:
    num_tokens: int
    last_use_s: float


class WorkingSet:
    """Tree nodes by their last online use, as far as a token limit and a window allow.

    A node is protected while it is here. It leaves when its last use is older than
    `window_s` or when younger ones fill `limit_tokens`; what is not used of the limit
    protects nothing and so is lent to offline work. Cost: O(1) per use.
    """

    def __init__(self, *, limit_tokens: int, window_s: float) -> None:
        self._limit_tokens = limit_tokens
        self._window_s = window_s
        self._uses: OrderedDict[int, _Use] = OrderedDict()
        self.num_tokens = 0

    def __contains__(self, node: int) -> bool:
        return node in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def use(self, node: int, num_tokens: int, now_s: float) -> None:
        """Note an online use of a node that holds `num_tokens` tokens."""
        self.forget(node)
        self._uses[node] = _Use(num_tokens, now_s)
        self.num_tokens += num_tokens

    def split(self, node: int, *, upper: int, upper_tokens: int) -> None:
        """Its first `upper_tokens` tokens became a node of their own."""
        if (use := self._uses.get(node)) is not None:
            use.num_tokens -= upper_tokens
            self._uses[upper] = _Use(upper_tokens, use.last_use_s)

    def forget(self, node: int) -> None:
        """The node was evicted, or is about to be noted anew."""
        if (use := self._uses.pop(node, None)) is not None:
            self.num_tokens -= use.num_tokens

    def clear(self) -> None:
        self._uses.clear()
        self.num_tokens = 0

    def expire(self, now_s: float) -> list[int]:
        """Drop what is too old or too much, least recently used first; return the dropped."""
        dropped: list[int] = []
        while self._uses:
            node, use = next(iter(self._uses.items()))
            is_old = use.last_use_s < now_s - self._window_s
            if not is_old and self.num_tokens <= self._limit_tokens:
                break
            self.forget(node)
            dropped.append(node)
        return dropped
