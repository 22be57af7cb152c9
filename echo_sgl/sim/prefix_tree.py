"""The prefix tree of the simulated KV pool: pages, locks, splits, eviction by the real orders.

A path is a sequence of blocks, each an id and its tokens, where the engine has single tokens:
prompts that share all blocks up to a point share their KV up to there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from echo_sgl.policies.cache.eviction_order import LeafFacts, Worth, create_eviction_order, worth_of
from echo_sgl.policies.cache.working_set import WorkingSet
from echo_sgl.policies.order.offline_order import PrefixNeed
from echo_sgl.policies.prefix_index import PrefixKey
from echo_sgl.types import Task

_NO_NEED = PrefixNeed(num_pending=0, walk_key=None, is_next=False)
_MAX_UNSETTLED = 64


class Pending(Protocol):
    """What the tree asks about offline requests, as the engine's tree core does."""

    @property
    def cursor(self) -> PrefixKey | None: ...

    def need(self, namespace: str, path: Sequence[int]) -> PrefixNeed: ...

    def shared_blocks(self, path: Sequence[int], *, at_least: int) -> int: ...


class Node:
    """Blocks that follow each other in every path through here."""

    __slots__ = (
        "blocks",
        "children",
        "facts",
        "last_access",
        "lock_count",
        "num_tokens",
        "number",
        "parent",
        "sizes",
        "task",
    )

    def __init__(
        self, number: int, parent: Node | None, blocks: array[int], sizes: array[int]
    ) -> None:
        self.number, self.parent, self.blocks, self.sizes = number, parent, blocks, sizes
        self.num_tokens = sum(sizes)
        self.children: dict[int, Node] = {}
        self.lock_count = self.last_access = 0
        self.task = Task.ONLINE
        self.facts: LeafFacts | None = None


@dataclass(slots=True)
class TreeCounts:
    """Tokens since the start: evicted, and of those what offline requests still waited for."""

    evicted_tokens: int = 0
    evicted_needed_tokens: int = 0
    by_worth: dict[Worth, int] = field(default_factory=lambda: dict.fromkeys(Worth, 0))


