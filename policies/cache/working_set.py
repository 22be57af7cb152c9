"""The cache that online requests used lately: what a sweep of offline work must not flush."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile

# The ratio of the last requests, the newest weighing most; 1 before the first.
_HIT_RATIO_REQUESTS = 32
_FULL_SHARE_HIT_RATIO = 0.5
# Never none: without any protection, returning users could not show that they return.
_LEAST_SHARE = 0.1


@dataclass(slots=True, eq=False)
class _Use:
    """One use, and the tokens of each node that it was of: several once a node was split."""

    last_use_s: float
    num_tokens: dict[int, int]
    is_awaited: bool


class WorkingSet:
    """Tree nodes by their last online use, as far as a token limit and a window allow.

    A node is protected while it is here. It leaves when its last use is older than
    `window_s` or when younger ones fill the share of `limit_tokens` that online requests
    earn: all of it when they find half of their prompts in the cache, less when they find
    less, for what nobody comes back to is not worth keeping. What is not used of it
    protects nothing and so is lent to offline work. Cost: O(1) per use.

    What a retracted request computed is awaited: it comes back to it, however seldom others
    find theirs. So that is in no share, until it is used again or the window is over.
    """

    def __init__(self, *, limit_tokens: int, window_s: float) -> None:
        self._limit_tokens = limit_tokens
        self._window_s = window_s
        self._uses: dict[int, _Use] = {}
        # The least recent one first.
        self._order: OrderedDict[_Use, None] = OrderedDict()
        self._awaited: OrderedDict[_Use, None] = OrderedDict()
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

    def use(self, node: int, num_tokens: int, now_s: float, *, is_awaited: bool = False) -> None:
        """Note an online use of a node that holds `num_tokens` tokens.

        `is_awaited`: by a request that was retracted and comes back to it.
        """
        self.forget(node)
        use = self._uses[node] = _Use(now_s, {node: num_tokens}, is_awaited)
        self._order_of(use)[use] = None
        if not is_awaited:
            self.num_tokens += num_tokens

    def split(self, node: int, *, upper: int, upper_tokens: int) -> None:
        """Its first `upper_tokens` tokens became a node of their own, used when it was."""
        if (use := self._uses.get(node)) is not None:
            use.num_tokens[node] -= upper_tokens
            use.num_tokens[upper] = upper_tokens
            self._uses[upper] = use

    def forget(self, node: int) -> None:
        """The node was evicted."""
        if (use := self._uses.pop(node, None)) is not None:
            num_tokens = use.num_tokens.pop(node)
            if not use.is_awaited:
                self.num_tokens -= num_tokens
            if not use.num_tokens:
                del self._order_of(use)[use]

    def clear(self) -> None:
        self._uses.clear()
        self._order.clear()
        self._awaited.clear()
        self.num_tokens = 0

    def expire(self, now_s: float) -> list[int]:
        """Drop what is too old or too much, least recently used first; return the dropped."""
        dropped: list[int] = []
        oldest_s, limit_tokens = now_s - self._window_s, self.limit_tokens
        num_left = self.num_tokens
        least_recent = ((one, node) for one in self._order for node in one.num_tokens)
        for use, node in least_recent:
            if use.last_use_s >= oldest_s and num_left <= limit_tokens:
                break
            num_left -= use.num_tokens[node]
            dropped.append(node)
        too_old = takewhile(lambda use: use.last_use_s < oldest_s, self._awaited)
        dropped.extend(node for use in too_old for node in use.num_tokens)
        for node in dropped:
            self.forget(node)
        return dropped

    def _order_of(self, use: _Use) -> OrderedDict[_Use, None]:
        return self._awaited if use.is_awaited else self._order
