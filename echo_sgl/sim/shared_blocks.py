"""KV blocks that one online and one offline request may share, beside parking: the memory alone.

    block of 8 slots   |A A A . . b b b|    online from the left, offline from the right
                       |A A A A A A b b|    one of b's tokens was overwritten: it is missing

Source: BROS 5 (bidirectional layout, block preemption, lazy checkpointing).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Layout(StrEnum):
    """What becomes of offline KV when an online request needs its memory.

    RETRACT: all KV of one request is dropped. PARK: it loses its last blocks, one by one. Both
    compute it again; PARK_HOST keeps lost blocks in host memory and reads them back. SHARED:
    BROS's, single tokens are overwritten, kept in host memory and read back.
    """

    RETRACT = "retract"
    PARK = "park"
    PARK_HOST = "park-host"
    SHARED = "shared"

    @property
    def reads_back(self) -> bool:
        return self in (Layout.PARK_HOST, Layout.SHARED)


class Tenant:
    """A request and its KV: `held_tokens` have it on the device, `missing_tokens` do not.

    `known_tokens`: as many had it at one time, the first of them. `num_outputs`: tokens generated.
    `answer_tokens` is for the simulated device only, which ends the request by it.
    """

    __slots__ = (
        "answer_tokens",
        "arrival_s",
        "blocks",
        "first_token_s",
        "held_tokens",
        "is_offline",
        "known_tokens",
        "missing_tokens",
        "num_outputs",
        "number",
    )

    def __init__(
        self, number: int, arrival_s: float, prompt: int, answer: int, *, is_offline: bool
    ) -> None:
        self.number, self.arrival_s, self.is_offline = number, arrival_s, is_offline
        self.answer_tokens, self.missing_tokens = answer, prompt
        self.held_tokens = self.known_tokens = self.num_outputs = 0
        self.first_token_s: float | None = None
        self.blocks: list[Block] = []

    @property
    def tokens(self) -> int:
        return self.held_tokens + self.missing_tokens


class Block:
    """Slots of one page: its tenants by class, and how many slots each of them has."""

    __slots__ = ("owners", "used")

    def __init__(self) -> None:
        self.owners: list[Tenant | None] = [None, None]
        self.used = [0, 0]


class BlockPool:
    """Blocks of `page_tokens` slots; with SHARED a block may have one tenant of each class.

    slots = free blocks + used slots + empty slots of blocks that have a tenant
    """

    def __init__(self, num_blocks: int, page_tokens: int, layout: Layout) -> None:
        self.page_tokens, self.num_blocks, self.layout = page_tokens, num_blocks, layout
        self.blocks = [Block() for _ in range(num_blocks)]
        self._free = list(reversed(self.blocks))
        self._shares = layout is Layout.SHARED
        # Blocks with one tenant, by its class and by their empty slots: a dict keeps an order.
        self._open: list[list[dict[int, Block]]] = [
            [{} for _ in range(page_tokens + 1)] for _ in range(2)
        ]
        self._open_slots = [0, 0]
        self.lost_tokens = 0
        self.used_tokens = 0

    @property
    def free_tokens(self) -> int:
        return len(self._free) * self.page_tokens

    @property
    def empty_tokens(self) -> int:
        """Slots in blocks that have a tenant, and no token."""
        return self.num_blocks * self.page_tokens - self.free_tokens - self.used_tokens

    def room(self, tenant: Tenant) -> int:
        """Tokens that could be added to a request without taking any from another."""
        own = self._empty(tenant.blocks[-1]) if tenant.blocks else 0
        if self._has_holes(tenant):
            own = sum(map(self._empty, tenant.blocks))
        # What it could share is empty slots of blocks that only the other class uses.
        shared = self._open_slots[not tenant.is_offline] if self._shares else 0
        return own + self.free_tokens + shared

    def grow(self, tenant: Tenant, num_tokens: int) -> None:
        """Give a request slots that are empty; the caller has asked for `room`."""
        while num_tokens:
            if self._has_holes(tenant) and (hole := self._hole(tenant)) is not None:
                tenant.blocks.remove(hole)
                tenant.blocks.append(hole)
            elif not (tenant.blocks and self._empty(tenant.blocks[-1])):
                self._enter(tenant, self._emptiest(tenant))
            num_tokens -= self._fill(tenant, num_tokens)

    def overwrite(self, tenant: Tenant, victims: Iterable[Tenant], num_tokens: int) -> int:
        """Give an online request slots, offline tokens or not: as many as one block has.

        Its own last block first, then the offline block with the most empty slots, then the
        last block of the first victim. Returns how many; 0 when there is no victim.
        """
        last = tenant.blocks[-1] if tenant.blocks else None
        if last is None or not (self._empty(last) or last.owners[1] is not None):
            if (block := self._preempted(victims)) is None:
                return 0
            self._enter(tenant, block)
            last = block
        missing = min(num_tokens, self.page_tokens - last.used[0]) - self._empty(last)
        if missing > 0:
            self._drop(last, min(missing, last.used[1]))
        return self._fill(tenant, num_tokens)

    def release_last(self, victim: Tenant) -> None:
        """Take the last block of an offline request, which misses its tokens from then on."""
        self._drop(victim.blocks[-1], victim.blocks[-1].used[1])

    def release(self, tenant: Tenant) -> None:
        """Take all blocks of a request; its tokens are missing, but were not taken from it."""
        lost = self.lost_tokens
        for block in list(tenant.blocks):
            self._take(block, tenant, block.used[tenant.is_offline])
        self.lost_tokens = lost

    def drop_all(self, victim: Tenant) -> None:
        """Take all blocks of an offline request from it."""
        for block in list(victim.blocks):
            self._drop(block, block.used[1])

    # ---- internals -------------------------------------------------------------------------

    def _has_holes(self, tenant: Tenant) -> bool:
        """Whether an online request took slots of this one and may have left them since."""
        return self._shares and tenant.is_offline and tenant.known_tokens > tenant.held_tokens

    def _hole(self, tenant: Tenant) -> Block | None:
        return next((block for block in tenant.blocks if self._empty(block)), None)

    def _empty(self, block: Block) -> int:
        return self.page_tokens - block.used[0] - block.used[1]

    def _emptiest(self, tenant: Tenant) -> Block:
        if self._free:
            return self._free.pop()
        assert self._shares, "grow was asked for more than there is room for"
        for empty in range(self.page_tokens, 0, -1):
            for block in self._open[not tenant.is_offline][empty].values():
                return block
        raise AssertionError("grow was asked for more than there is room for")

    def _preempted(self, victims: Iterable[Tenant]) -> Block | None:
        if self._free:
            return self._free.pop()
        for empty in range(self.page_tokens - 1, 0, -1):
            for block in self._open[1][empty].values():
                return block
        for victim in victims:
            for block in reversed(victim.blocks):
                if block.owners[0] is None:
                    return block
        return None

    def _enter(self, tenant: Tenant, block: Block) -> None:
        self._forget(block)
        block.owners[tenant.is_offline] = tenant
        tenant.blocks.append(block)
        self._note(block)

    def _fill(self, tenant: Tenant, num_tokens: int) -> int:
        block = tenant.blocks[-1]
        taken = min(num_tokens, self._empty(block))
        self._forget(block)
        block.used[tenant.is_offline] += taken
        self._note(block)
        self.used_tokens += taken
        tenant.held_tokens += taken
        tenant.missing_tokens -= taken
        tenant.known_tokens = max(tenant.known_tokens, tenant.held_tokens)
        return taken

    def _drop(self, block: Block, num_tokens: int) -> None:
        victim = block.owners[1]
        assert victim is not None, "only offline tokens are taken"
        self._take(block, victim, num_tokens)

    def _take(self, block: Block, tenant: Tenant, num_tokens: int) -> None:
        """Tokens of a request lose their slots; without any left it leaves the block."""
        side = int(tenant.is_offline)
        self._forget(block)
        block.used[side] -= num_tokens
        self.used_tokens -= num_tokens
        self.lost_tokens += num_tokens
        tenant.held_tokens -= num_tokens
        tenant.missing_tokens += num_tokens
        if not block.used[side]:
            block.owners[side] = None
            tenant.blocks.remove(block)
        if block.owners[0] is None and block.owners[1] is None:
            self._free.append(block)
        else:
            self._note(block)

    def _sole_class(self, block: Block) -> int | None:
        if (block.owners[0] is None) == (block.owners[1] is None):
            return None
        return int(block.owners[0] is None)

    def _note(self, block: Block) -> None:
        side = self._sole_class(block) if self._shares else None
        if side is not None and (empty := self._empty(block)):
            self._open[side][empty][id(block)] = block
            self._open_slots[side] += empty

    def _forget(self, block: Block) -> None:
        side = self._sole_class(block) if self._shares else None
        if side is not None and (empty := self._empty(block)):
            del self._open[side][empty][id(block)]
            self._open_slots[side] -= empty
