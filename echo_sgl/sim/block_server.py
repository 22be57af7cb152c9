"""A server that is short of KV memory, to compare what offline work loses to online requests.

Each step decodes all online requests, prefills those that wait in chunks, and gives offline ones
what is left of its time and memory. Only the layout of the memory differs between runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from echo_sgl.batch_shape import SummedShape
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.batch_time import longest_prefill
from echo_sgl.estimators.roofline_time import RooflineBatchTime
from echo_sgl.sim.shared_blocks import BlockPool, Layout, Tenant

Row = tuple[float, int, int]
MIN_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """`reserve_share` of the pool is not given to offline requests that start or come back.

    `host_bytes_per_s`: how fast KV is copied to and from host memory; a step takes as long as its
    execution or its copies, whichever is longer (BROS 4.1). Units: tokens, seconds.
    """

    device: RooflineBatchTime
    kv_tokens: int
    page_tokens: int
    layout: Layout
    limit_s: float
    chunk_tokens: int = 512
    reserve_share: float = 0.02
    host_bytes_per_s: float = 20e9

    def __post_init__(self) -> None:
        if not (self.page_tokens >= 1 and self.kv_tokens >= self.page_tokens):
            raise ConfigError(
                f"page_tokens is {self.page_tokens} and kv_tokens {self.kv_tokens}; allowed are "
                "pages of at least 1 token that fit"
            )
        if not (self.limit_s > 0 and self.chunk_tokens >= 1 and 0 <= self.reserve_share < 1):
            raise ConfigError(
                f"limit_s is {self.limit_s}, chunk_tokens {self.chunk_tokens}, reserve_share "
                f"{self.reserve_share}; allowed are above 0, at least 1, and 0 to below 1"
            )

    def takes(self, prompt_tokens: int, answer_tokens: int) -> bool:
        """Whether an online request is served: one that needs more than half of the pool is not."""
        return prompt_tokens + answer_tokens <= self.kv_tokens // 2

    @property
    def kv_bytes_per_token(self) -> int:
        sizes = self.device.transformer
        return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * sizes.dtype_bytes


@dataclass(slots=True)
class BlockResults:
    """`lost_tokens`: offline KV that online requests took; of it, `recomputed_tokens` were
    computed and `read_tokens` read back. `empty_share`: of the pool, slots without a token in
    blocks that have a tenant, on the average over time.
    """

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_steps: int = 0
    offline_done: int = 0
    offline_tokens: int = 0
    lost_tokens: int = 0
    recomputed_tokens: int = 0
    read_tokens: int = 0
    empty_share: float = 0.0
    num_offline_mean: float = 0.0
    num_online_retracted: int = 0
    most_online_tokens: int = 0


class BlockServer:
    """One server; offline requests are endless: `lines` are taken in turn."""

    def __init__(
        self, config: BlockConfig, online: Sequence[Row], lines: Sequence[tuple[int, int]]
    ) -> None:
        self.config, self.results = config, BlockResults()
        page = config.page_tokens
        self.pool = BlockPool(config.kv_tokens // page, page, config.layout)
        self._online_rows, self._next_online = online, 0
        self._lines, self._next_line = lines, 0
        self.waiting: deque[Tenant] = deque()
        self.online: list[Tenant] = []
        self.offline: list[Tenant] = []
        self.now_s = 0.0
        self._reserve = int(config.reserve_share * config.kv_tokens)
        self._copied = self._written = 0
        self._decoding: list[Tenant] = []
        self._lines_decoding: list[Tenant] = []

    def run(self, until_s: float) -> BlockResults:
        """Serve until then. Units: seconds on the clock of the rows' arrivals."""
        while self.now_s < until_s:
            self._arrive()
            shape = self._form()
            time_s = self._time_s(shape)
            self._note_time(time_s)
            self.now_s += time_s
            self._end_step()
        self.results.end_s = self.now_s
        self.results.lost_tokens = self.pool.lost_tokens
        self.results.empty_share /= self.now_s
        self.results.num_offline_mean /= self.now_s
        return self.results

    # ---- one step --------------------------------------------------------------------------

    def _arrive(self) -> None:
        rows = self._online_rows
        while self._next_online < len(rows) and rows[self._next_online][0] <= self.now_s:
            at_s, prompt, answer = rows[self._next_online]
            self._next_online += 1
            if self.config.takes(prompt, answer):
                one = Tenant(self._next_online, at_s, prompt, answer, is_offline=False)
                self.waiting.append(one)

    def _form(self) -> SummedShape:
        """Take memory for all that the next step computes."""
        self._decoding = [one for one in self.online if self._take_decode(one)]
        if len(self._decoding) < len(self.online):
            self._retract_newest()
        shape = _decode_shape(self._decoding)
        left = self.config.chunk_tokens
        for one in self.waiting:
            cached = one.held_tokens
            new = self._take_online(one, min(left, one.missing_tokens))
            if new:
                shape.add_prefill(new, cached)
            left -= new
            if one.missing_tokens or not left:
                break
        self._add_offline_decodes(shape)
        if not self._add_offline_prefills(shape) and not self._lines_decoding:
            self._unlock()
        return shape

    def _unlock(self) -> None:
        """Where offline requests wait for each other's memory, the newest starts again."""
        holders = [one for one in self.offline if one.held_tokens]
        if len(holders) > 1 and self.pool.room(holders[0]) < max(1, _lost(holders[0])):
            self.pool.drop_all(holders[-1])

    def _retract_newest(self) -> None:
        """There is nothing left of offline requests: an online one is computed again later."""
        one = self.online.pop()
        self.results.num_online_retracted += 1
        if one in self._decoding:
            self._decoding.remove(one)
        self.pool.release(one)
        self.waiting.appendleft(one)

    def _take_decode(self, one: Tenant) -> bool:
        one.missing_tokens = 1
        is_taken = self._take_online(one, 1) == 1
        one.missing_tokens = 0
        return is_taken

    def _take_online(self, one: Tenant, num_tokens: int) -> int:
        """Room for an online request; offline ones lose theirs where that is needed."""
        taken, pool = 0, self.pool
        while taken < num_tokens:
            if room := min(pool.room(one), num_tokens - taken):
                pool.grow(one, room)
                taken += room
            elif not (more := self._take_from_offline(one, num_tokens - taken)):
                break
            else:
                taken += max(0, more)
        return taken

    def _take_from_offline(self, one: Tenant, num_tokens: int) -> int:
        """What the layout does when nothing is empty.

        Returns the slots that the online request got, below 0 when only room was made, and 0 when
        nothing is left to take.
        """
        victims = (line for line in reversed(self.offline) if line.held_tokens)
        if self.config.layout is Layout.SHARED:
            return self.pool.overwrite(one, victims, num_tokens)
        victim = next(victims, None)
        if victim is None:
            return 0
        if self.config.layout is Layout.RETRACT:
            self.pool.drop_all(victim)
        else:
            self.pool.release_last(victim)
        return -1

    def _add_offline_decodes(self, shape: SummedShape) -> None:
        """Complete offline requests decode, the first started first, within time and memory."""
        ready = [one for one in self.offline if not one.missing_tokens]
        tokens = [0, *accumulate(one.tokens for one in ready)]
        before = (shape.num_decodes, shape.decode_tokens)

        def fits(num: int) -> bool:
            shape.num_decodes, shape.decode_tokens = before[0] + num, before[1] + tokens[num]
            return self.config.device.predict_s(shape) <= self._limit_s

        fitting, too_many = 0, len(ready) + 1
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
        self._lines_decoding = [one for one in ready[:fitting] if self._grow_line(one)]
        shape.num_decodes = before[0] + len(self._lines_decoding)
        shape.decode_tokens = before[1] + sum(one.tokens for one in self._lines_decoding)

    def _grow_line(self, one: Tenant) -> bool:
        if not self.pool.room(one):
            return False
        one.missing_tokens = 1
        self.pool.grow(one, 1)
        return True

    def _add_offline_prefills(self, shape: SummedShape) -> bool:
        """Bring back what was lost, then start new ones; whether anything came of it."""
        has_some = False
        for one in self.offline:
            if one.missing_tokens:
                has_some = self._restore(one, shape) or has_some
                if one.missing_tokens:
                    return has_some
        while self._may_start():
            prompt, answer = self._lines[self._next_line % len(self._lines)]
            self._next_line += 1
            one = Tenant(self._next_line, self.now_s, prompt, answer, is_offline=True)
            self.offline.append(one)
            has_some = self._restore(one, shape) or has_some
            if one.missing_tokens:
                break
        return has_some

    def _may_start(self) -> bool:
        prompt, _ = self._lines[self._next_line % len(self._lines)]
        return self.pool.free_tokens - self._reserve >= prompt + self.config.page_tokens

    def _restore(self, one: Tenant, shape: SummedShape) -> bool:
        """Read or compute some of what a request misses; whether that was anything."""
        lost = _lost(one)
        # The reserve is kept from those that start.
        room = self.pool.room(one) - (0 if lost else self._reserve)
        if room < max(1, lost):
            return False
        if lost and self.config.layout.reads_back:
            if self._copy_s >= self.config.limit_s:
                return False
            self._copied += lost
            self.results.read_tokens += lost
            self.pool.grow(one, lost)
            return True
        new = longest_prefill(
            self.config.device,
            shape,
            self._limit_s,
            max_tokens=min(one.missing_tokens, room, self.config.chunk_tokens),
            cached_tokens=one.held_tokens,
        )
        if new < min(MIN_CHUNK_TOKENS, one.missing_tokens):
            return False
        shape.add_prefill(new, one.held_tokens)
        self.results.recomputed_tokens += min(new, lost)
        self.pool.grow(one, new)
        return True

    # ---- time and ends ---------------------------------------------------------------------

    @property
    def _limit_s(self) -> float:
        """Without online requests a step may be as long as a chunk of prefill makes it."""
        is_alone = not (self.online or self.waiting)
        return 10 * self.config.limit_s if is_alone else self.config.limit_s

    @property
    def _copy_s(self) -> float:
        return self._copied * self.config.kv_bytes_per_token / self.config.host_bytes_per_s

    def _time_s(self, shape: SummedShape) -> float:
        if not len(shape):
            self._copied = 0
            rows = self._online_rows
            following = rows[self._next_online][0] if self._next_online < len(rows) else 1e9
            return max(1e-3, min(1.0, following - self.now_s))
        time_s = max(self.config.device.predict_s(shape), self._copy_s)
        self._copied = 0
        return time_s

    def _note_time(self, time_s: float) -> None:
        results, pool = self.results, self.pool
        results.num_steps += 1
        share = pool.empty_tokens / (pool.num_blocks * pool.page_tokens)
        results.empty_share += time_s * share
        online_tokens = sum(one.held_tokens for one in (*self.online, *self.waiting))
        results.most_online_tokens = max(results.most_online_tokens, online_tokens)
        results.num_offline_mean += time_s * len(self._lines_decoding)
        if self.config.layout.reads_back:
            # What was taken is written to the host in the next step.
            self._copied += pool.lost_tokens - self._written
            self._written = pool.lost_tokens

    def _end_step(self) -> None:
        for one in self._decoding:
            one.num_outputs += 1
            if one.num_outputs >= one.answer_tokens:
                self._end_online(one)
        for one in [one for one in self.waiting if not one.missing_tokens]:
            self.waiting.remove(one)
            one.num_outputs += 1
            if one.first_token_s is None:
                one.first_token_s = self.now_s
                self.results.ttft_s.append(self.now_s - one.arrival_s)
            self.online.append(one)
            if one.num_outputs >= one.answer_tokens:
                self._end_online(one)
        for one in self._lines_decoding:
            one.num_outputs += 1
            if one.num_outputs >= one.answer_tokens:
                self._end_line(one)

    def _end_online(self, one: Tenant) -> None:
        assert one.first_token_s is not None
        if one.num_outputs > 1:
            self.results.tpot_s.append((self.now_s - one.first_token_s) / (one.num_outputs - 1))
        self.online.remove(one)
        self.pool.release(one)

    def _end_line(self, one: Tenant) -> None:
        self.results.offline_done += 1
        self.results.offline_tokens += one.tokens
        self.offline.remove(one)
        self.pool.release(one)


def _lost(one: Tenant) -> int:
    return one.known_tokens - one.held_tokens


def _decode_shape(decodes: Sequence[Tenant]) -> SummedShape:
    lengths = [one.tokens for one in decodes]
    return SummedShape(len(lengths), sum(lengths), max(lengths, default=0))
