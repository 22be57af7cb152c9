"""Requests that decode together, as sums: a step of any number of them costs O(1)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from echo_sgl.batch_shape import BatchShape, SummedShape
from echo_sgl.policies.limits.step_limit import ENDING_TOKENS, Ending
from echo_sgl.sim.workload import DecodeClock, SimRequest

Entry = tuple[float, int, SimRequest]

# Entries that are outdated stay in a heap until they come to its top, or are more than this.
MAX_OUTDATED = 64


class DecodeGroup(DecodeClock):
    """The decodes of one class. Each step adds one token to all of them.

    What is the least or most among them is kept in heaps whose outdated entries are skipped:
    a request's length less the steps made so far never changes while it is here.

    `ttft_s` and `tpot_s` are what its requests are promised; infinite where nothing is.
    `ignores_eos`: SGLang knows that their answers are as long as allowed.
    Units: tokens, seconds, pages of `page_tokens`.
    """

    def __init__(
        self, page_tokens: int, *, ttft_s: float = math.inf, tpot_s: float = math.inf
    ) -> None:
        self.step = 0
        self.members: dict[str, SimRequest] = {}
        self.seq_tokens = self.left_tokens = self._num_clipped = 0
        self._page_tokens, self._ttft_s, self._tpot_s = page_tokens, ttft_s, tpot_s
        self.ignores_eos = False
        self._by_residue = [0] * page_tokens
        self._longest: list[Entry] = []
        self._shortest: list[Entry] = []
        self._due: list[Entry] = []
        self._ends: list[Entry] = []
        self._unclips: list[Entry] = []
        self._allowed: list[Entry] = []
        self._near: list[Entry] = []
        self._num_joined = 0

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self.members.values())

    def add(self, request: SimRequest, *, tokens_left: int) -> None:
        """Let a request decode; its answer ends after `tokens_left` steps."""
        self._num_joined += 1
        request.group, request.joined_step, request.ticket = self, self.step, self._num_joined
        self.members[request.rid] = request
        tokens = request.seq_tokens
        self.seq_tokens += tokens
        self.left_tokens += request.planned_tokens
        if request.clipped_tokens:
            # What is planned for it starts to shrink later.
            self._num_clipped += 1
            self._push(self._unclips, self.step + request.clipped_tokens, request)
        self._by_residue[self._residue(request)] += 1
        offset = tokens - self.step
        self._push(self._longest, -offset, request)
        self._push(self._shortest, offset, request)
        self._push(self._ends, self.step + tokens_left, request)
        if math.isfinite(self._tpot_s):
            allowed_step = self.step + request.max_new_tokens - request.num_outputs
            self._push(self._allowed, allowed_step, request)
            self._push(self._due, self._due_constant(request), request)

    def remove(self, request: SimRequest) -> None:
        """Take a request out; it keeps its tokens."""
        del self.members[request.rid]
        self.seq_tokens -= request.seq_tokens
        self.left_tokens -= request.planned_tokens
        self._num_clipped -= request.clipped_tokens > 0
        self._by_residue[self._residue(request)] -= 1
        request.outputs_at_join, request.group = request.num_outputs, None
        # The KV of its last token is yet to be computed.
        request.computed_tokens = request.seq_tokens - 1

    def advance(self) -> None:
        """All made one token more."""
        self.step += 1
        self.seq_tokens += len(self.members)
        self.left_tokens -= len(self.members) - self._num_clipped
        while (entry := self._top(self._unclips)) is not None and entry[0] <= self.step:
            heapq.heappop(self._unclips)
            self._num_clipped -= 1

    def take_ended(self) -> list[SimRequest]:
        """Requests whose answer is complete now; each is told once and stays a member."""
        ended = []
        while (entry := self._top(self._ends)) is not None and entry[0] <= self.step:
            heapq.heappop(self._ends)
            ended.append(entry[2])
        return ended

    @property
    def growth_tokens(self) -> int:
        """What the next step takes from the pool, in whole pages."""
        return self._by_residue[-self.step % self._page_tokens] * self._page_tokens

    @property
    def longest_tokens(self) -> int:
        if not self.members:
            return 0
        entry = self._top(self._longest)
        return 0 if entry is None else self.step - int(entry[0])

    @property
    def shortest_tokens(self) -> int:
        entry = self._top(self._shortest)
        return 0 if entry is None else self.step + int(entry[0])

    @property
    def due_s(self) -> float:
        """When the first of their next tokens is due; infinite without a promise."""
        entry = self._top(self._due)
        return math.inf if entry is None else entry[0] + self.step * self._tpot_s

    @property
    def endings(self) -> tuple[Ending, ...]:
        """Members with few tokens left of what their clients allowed; none without a promise."""
        last_step = self.step + ENDING_TOKENS
        while (entry := self._top(self._allowed)) is not None and entry[0] <= last_step:
            self._near.append(heapq.heappop(self._allowed))
        self._near = [one for one in self._near if self._is_here(one)]
        return tuple(self._ending(step, request) for step, _, request in self._near)

    def shape(self) -> BatchShape:
        """A step of these decodes alone."""
        return SummedShape(len(self.members), self.seq_tokens, self.longest_tokens)

    def _due_constant(self, request: SimRequest) -> float:
        """Due time less `step` times TPOT, see `Promise.due_s`."""
        start_s = request.arrival_s + self._ttft_s
        if request.first_token_s is not None:
            start_s = min(start_s, request.first_token_s)
        return start_s + (request.outputs_at_join - request.joined_step) * self._tpot_s

    def _ending(self, allowed_step: float, request: SimRequest) -> Ending:
        due_s = self._due_constant(request) + (allowed_step - 1) * self._tpot_s
        return Ending(due_s, int(allowed_step) - self.step)

    def _residue(self, request: SimRequest) -> int:
        return (request.seq_tokens - self.step - 1) % self._page_tokens

    def _push(self, heap: list[Entry], key: float, request: SimRequest) -> None:
        if len(heap) > MAX_OUTDATED + 2 * len(self.members):
            heap[:] = filter(self._is_here, heap)
            heapq.heapify(heap)
        heapq.heappush(heap, (key, request.ticket, request))

    def _top(self, heap: list[Entry]) -> Entry | None:
        while heap:
            if self._is_here(heap[0]):
                return heap[0]
            heapq.heappop(heap)
        return None

    def _is_here(self, entry: Entry) -> bool:
        _, ticket, request = entry
        return request.group is self and request.ticket == ticket
