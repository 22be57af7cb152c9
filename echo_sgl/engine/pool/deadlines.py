"""When the work of a job must be done, and how fast offline work gets done here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from echo_sgl.engine.requests.terms import terms_of
from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.deadlines import (
    ADVANCE_EVERY_S,
    LOOK_EVERY_S,
    InWork,
    RateMeter,
    progress,
)
from echo_sgl.types import Work

# A window is told apart in this many parts: lines of one job come with slightly different
# deadlines, and what is decided at each step costs as much as there are deadlines.
WINDOW_PARTS = 128


class DeadlineWatch:
    """Measures the offline rate and lets late jobs go ahead; the same on every rank."""

    def __init__(self, order: DeadlineOrder) -> None:
        self._order, self._rate = order, RateMeter()
        self._tokens_done, self._is_working = 0, False
        self._advanced_s = self._looked_s = -math.inf
        self.urgent_deadline_s: float | None = None

    @property
    def rate_tokens_per_s(self) -> float | None:
        """How fast offline work gets done; None until that can be told."""
        return self._rate.tokens_per_s

    def terms(self, req: Any) -> tuple[float | None, Work]:
        """Deadline (seconds on the step clock, or None) and work of a request that waits."""
        end_s = _end_s(req)
        return (None if math.isinf(end_s) else end_s), _work(req)

    def note_end(self, req: Any) -> None:
        """An offline request is done."""
        self._tokens_done += max(0, _done_tokens(req) - _counted(req))
        if isinstance(getattr(req, "finished_reason", None), FINISH_ABORT):
            return  # its answer would have been longer
        self._order.book.answer_lengths.note(len(req.output_ids))

    def advance(
        self, now_s: float, has_work: Callable[[], bool], running: Callable[[], Iterable[Any]]
    ) -> bool:
        """Take in what was done, decide which job goes ahead; whether all that run were looked at.

        At most every `ADVANCE_EVERY_S` and where work comes or ends, and what runs every
        `LOOK_EVERY_S`. `has_work`: whether offline requests wait or run; `running`: those of
        either class that hold KV.
        """
        was_working, self._is_working = self._is_working, has_work()
        if was_working is self._is_working and now_s - self._advanced_s < ADVANCE_EVERY_S:
            return False
        self._advanced_s = now_s
        if not self._is_working:
            self._observe(now_s)
            self._rate.pause()
            self._order.book.set_running({})
            self._looked_s = -math.inf
            return False
        looks = now_s - self._looked_s >= LOOK_EVERY_S
        if looks:
            self._looked_s = now_s
            self._look(running())
        self._observe(now_s)
        self.urgent_deadline_s = self._order.escalate(now_s, self.rate_tokens_per_s)
        return looks

    def _observe(self, now_s: float) -> None:
        self._rate.observe(now_s, self._tokens_done)
        self._tokens_done = 0

    def _look(self, running: Iterable[Any]) -> None:
        """Count what was done of offline requests that run, and what is left of them."""
        seen = []
        for req in running:
            if not terms_of(req).is_offline:
                continue
            num_tokens, counted = _done_tokens(req), _counted(req)
            if num_tokens > counted:
                req.echo_counted_tokens = num_tokens
            seen.append(InWork(num_tokens, counted, *self._end_of(req)))
        num_done, left = progress(seen)
        self._tokens_done += num_done
        self._order.book.set_running(left)

    def _end_of(self, req: Any) -> tuple[int, float]:
        """How many tokens a request should have in the end, and by when; 0 where it may be ever."""
        end_s = _end_s(req)
        if math.isinf(end_s):
            return 0, end_s
        answer_tokens = self._order.book.answer_lengths.expected_tokens
        return _work(req).expected_tokens(answer_tokens), end_s

    def laxity_s(self, req: Any, now_s: float) -> float:
        """Time left beyond what is needed at the present rate; infinite without deadline."""
        return self.laxities_s([req], now_s)[0]

    def laxities_s(self, reqs: Sequence[Any], now_s: float) -> list[float]:
        """Of each: those of one job share theirs, which costs as much as there are deadlines."""
        ends_s, known = list(map(_end_s, reqs)), {math.inf: math.inf}
        for end_s in ends_s:
            if end_s not in known:
                rate = self.rate_tokens_per_s
                known[end_s] = self._order.book.laxity_s(end_s, now_s, rate)
        return [known[end_s] for end_s in ends_s]


def _end_s(req: Any) -> float:
    """When a request is to be done, rounded to what is told apart; infinite without deadline."""
    terms = terms_of(req)
    if math.isinf(terms.deadline_s):
        return math.inf
    return _rounded_deadline_s(terms.deadline_s, terms.arrival_s)


def _rounded_deadline_s(deadline_s: float, arrival_s: float) -> float:
    """Never later, and earlier by less than a `WINDOW_PARTS`-th of the window or a second."""
    window_s = deadline_s - arrival_s
    grid_s = 2.0 ** max(0, math.floor(math.log2(max(1.0, window_s / WINDOW_PARTS))))
    return math.floor(deadline_s / grid_s) * grid_s


def _work(req: Any) -> Work:
    """What it may have to compute: nobody knows how long its answer truly is."""
    max_new_tokens = int(req.sampling_params.max_new_tokens)
    return Work(len(req.origin_input_ids), max_new_tokens, _counted(req))


def _counted(req: Any) -> int:
    """Of its tokens, what the rate knows already."""
    return int(getattr(req, "echo_counted_tokens", 0))


def _done_tokens(req: Any) -> int:
    """Of its tokens, what is computed: between two chunks not all of the prompt is."""
    prefilled = getattr(req, "extend_end", None)
    if prefilled and prefilled < len(req.origin_input_ids):
        return int(prefilled)
    return int(req.seqlen)
