"""How many prompt tokens any cache could have found: bounds computed from the prompts alone.

Both bounds take one request at a time, pages of one token, and count every cached prompt
token, the last one included; SGLang computes a prompt's last token again even when it is
cached, so a full repeat gives it one hit less. Cached answers are not counted as hits.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

Prompts = Sequence[Sequence[int]]
_NEVER = 1 << 60


def tree_paths(prompts: Prompts) -> list[list[int]]:
    """Per prompt the nodes of the prefix tree that it runs through, one node per token.

    Nodes are numbered from 1 in the order of first use: a node's ancestors have lower numbers.
    """
    children: dict[tuple[int, int], int] = {}
    paths = []
    for prompt in prompts:
        node, path = 0, []
        for token in prompt:
            node = children.setdefault((node, token), len(children) + 1)
            path.append(node)
        paths.append(path)
    return paths


def distinct_tokens(prompts: Prompts) -> int:
    """Tokens that have to be computed at least once, whatever the order of the prompts."""
    return len({node for path in tree_paths(prompts) for node in path})


def shared_tokens(prompts: Prompts) -> int:
    """The prefix working set: tokens of the tree that at least two prompts run through."""
    uses = Counter(node for path in tree_paths(prompts) for node in path)
    return sum(count > 1 for count in uses.values())


def infinite_hits(prompts: Prompts) -> int:
    """Tokens that a cache which forgets nothing finds; the order of the prompts is no matter."""
    return sum(map(len, prompts)) - distinct_tokens(prompts)


def belady_hits(prompts: Prompts, capacity_tokens: int, *, answer_tokens: int = 0) -> int:
    """Tokens that the best eviction finds when the prompts come in exactly this order.

    A request finds what is cached of its prompt when it starts; then its whole prompt and
    `answer_tokens` more are pinned until it ends. What is in the way is evicted, the
    farthest next use first and a child before its parent (no later used than the child).

    Source: Belady 1966; the exchange argument holds for sets of pages that are needed at once.
    Errors: `ValueError` when a request alone is larger than the capacity.
    """
    paths = tree_paths(prompts)
    longest = max(map(len, paths), default=0) + answer_tokens
    if longest > capacity_tokens:
        raise ValueError(
            f"a request needs {longest} tokens of a cache of {capacity_tokens}; it could not run"
        )
    cache = _FarthestNextUse()
    hits = 0
    for path, next_uses in zip(paths, _next_uses(paths), strict=True):
        missing = sum(node not in cache.next_use for node in path)
        hits += len(path) - missing
        cache.shrink(capacity_tokens - answer_tokens - missing)
        cache.put(path, next_uses)
    return hits


class _FarthestNextUse:
    """The cached nodes; the heap holds stale entries, told by a next use that has changed.

    Nodes of the request that starts are due now, earlier than all others, so `shrink` never
    reaches them as long as the request fits into the cache.
    """

    def __init__(self) -> None:
        self.next_use: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def put(self, path: Sequence[int], next_uses: Sequence[int]) -> None:
        for node, next_use in zip(path, next_uses, strict=True):
            self.next_use[node] = next_use
            heapq.heappush(self._heap, (-next_use, -node))

    def shrink(self, num_left: int) -> None:
        while len(self.next_use) > num_left:
            next_use, node = (-value for value in heapq.heappop(self._heap))
            if self.next_use.get(node) == next_use:
                del self.next_use[node]


def _next_uses(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per prompt and node the index of the next prompt that runs through the node."""
    upcoming: dict[int, int] = {}
    found = []
    for index in range(len(paths) - 1, -1, -1):
        found.append([upcoming.get(node, _NEVER) for node in paths[index]])
        upcoming.update(dict.fromkeys(paths[index], index))
    return found[::-1]
