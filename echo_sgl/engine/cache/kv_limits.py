"""How much KV cache offline requests may hold active, so that an online burst finds room."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from sglang.srt.session.streaming_session import is_virtual_node

from echo_sgl.config import ReserveConfig
from echo_sgl.estimators.kv_demand import create_kv_demand
from echo_sgl.policies.cache.reserve import BurstReserve

logger = logging.getLogger(__name__)

# As steps are learned from: what the model ran left nothing of this in the CPU's caches.
OBSERVE_EVERY_S = 0.02
# So small a part of the pool is grown in between by decodes.
GROWTH_PARTS = 256


class KvLimits:
    """The burst reserve on the real pool.

    Active KV is what requests hold: the pool without what is free or evictable. Online
    requests are charged with their whole length, so a prefix that several of them share
    counts more than once, on the safe side; offline holds the rest. `is_within`: when it was
    looked at last, offline requests held no more than what several of them may hold.
    """

    def __init__(self, config: ReserveConfig, tree_cache: Any, allocator: Any) -> None:
        # Of a model with sliding windows the layers without: only their KV grows with lengths.
        self.capacity_tokens: int = getattr(allocator, "size_full", allocator.size)
        self._tree_cache = tree_cache
        self._available_tokens: Callable[[], int] = getattr(
            allocator, "full_available_size", allocator.available_size
        )
        self._config, self._now_s = config, 0.0
        self.forget_demand()
        self._has_warned = False
        self._holds_back = False
        self.online_tokens = 0
        self._given_tokens = self._looked_tokens = 0
        self._looked_s = -math.inf
        self.is_within = True
        self.num_held_back = 0
        self.num_reserve_hits = 0

    def forget_demand(self) -> None:
        """Begin as at the server's start: what ran until now says nothing about the next hour."""
        demand = create_kv_demand(self._config)
        self._reserve = BurstReserve(self._config, demand, self.capacity_tokens)

    def observe(self, now_s: float, online_tokens: int) -> None:
        """Note what the running online requests hold; once per scheduler step.

        Looked into every `OBSERVE_EVERY_S`, and when it has changed by more than decodes do.
        """
        changed_tokens = abs(online_tokens - self._looked_tokens)
        is_alike = changed_tokens * GROWTH_PARTS < self.capacity_tokens
        self._now_s, self._given_tokens = now_s, online_tokens
        if now_s - self._looked_s >= OBSERVE_EVERY_S or not is_alike:
            self.look()

    def look(self) -> None:
        """Compare what was noted last with what is active, before anybody is started or shed."""
        self._looked_s, self._looked_tokens = self._now_s, self._given_tokens
        active_tokens = self.active_tokens
        self.online_tokens = min(self._given_tokens, active_tokens)
        self._reserve.observe(self._now_s, self.online_tokens)
        self.is_within = active_tokens - self.online_tokens <= self.offline_limit_tokens

    @property
    def active_tokens(self) -> int:
        free: int = self._available_tokens() + self._tree_cache.evictable_size()
        return self.capacity_tokens - free

    @property
    def offline_tokens(self) -> int:
        return max(0, self.active_tokens - self.online_tokens)

    @property
    def offline_limit_tokens(self) -> int:
        """What several offline requests may hold; see `limit_tokens` for one."""
        return self._reserve.offline_limit_tokens(self._now_s)

    def limit_tokens(self, num_offline: int) -> int:
        """What so many offline requests may hold together; one alone may have more."""
        return self._reserve.offline_limit_tokens(self._now_s, is_alone=num_offline == 1)

    @property
    def reserve_tokens(self) -> int:
        return self._reserve.reserve_tokens(self._now_s)

    def excess_tokens(self, num_offline: int) -> int:
        """By how much the KV that `num_offline` requests hold is over their limit now."""
        return max(0, self.offline_tokens - self.limit_tokens(num_offline))

    def new_tokens(self, req: Any) -> int:
        """What starting this request would make active: its prefix may be held already."""
        return int(req.seqlen) - self._locked_prefix_tokens(req)

    def has_room(self, req: Any, planned_tokens: int) -> bool:
        """Whether the request may start beside others, `planned_tokens` being promised at most.

        Quick to say yes; a no is for `holds_back` to confirm.
        """
        total = self.offline_tokens + planned_tokens + self.new_tokens(req)
        has_room = total <= self.offline_limit_tokens
        if has_room:
            self._holds_back = False
        return has_room

    def holds_back(self, req: Any, planned_tokens: int, num_offline: int) -> bool:
        """Whether the request must wait for the reserve, `planned_tokens` being promised.

        With it `num_offline` offline requests would hold memory.
        """
        need = self.new_tokens(req)
        total = self.offline_tokens + planned_tokens + need
        self._holds_back = total > self.limit_tokens(num_offline)
        if not self._holds_back:
            return False
        self.num_held_back += 1
        req.echo_needed_tokens = need
        most_tokens = self.limit_tokens(num_offline=1)
        if req.seqlen > most_tokens and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Offline request %s needs %d KV tokens; the pool of %d has a limit of %d for "
                "offline work, the rest is kept for online bursts ([reserve]). It waits, and "
                "others are served.",
                req.rid,
                req.seqlen,
                self.capacity_tokens,
                most_tokens,
            )
        return True

    def note_shortage(self, req: Any, growth_tokens: int) -> None:
        """An offline request found no memory, though it is alone, for what it and online ones are
        to generate.

        It comes again when as much is left to one, at the latest when no online one is there.
        """
        needed_tokens = self.new_tokens(req) + growth_tokens
        req.echo_needed_tokens = min(needed_tokens, self._reserve.most_tokens)

    def never_fits(self, req: Any) -> str | None:
        """Why an offline request could not start on an idle server; None if it could."""
        most_tokens = self._reserve.most_tokens
        if req.seqlen <= most_tokens:
            return None
        return (
            f"This request needs KV memory for {req.seqlen} tokens; offline requests may hold "
            f"{most_tokens} of the {self.capacity_tokens} there are, the rest is kept for online "
            "ones (reserve.min_tokens). Send a shorter one, or lower that setting."
        )

    def could_start(self, req: Any) -> bool:
        """Whether a request that was held back could start now if no other offline one ran.

        Else nobody need wait for it: not even they could make it room.
        """
        return needed_tokens(req) <= self.limit_tokens(num_offline=1)

    def facts(self, req: Any, planned_tokens: int, num_offline: int) -> dict[str, int]:
        """What `holds_back` compared for a request that it held back, in tokens."""
        return {
            "needed_tokens": needed_tokens(req),
            "planned_tokens": planned_tokens,
            "used_tokens": self.offline_tokens,
            "limit_tokens": self.limit_tokens(num_offline),
        }

    def note_start(self, req: Any) -> None:
        """Count what an offline request that starts must compute a second time."""
        core = self._tree_cache.echo_core
        req.echo_needed_tokens = 0
        evicted = core.charge_lost(req) if core is not None else 0
        lost = max(0, getattr(req, "echo_computed_tokens", 0) - req.prefix_len)
        req.echo_recomputed_tokens = getattr(req, "echo_recomputed_tokens", 0) + max(evicted, lost)

    def note_online_start(self, req: Any) -> None:
        """An online request starts: on reserved room, if offline ones are kept from it."""
        self.num_reserve_hits += self._holds_back
        if (core := self._tree_cache.echo_core) is not None:
            core.working_set.observe_hits(req.prefix_len, req.seqlen)

    def _locked_prefix_tokens(self, req: Any) -> int:
        core = self._tree_cache.echo_core
        if core is None:
            return 0
        if is_virtual_node(req.last_node):
            return int(req.prefix_len)  # its streaming session holds what the turns before left
        return int(core.locked_tokens(req.last_node))


def needed_tokens(req: Any) -> int:
    """What a request needed when it was held back last; 0 if it started since, or never was."""
    return int(getattr(req, "echo_needed_tokens", 0))
