"""Prompts in token order: how many run through a prefix, and which of them comes last.

A radix tree whose children are sorted: a walk over it depth first visits the prompts as
sorting their tokens would, and the prompts that share a prefix are one subtree. Finding one
compares each of its tokens once, where a sorted list compares the shared ones again with
every neighbour: that was most of what a change of the pending requests cost.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import attrgetter

from sortedcontainers import SortedDict

from echo_sgl.types import PendingRequest

PrefixKey = tuple[str, Sequence[int], int]
"""Namespace, prompt, sequence number: unique, and sorted as a depth-first walk visits it."""


def prefix_key(request: PendingRequest) -> PrefixKey:
    return request.namespace, request.prompt, request.sequence


_SEQUENCE = attrgetter("sequence")


def _is_same(one: PendingRequest, other: PendingRequest) -> bool:
    return one is other or prefix_key(one) == prefix_key(other)


class _Node:
    """Prompts that agree up to token `end`; beyond it they end or differ at once.

    The node's own tokens, from `start`, are a range of any prompt that came through: no copy.
    """

    __slots__ = ("children", "end", "ends", "first_tokens", "num_prompts", "prompt", "start")

    def __init__(self, prompt: Sequence[int], start: int, end: int) -> None:
        self.prompt, self.start, self.end = prompt, start, end
        self.num_prompts = 0
        self.ends: list[PendingRequest] = []
        self.children: dict[int, _Node] = {}
        self.first_tokens: list[int] = []

    def agrees(self, prompt: Sequence[int]) -> bool:
        """Whether the node's tokens, as far as the prompt goes, are the prompt's."""
        end = min(self.end, len(prompt))
        return self.prompt[self.start : end] == prompt[self.start : end]

    def attach(self, child: _Node) -> None:
        first_token = child.prompt[child.start]
        if first_token not in self.children:
            insort(self.first_tokens, first_token)
        self.children[first_token] = child

    def detach(self, child: _Node) -> None:
        first_token = child.prompt[child.start]
        del self.children[first_token]
        del self.first_tokens[bisect_right(self.first_tokens, first_token) - 1]

    def children_from(self, index: int) -> Iterator[_Node]:
        for position in range(index, len(self.first_tokens)):
            yield self.children[self.first_tokens[position]]

    def children_after(self, token: int) -> Iterator[_Node]:
        return self.children_from(bisect_right(self.first_tokens, token))

    def split(self, end: int) -> _Node:
        """A node for the tokens before `end`, above this one, which keeps the rest."""
        upper = _Node(self.prompt, self.start, end)
        upper.num_prompts = self.num_prompts
        self.start = end
        upper.attach(self)
        return upper

    def last(self) -> PendingRequest:
        node = self
        while node.first_tokens:
            node = node.children[node.first_tokens[-1]]
        return node.ends[-1]


class PrefixIndex:
    """Requests sorted by prompt.

    An operation compares each token of its prompt once and takes one step for each point on
    the way where prompts part. Slices of prompts and paths must be of one type and compare as
    lists do (list, array); prompts must not change once a request was added.
    """

    def __init__(self) -> None:
        self._roots: SortedDict[str, _Node] = SortedDict()
        self._num_prompts = 0

    def __len__(self) -> int:
        return self._num_prompts

    def __iter__(self) -> Iterator[PendingRequest]:
        return _walk([self._roots_from("")])

    def add(self, request: PendingRequest) -> None:
        prompt = request.prompt
        node = self._roots.get(request.namespace)
        if node is None:
            node = self._roots[request.namespace] = _Node(prompt, 0, 0)
        node.num_prompts += 1
        self._num_prompts += 1
        while node.end < len(prompt):
            child = node.children.get(prompt[node.end])
            if child is None:
                child = _Node(prompt, node.end, len(prompt))
                node.attach(child)
            elif (end := _common_end(child, prompt)) < child.end:
                child = child.split(end)
                node.attach(child)
            node = child
            node.num_prompts += 1
        insort(node.ends, request, key=_SEQUENCE)

    def remove(self, request: PendingRequest) -> None:
        """Errors: `ValueError` if the request is not here."""
        path, position = self._path(request)
        path[-1].ends.pop(position)
        self._num_prompts -= 1
        for node in path:
            node.num_prompts -= 1
        if not path[0].num_prompts:
            del self._roots[request.namespace]
            return
        if not path[-1].num_prompts:
            path[-2].detach(path.pop())
        if len(path) > 1 and not path[-1].ends and len(path[-1].first_tokens) == 1:
            (only,) = path[-1].children.values()
            only.start = path[-1].start
            path[-2].attach(only)

    def after(self, key: PrefixKey) -> Iterator[PendingRequest]:
        """Those behind `key`, in order; nobody needs to have that key."""
        namespace, prompt, sequence = key
        stack = [self._roots_from(namespace, inclusive=False)]
        node = self._roots.get(namespace)
        while node is not None and node.end < len(prompt) and node.agrees(prompt):
            token = prompt[node.end]
            stack.append(node.children_after(token))
            node = node.children.get(token)
        if node is not None:
            if node.end == len(prompt) and node.agrees(prompt):
                stack.append(node.children_from(0))
                yield from node.ends[bisect_right(node.ends, sequence, key=_SEQUENCE) :]
            elif node.prompt[node.start : node.end] > prompt[node.start :]:
                stack.append(iter((node,)))
        yield from _walk(stack)

    def up_to(self, key: PrefixKey) -> Iterator[PendingRequest]:
        """Those from the first one to `key`, in order."""
        return takewhile(lambda other: prefix_key(other) <= key, self)

    def around(self, key: PrefixKey | None) -> Iterator[PendingRequest]:
        """All: those behind `key`, in order, then from the first one to it."""
        if key is None:
            yield from self
        else:
            yield from self.after(key)
            yield from self.up_to(key)

    def count_through(self, namespace: str, path: Sequence[int]) -> int:
        """How many prompts start with `path` (at least one token)."""
        node = self._subtree(namespace, path, len(path))
        return node.num_prompts if node is not None else 0

    def last_and_count(self, namespace: str, path: Sequence[int]) -> tuple[PrefixKey | None, int]:
        """The last key whose prompt starts with `path`, and how many there are."""
        node = self._subtree(namespace, path, len(path))
        return (prefix_key(node.last()), node.num_prompts) if node is not None else (None, 0)

    def shared_tokens(self, namespace: str, path: Sequence[int], *, at_least: int = 0) -> int:
        """How many tokens of `path` some prompt begins with; 0 if fewer than `at_least`."""
        num_tokens, node = 0, self._subtree(namespace, path, at_least)
        while node is not None:
            num_tokens = _common_end(node, path)
            is_passed = num_tokens == node.end < len(path)
            node = node.children.get(path[num_tokens]) if is_passed else None
        return num_tokens

    def _subtree(self, namespace: str, path: Sequence[int], num_tokens: int) -> _Node | None:
        """The highest node that all prompts starting as `path` does run through, and no other.

        Down by the tokens where prompts part, and all of them compared once at the end: that a
        path is nobody's often shows on the way.
        """
        node: _Node | None = self._roots.get(namespace)
        while node is not None and node.end < num_tokens:
            node = node.children.get(path[node.end])
        if node is None or node.prompt[:num_tokens] != path[:num_tokens]:
            return None
        return node

    def _path(self, request: PendingRequest) -> tuple[list[_Node], int]:
        """The nodes from the root to the one where the request ends, and its place there.

        No token but those where prompts part is looked at: who is found at the end came this way.
        """
        prompt, path = request.prompt, []
        node = self._roots.get(request.namespace)
        while node is not None:
            path.append(node)
            if node.end >= len(prompt):
                break
            node = node.children.get(prompt[node.end])
        ends = path[-1].ends if path else []
        position = bisect_right(ends, request.sequence, key=_SEQUENCE) - 1
        if position < 0 or not _is_same(ends[position], request):
            raise ValueError(f"request {request.rid!r} is not in the index")
        return path, position

    def _roots_from(self, namespace: str, *, inclusive: bool = True) -> Iterator[_Node]:
        names = self._roots.irange(namespace, inclusive=(inclusive, True))
        return (self._roots[name] for name in names)


def _walk(stack: list[Iterator[_Node]]) -> Iterator[PendingRequest]:
    """All requests in the subtrees of the stacked nodes, the topmost iterator first."""
    while stack:
        for node in stack[-1]:
            yield from node.ends
            if node.first_tokens:
                stack.append(node.children_from(0))
                break
        else:
            stack.pop()


def _common_end(node: _Node, prompt: Sequence[int]) -> int:
    """Where the prompt leaves the node's tokens, or ends; halving, not token by token."""
    if node.end <= len(prompt) and node.agrees(prompt):
        return node.end
    agreed, differs = node.start, min(node.end, len(prompt)) + 1
    while differs - agreed > 1:
        middle = (agreed + differs) // 2
        if node.prompt[agreed:middle] == prompt[agreed:middle]:
            agreed = middle
        else:
            differs = middle
    return agreed
