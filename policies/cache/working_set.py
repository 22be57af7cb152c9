"""The cache that online requests used lately: what a sweep of offline work must not flush."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# The ratio of the last requests, the newest weighing most; 1 before the first.
_HIT_RATIO_REQUESTS = 32
_FULL_SHARE_HIT_RATIO = 0.5
# Never none: without any protection, returning users could not show that they return.
_LEAST_SHARE = 0.1


@dataclass(slots=True)
class _Use:
    num_tokens: int
    last_use_s: float


class WorkingSet:
    """Tree nodes by their last online use, as far as a token limit and a window allow.

    A node is protected while it is here. It leaves when its last use is older than
    `window_s` or when younger ones fill the share of `limit_tokens` that online requests
    earn: all of it when they find half of their prompts in the cache, less when they find
    less, for what nobody comes back to is not worth keeping. What is not used of it
    protects nothing and so is lent to offline work. Cost: O(1) per use.
    """

    def __init__(self, *, limit_tokens: int, window_s: float) -> None:
        self._limit_tokens = limit_tokens
        self._window_s = window_s
        self._uses: OrderedDict[int, _Use] = OrderedDict()
        self._hit_ratio = 1.0
        self.num_tokens = 0

    def __contains__(self, node: int) -> bool:
        return node in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def limit_tokens(self) -> int:
        """What may be protected now."""
        earned = min(1.0, max(_LEAST_SHARE, self._hit_ratio / _FULL_SHARE_HIT_RATIO))
        return int(self._limit_tokens * earned)

    def observe_hits(self, num_cached: int, num_tokens: int) -> None:
        """An online request started with `num_cached` of its tokens found in the cache."""
        self._hit_ratio += (num_cached / num_tokens - self._hit_ratio) / _HIT_RATIO_REQUESTS

    def use(self, node: int, num_tokens: int, now_s: float) -> None:
        """Note an online use of a node that holds `num_tokens` tokens."""
        if (use := self._uses.get(node)) is None:
            self._uses[node] = _Use(num_tokens, now_s)
            self.num_tokens += num_tokens
            return
        self.num_tokens += num_tokens - use.num_tokens
        use.num_tokens, use.last_use_s = num_tokens, now_s
        self._uses.move_to_end(node)

    def split(self, node: int, *, upper: int, upper_tokens: int) -> None:
        """Its first `upper_tokens` tokens became a node of their own."""
        if (use := self._uses.get(node)) is not None:
            use.num_tokens -= upper_tokens
            self._uses[upper] = _Use(upper_tokens, use.last_use_s)

    def forget(self, node: int) -> None:
        """The node was evicted."""
        if (use := self._uses.pop(node, None)) is not None:
            self.num_tokens -= use.num_tokens

    def clear(self) -> None:
        self._uses.clear()
        self.num_tokens = 0

    def expire(self, now_s: float) -> list[int]:
        """Drop what is too old or too much, least recently used first; return the dropped."""
        dropped: list[int] = []
        oldest_s, limit_tokens = now_s - self._window_s, self.limit_tokens
        for node, use in self._uses.items():
            if use.last_use_s >= oldest_s and self.num_tokens <= limit_tokens:
                break
            self.num_tokens -= use.num_tokens
            dropped.append(node)
        for node in dropped:
            del self._uses[node]
        return dropped