class PrefixTree:
    """Cached paths; `num_tokens` in all, `locked_tokens` of them under lock.

    A match or an insert that ends inside a node splits it. Only leaves without lock are
    evicted, in the order that the config names. Sizes are whole pages, which the caller
    sees to.
    """

    def __init__(self, order: str, pending: Pending, working_set: WorkingSet) -> None:
        self.pending, self.working_set = pending, working_set
        self.order = create_eviction_order(order, cursor=lambda: self.pending.cursor)
        self.root = Node(0, None, array("q"), array("q"))
        self.root.lock_count = 1
        self.num_tokens = self.locked_tokens = 0
        self.counts = TreeCounts()
        self.now_s = 0.0
        self._nodes = {0: self.root}
        self._num_made = self._num_uses = 0
        self._leaves: set[int] = set()
        self._unsettled: dict[int, None] = {}

    @property
    def evictable_tokens(self) -> int:
        return self.num_tokens - self.locked_tokens

    @property
    def num_leaves(self) -> int:
        """Leaves that may be evicted."""
        return len(self._leaves)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root."""
        return (node for node in self._nodes.values() if node is not self.root)

    # ---- use -------------------------------------------------------------------------------

    def cached_tokens(self, blocks: array[int]) -> int:
        """How much of a path is here; changes nothing."""
        node, num_blocks, num_tokens = self._descend(blocks)
        child = self._child(node, blocks, num_blocks)
        if child is not None:
            num_tokens += sum(child.sizes[: _num_alike(child.blocks, blocks, num_blocks)])
        return num_tokens

    def match(self, blocks: array[int], task: Task) -> tuple[Node, int]:
        """The node where the cached part of a path ends, and the tokens up to there."""
        node, num_blocks, num_tokens = self._descend(blocks)
        child = self._child(node, blocks, num_blocks)
        if child is not None and (alike := _num_alike(child.blocks, blocks, num_blocks)):
            node = self._split(child, alike)
            num_tokens += node.num_tokens
        self._use(node, task)
        return node, num_tokens

    def insert(self, blocks: array[int], sizes: array[int], task: Task) -> tuple[Node, int]:
        """Put a path in; returns its last node and the tokens that were new."""
        node, _ = self.match(blocks, task)
        num_blocks = self._num_blocks_to(node)
        if num_blocks == len(blocks):
            return node, 0
        self._num_made += 1
        child = Node(self._num_made, node, blocks[num_blocks:], sizes[num_blocks:])
        self._nodes[child.number] = child
        node.children[child.blocks[0]] = child
        self._leaves_changed(node)
        self.num_tokens += child.num_tokens
        self._leaves_changed(child)
        self._use(child, task)
        return child, child.num_tokens

    def await_return(self, blocks: array[int]) -> None:
        """Somebody online was retracted who comes back to this path."""
        node = self._descend(blocks)[0]
        if node is not self.root:
            self.working_set.use(node.number, node.num_tokens, self.now_s, is_awaited=True)
            if node.number in self._leaves:
                self._unsettle(node.number)

    def lock(self, node: Node) -> None:
        """Keep a path from eviction, once more."""
        walk: Node | None = node
        while walk is not None and walk is not self.root:
            walk.lock_count += 1
            if walk.lock_count == 1:
                self.locked_tokens += walk.num_tokens
                self._leaves_changed(walk)
            walk = walk.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        walk: Node | None = node
        while walk is not None and walk is not self.root:
            assert walk.lock_count > 0, f"node {walk.number} is not locked"
            walk.lock_count -= 1
            if walk.lock_count == 0:
                self.locked_tokens -= walk.num_tokens
                self._leaves_changed(walk)
            walk = walk.parent

    def locked_prefix_tokens(self, blocks: array[int]) -> int:
        """Tokens of a path's cached part that running requests hold."""
        last, num_blocks, _ = self._descend(blocks)
        child, num_tokens = self._child(last, blocks, num_blocks), 0
        if child is not None and child.lock_count:  # a match would split it
            num_tokens = sum(child.sizes[: _num_alike(child.blocks, blocks, num_blocks)])
        node: Node | None = last
        while node is not None and node is not self.root:
            num_tokens += node.num_tokens if node.lock_count else 0
            node = node.parent
        return num_tokens

    def prompt_changed(self, blocks: array[int]) -> None:
        """A pending request with this path came, started or went: its leaf moves."""
        node = self._descend(blocks)[0]
        if node.number in self._leaves:
            self._unsettle(node.number)

    # ---- eviction --------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """Free at least so many tokens if there are as many to free; returns what was freed."""
        freed = 0
        while freed < num_tokens and self._leaves:
            self._settle_all()
            victim = self._nodes[next(self.order.victims())]
            self._spare_front(victim)
            freed += self._drop(victim)
        return freed

    def _spare_front(self, leaf: Node) -> None:
        """Part a leaf where the last pending path leaves it: only what is behind may go."""
        if not self.order.needs_pending or (leaf.facts is not None and leaf.facts.num_pending):
            return
        path = path_of(leaf)
        start = len(path) - len(leaf.blocks)
        num_blocks = self.pending.shared_blocks(path, at_least=start + 1) - start
        if 0 < num_blocks < len(leaf.blocks):
            self._split(leaf, num_blocks)

    def next_victims(self) -> Iterator[tuple[int, LeafFacts]]:
        """Tokens and facts of the leaves that would go next."""
        self._settle_all()
        for number in self.order.victims():
            node = self._nodes[number]
            assert node.facts is not None, "every leaf was settled"
            yield node.num_tokens, node.facts

    def _drop(self, node: Node) -> int:
        assert node.facts is not None and node.parent is not None and not node.lock_count
        worth = worth_of(node.facts)
        self.counts.evicted_tokens += node.num_tokens
        self.counts.by_worth[worth] += node.num_tokens
        if worth is Worth.PENDING:
            self.counts.evicted_needed_tokens += node.num_tokens
        del node.parent.children[node.blocks[0]], self._nodes[node.number]
        self._leave(node.number)
        self.working_set.forget(node.number)
        self.num_tokens -= node.num_tokens
        self._leaves_changed(node.parent)
        return node.num_tokens

    # ---- structure -------------------------------------------------------------------------

    def _child(self, node: Node, blocks: Sequence[int], start: int) -> Node | None:
        return node.children.get(blocks[start]) if start < len(blocks) else None

    def _descend(self, blocks: array[int]) -> tuple[Node, int, int]:
        """The last node that lies wholly on the path; blocks and tokens up to its end."""
        node, num_blocks, num_tokens = self.root, 0, 0
        while (child := self._child(node, blocks, num_blocks)) is not None:
            end = num_blocks + len(child.blocks)
            if blocks[num_blocks:end] != child.blocks:
                break
            node, num_blocks, num_tokens = child, end, num_tokens + child.num_tokens
        return node, num_blocks, num_tokens

    def _num_blocks_to(self, node: Node) -> int:
        num_blocks, walk = 0, node
        while walk.parent is not None:
            num_blocks += len(walk.blocks)
            walk = walk.parent
        return num_blocks

    def _split(self, child: Node, num_blocks: int) -> Node:
        """Make the first blocks of a node a node of their own, above the rest."""
        parent = child.parent
        assert parent is not None
        self._num_made += 1
        upper = Node(self._num_made, parent, child.blocks[:num_blocks], child.sizes[:num_blocks])
        upper.lock_count, upper.task = child.lock_count, child.task
        upper.last_access = child.last_access
        self._nodes[upper.number] = upper
        parent.children[upper.blocks[0]] = upper
        child.parent, child.blocks = upper, child.blocks[num_blocks:]
        child.sizes = child.sizes[num_blocks:]
        child.num_tokens -= upper.num_tokens
        upper.children[child.blocks[0]] = child
        self.working_set.split(child.number, upper=upper.number, upper_tokens=upper.num_tokens)
        if child.number in self._leaves:
            self._unsettle(child.number)
        return upper

    def _use(self, node: Node, task: Task) -> None:
        self._num_uses += 1
        if node.number in self._leaves:
            self._unsettle(node.number)
        walk: Node | None = node
        while walk is not None and walk is not self.root:
            walk.last_access, walk.task = self._num_uses, task
            if task is Task.ONLINE:
                self.working_set.use(walk.number, walk.num_tokens, self.now_s)
            walk = walk.parent

    # ---- the index of leaves ---------------------------------------------------------------

    def _leaves_changed(self, node: Node) -> None:
        if node is self.root:
            return
        if node.children or node.lock_count:
            self._leave(node.number)
        elif node.number not in self._leaves:
            self._leaves.add(node.number)
            self._unsettle(node.number)

    def _leave(self, number: int) -> None:
        if number in self._leaves:
            self._leaves.discard(number)
            self._unsettled.pop(number, None)
            self.order.drop(number)

    def _unsettle(self, number: int) -> None:
        self._unsettled[number] = None
        if len(self._unsettled) > _MAX_UNSETTLED:
            oldest = next(iter(self._unsettled))
            del self._unsettled[oldest]
            self._settle(oldest)

    def _settle(self, number: int) -> None:
        node = self._nodes[number]
        node.facts = self._facts_of(node)
        self.order.put(node.facts)

    def _settle_all(self) -> None:
        for number in self.working_set.expire(self.now_s):
            if number in self._leaves:
                self._unsettled[number] = None
        unsettled, self._unsettled = self._unsettled, {}
        for number in unsettled:
            self._settle(number)

    def _facts_of(self, node: Node) -> LeafFacts:
        need = _NO_NEED
        if self.order.needs_pending:
            need = self.pending.need("", path_of(node))
        return LeafFacts(
            leaf=node.number,
            last_access=node.last_access,
            task=node.task,
            is_protected=node.number in self.working_set,
            num_pending=need.num_pending,
            walk_key=need.walk_key,
            is_next=need.is_next,
        )


def path_of(node: Node) -> array[int]:
    """The blocks from the root to the end of a node."""
    parts: list[array[int]] = []
    walk: Node | None = node
    while walk is not None:
        parts.append(walk.blocks)
        walk = walk.parent
    path = array("q")
    for part in reversed(parts):
        path.extend(part)
    return path


def path_tokens(node: Node) -> int:
    """Tokens from the root to the end of a node."""
    num_tokens, walk = 0, node
    while walk.parent is not None:
        num_tokens, walk = num_tokens + walk.num_tokens, walk.parent
    return num_tokens


def _num_alike(one: Sequence[int], other: Sequence[int], start: int) -> int:
    """Blocks that `one` and `other` from `start` on begin with alike."""
    longest = min(len(one), len(other) - start)
    return next((i for i in range(longest) if one[i] != other[start + i]), longest)
