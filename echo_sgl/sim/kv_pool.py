"""The simulated KV pool: pages that requests hold alone, and pages that the tree caches.

capacity = free + private to requests + tree (locked + evictable)
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from echo_sgl.sim.prefix_tree import Node, PrefixTree, path_tokens
from echo_sgl.sim.workload import SimRequest

_LARGEST_ID = (1 << 62) - 1


class OutOfKvError(AssertionError):
    """The scheduler promised memory that is not there: a bug of the simulator."""


class KvPool:
    """Hands out whole pages; what it cannot give from the free ones it evicts from the tree.

    Units: tokens, all multiples of `page_tokens`.
    """

    def __init__(self, capacity_tokens: int, page_tokens: int, tree: PrefixTree) -> None:
        self.page_tokens, self.tree = page_tokens, tree
        self.capacity_tokens = capacity_tokens // page_tokens * page_tokens
        self.private_tokens = 0
        self._num_answers = 0

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.private_tokens - self.tree.num_tokens

    @property
    def available_tokens(self) -> int:
        """Free or evictable."""
        return self.capacity_tokens - self.private_tokens - self.tree.locked_tokens

    @property
    def active_tokens(self) -> int:
        """What requests hold, alone or under lock."""
        return self.private_tokens + self.tree.locked_tokens

    def held_tokens(self, requests: Sequence[SimRequest]) -> int:
        """What would be free or evictable if these ended: what they share counts once, and not at
        all where another request holds it."""
        num_holds: Counter[Node] = Counter()
        for request in requests:
            node: Node | None = _node(request)
            while node is not None and node is not self.tree.root:
                num_holds[node] += 1
                node = node.parent
        alone = sum(map(self._private_of, requests))
        return alone + sum(
            node.num_tokens for node, num in num_holds.items() if node.lock_count <= num
        )

    def whole_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens) * self.page_tokens

    def take(self, num_tokens: int) -> None:
        """Make so many tokens private. Errors: `OutOfKvError` when they are not there."""
        missing = num_tokens - self.free_tokens
        if missing > 0 and self.tree.evict(missing) < missing:
            raise OutOfKvError(
                f"{num_tokens} tokens were asked for; of {self.capacity_tokens} are "
                f"{self.private_tokens} private and {self.tree.locked_tokens} locked"
            )
        self.private_tokens += num_tokens

    def prepare(self, request: SimRequest) -> None:
        """Cut a new request's path where both a page and a block end: SGLang caches whole pages.

        A block in which no page ends goes with the next one; a page that ends in a block takes
        its part of it along, for who shares the block shares that.
        """
        page = self.page_tokens
        if all(size % page == 0 for size in request.sizes):
            return
        blocks, sizes, passed = array("q"), array("q"), 0
        joined: list[int] = []
        for block, end in zip(request.blocks, accumulate(request.sizes), strict=True):
            joined.append(block)
            if size := end // page * page - passed:
                blocks.append(block if len(joined) == 1 else hash(tuple(joined)) & _LARGEST_ID)
                sizes.append(size)
                passed += size
                joined.clear()
        request.blocks, request.sizes = blocks, sizes

    def match(self, request: SimRequest) -> int:
        """Lock what is cached of a request; returns the tokens, at least one less than all."""
        node, num_tokens = self.tree.match(request.blocks, request.task)
        self.tree.lock(node)
        most = (request.seq_tokens - 1) // self.page_tokens * self.page_tokens
        request.node = node
        request.prefix_tokens = request.protected_tokens = min(num_tokens, most)
        request.computed_tokens = request.prefix_tokens
        return request.prefix_tokens

    def overlocked_tokens(self, request: SimRequest) -> int:
        """Of what `match` locked, what only it keeps from eviction and SGLang would not lock.

        A prompt that is cached in full computes its last page again, so SGLang's lock ends before
        it; a block here cannot be locked in part.
        """
        node = _node(request)
        return path_tokens(node) - request.prefix_tokens if node.lock_count == 1 else 0

    def unmatch(self, request: SimRequest) -> None:
        """Undo `match`: the request does not start."""
        self.tree.unlock(_node(request))
        request.node = None
        request.prefix_tokens = request.protected_tokens = request.computed_tokens = 0

    def compute(self, request: SimRequest, num_tokens: int) -> None:
        """Give a prefill room for its next tokens."""
        before = self._private_of(request)
        request.computed_tokens += num_tokens
        self.take(self._private_of(request) - before)

    def cache(self, request: SimRequest) -> None:
        """Put what a prefill computed into the tree; it stays locked."""
        before, held = self._private_of(request), request.held_tokens
        num_blocks, num_tokens = self._cached_part(request, held)
        if num_tokens <= request.protected_tokens:
            return
        blocks, sizes = request.blocks[:num_blocks], request.sizes[:num_blocks]
        node, _ = self.tree.insert(blocks, sizes, request.task)
        self.tree.lock(node)
        self.tree.unlock(_node(request))
        request.node, request.protected_tokens = node, num_tokens
        self.private_tokens += self._private_of(request) - before

    def retract(self, request: SimRequest) -> None:
        """Let go of one that comes back to what it computed."""
        self.release(request)
        if not request.is_offline:
            self.tree.await_return(request.blocks)

    def release(self, request: SimRequest) -> None:
        """Put all that a request computed into the tree, and let go of it."""
        held, path_tokens = request.held_tokens, sum(request.sizes)
        private = self._private_of(request)
        extra = (held - path_tokens) // self.page_tokens * self.page_tokens
        if extra > 0:
            # An id below zero: no other path has this answer.
            self._num_answers += 1
            request.blocks = request.blocks + array("q", (-self._num_answers,))
            request.sizes = request.sizes + array("q", (extra,))
        num_blocks, num_tokens = self._cached_part(request, held)
        if num_tokens > request.protected_tokens:
            blocks, sizes = request.blocks[:num_blocks], request.sizes[:num_blocks]
            self.tree.insert(blocks, sizes, request.task)
        self.tree.unlock(_node(request))
        self.private_tokens -= private
        request.node = None
        request.prefix_tokens = request.protected_tokens = request.computed_tokens = 0

    def _private_of(self, request: SimRequest) -> int:
        return self.whole_pages(request.held_tokens - request.protected_tokens)

    def _cached_part(self, request: SimRequest, held_tokens: int) -> tuple[int, int]:
        """Blocks of a request's path whose KV exists in whole, and their tokens."""
        num_blocks = num_tokens = 0
        for end in accumulate(request.sizes):
            if end > held_tokens:
                break
            num_blocks, num_tokens = num_blocks + 1, end
        return num_blocks, num_tokens


def _node(request: SimRequest) -> Node:
    assert isinstance(request.node, Node), f"{request.rid} holds no path"
    return request.node
