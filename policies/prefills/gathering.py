"""Whether requests that could start wait for others to start with them."""

from __future__ import annotations

import math

from echo_sgl.batch_shape import BatchRow, BatchShape
from echo_sgl.estimators.batch_time import StepPredictor

# Of what passes before the last one taught.
KEPT = 15.0 / 16.0


class Gathering:
    """Starts in lots, so that the fixed cost of a prefill step is paid for several at once.

    Where a step prefills or decodes, all that decode stop for a prefill step. Whatever is in it,
    it costs a fixed part, which is about what a decode step costs before its decodes. So starting
    a request as soon as there is room for it costs each of `num_decodes` that part of a token,
    and room that is left empty costs as much for each step that it is: the fixed part would have
    made one more token. Starts and empty room are set-ups and stock of a lot-sizing problem whose
    demand is how many requests end.

    Room for `k` others, `r` ends a decode step, `H` places left empty for a step each so far:

        wait on while   H < num_decodes                        part-period balancing
                  and   k / r < (num_decodes + H) / k          Silver and Meal

    The second rule waits while the mean cost of a start falls with one more in the lot; where
    requests end evenly, the lot has the size of least cost. The first one bounds what waiting
    costs by the cost of starting, if those that were to end do not. Lots are of requests whose
    prefills fit into one step: what takes several steps anyway is not made fewer by waiting.

    Offline requests wait like this beside anybody, online ones beside others of theirs, see
    `StepPlanner`: one object for each. With `is_on` false nobody waits; what starts need is learned
    all the same.

    Source: Silver and Meal (1973); DeMatteis (1968); the use is ours. Units: requests, decode
    steps, tokens. Deterministic: every rank sees the same passes.
    """

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.num_places = 0
        self._is_full = False
        self._num_steps = self._empty_steps = 0
        self._places_before = self._steps_before = 0.0
        # Starts, and of their prefills, whole: new tokens, cached tokens, area.
        self._started: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        self._asked: tuple[BatchRow | None, float] = (None, 0.0)

    def note_pass(self, started: BatchShape, *, is_full: bool) -> None:
        """A pass offered requests, and started some: their prefills, to the last chunk.

        `is_full`: it ended because no place or no memory was left.
        """
        if self._is_full and is_full and not (started.num_prefills or self.num_places):
            return  # nothing has changed since the last one
        if self._is_full:
            self._places_before = KEPT * (self._places_before + self.num_places)
            self._steps_before = KEPT * (self._steps_before + self._num_steps)
        if started.num_prefills:
            sums = (
                started.num_prefills,
                started.prefill_tokens,
                started.cached_tokens,
                started.prefill_area,
            )
            before = zip(self._started, sums, strict=True)
            self._started = tuple(KEPT * old + new for old, new in before)
        self._is_full = is_full
        self._asked = None, 0.0
        self.num_places = self._num_steps = self._empty_steps = 0

    def note_end(self) -> None:
        """A request left: there is room for another."""
        self.num_places += 1

    def note_start(self) -> None:
        """Somebody else took the room of one."""
        self.num_places = max(0, self.num_places - 1)

    def note_decode(self) -> None:
        """A step decodes, with what room there is left empty."""
        self._num_steps += 1
        self._empty_steps += self.num_places

    def waits(self, num_decodes: int, num_waiting: int) -> bool:
        """Whether those that could start do so later; `num_decodes` would stop for them.

        Not when there is room for all `num_waiting`: nobody else would start with them.
        """
        num_places, empty_steps = self.num_places, self._empty_steps
        if not (self.is_on and self._is_full):
            return False
        if not 0 < num_places < num_waiting or empty_steps >= num_decodes:
            return False
        num_steps = self._steps_before + self._num_steps
        if not num_steps:
            return False
        rate = (self._places_before + num_places) / num_steps
        return num_places * num_places < rate * (num_decodes + empty_steps)

    def lot_s(self, predictor: StepPredictor, max_tokens: int) -> float:
        """What the prefill step of the lot with one more in it would take, in seconds.

        Infinite when it has more than `max_tokens`. Each step that waits asks this; the predictor
        is asked once for each request that ended.
        """
        lot = self.lot()
        if lot.prefill_tokens > max_tokens:
            return math.inf
        if lot != self._asked[0]:
            self._asked = lot, predictor.predict_s(lot)
        return self._asked[1]

    def lot(self) -> BatchRow:
        """The prefill step of the lot with one more in it, as requests were lately."""
        num_started, *sums = self._started
        size = self.num_places + 1
        share = size / num_started if num_started else 0.0
        tokens, cached_tokens, area = (int(share * one) for one in sums)
        # Of those whose prompts are as long as in the mean.
        longest_tokens = (tokens + cached_tokens) // size
        return BatchRow(size, tokens, cached_tokens, area, 0, 0, 0, longest_tokens)

    def free_tokens(self, num_waiting: int) -> float:
        """New tokens of those of `num_waiting` that find a place, as requests were lately.

        Infinite before anybody has started.
        """
        num_started, tokens, *_ = self._started
        num_free = min(self.num_places, num_waiting) if self._is_full else num_waiting
        if not num_free:
            return 0.0
        return num_free * tokens / num_started if num_started else math.inf

    @property
    def facts(self) -> dict[str, float]:
        """What decides, for people who ask why a request waits."""
        return {"num_places": self.num_places, "empty_steps": self._empty_steps}
