"""How long each step of the model took, with what it ran, in a ring buffer.

SGLang's runners call `model_runner.device_timer` around a forward pass and leave it empty
unless their own timer is switched on. Ours stands there and passes on to that one. What it
measures is the device's execution time, not the scheduler's loop time, which overlap
scheduling hides: events on an accelerator, the clock on a CPU, where a forward pass returns
when it is done.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from echo_sgl.batch_shape import BatchRow, BatchShape, decode_row
from echo_sgl.engine.steps.step_log import StepNote

DEFAULT_CAPACITY = 20_000
NUM_FIRST = 12
# What other threads of a step may have spun for while one was without its core, each time; some of
# what they did was the step's own work however often that was.
SPIN_S, LEAST_OWN_SHARE = 0.004, 0.01


class StepTimer:
    """Times the step that `expect` announced; steps that nobody announced are not kept.

    Units: seconds. Reading is cheap and forgets nothing: `records` are the last `capacity`.
    `first_busy_s`: what the first steps cost this thread at least, whoever else had the cores;
    infinite where a device runs them.
    """

    def __init__(
        self, inner: Any = None, *, on_device: bool = False, capacity: int = DEFAULT_CAPACITY
    ) -> None:
        self.num_steps = 0
        self.ended_notes: deque[StepNote] = deque(maxlen=capacity)
        self.first_busy_s: list[float] = []
        self._mark = _device_event if on_device else time.perf_counter
        self._on_device = on_device
        self._inner = inner
        self._records: deque[tuple[BatchRow, float]] = deque(maxlen=capacity)
        self._fresh: deque[tuple[BatchRow, float]] = deque(maxlen=capacity)
        self._expected: tuple[BatchRow | None, StepNote | None] = None, None
        self._running: deque[tuple[BatchRow, StepNote | None, Any, Any]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def expect(self, row: BatchRow | None, note: StepNote | None = None) -> None:
        """The next forward pass runs this; None: something that is not a step of ours.

        Its time is written into the note once it is known.
        """
        self._expected = row, note

    @contextlib.contextmanager
    def wrap(self, metadata: dict[str, Any]) -> Iterator[None]:
        """Around one forward pass, on the stream that runs it."""
        (row, note), self._expected = self._expected, (None, None)
        outer = self._inner.wrap(metadata) if self._inner is not None else contextlib.nullcontext()
        with outer:
            is_first = row is not None and len(self.first_busy_s) < NUM_FIRST
            busy = _Busy() if is_first else None
            start = self._mark()
            yield
            if row is not None:
                self._running.append((row, note, start, self._mark()))
            if busy is not None:
                self.first_busy_s.append(math.inf if self._on_device else busy.least_s())

    def records(self) -> list[tuple[BatchRow, float]]:
        """The last steps that are over, oldest first."""
        self.collect()
        return list(self._records)

    def collect(self) -> None:
        """Take in the steps that have ended since; never waits for the device."""
        while self._running and _is_over(self._running[0][3]):
            row, note, start, end = self._running.popleft()
            time_s = _elapsed_s(start, end)
            self._records.append((row, time_s))
            self._fresh.append((row, time_s))
            self.num_steps += 1
            if note is not None:
                note.time_s = time_s
                self.ended_notes.append(note)

    def take_fresh(self) -> list[tuple[BatchRow, float]]:
        """The steps that ended since this was called last, oldest first."""
        self.collect()
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh


class _Busy:
    """What this thread does from now on."""

    def __init__(self) -> None:
        self._start_s, self._num_preempted = time.thread_time(), _num_preempted()

    def least_s(self) -> float:
        """Without what it spun for while other threads of the step were without their cores."""
        spent_s = time.thread_time() - self._start_s
        spun_s = SPIN_S * (_num_preempted() - self._num_preempted)
        return max(LEAST_OWN_SHARE * spent_s, spent_s - spun_s)


def _num_preempted() -> int:
    """How often a thread of this process had to leave its core to somebody."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def row_of_batch(batch: Any) -> BatchRow | None:
    """What a batch is about to run; None when it has no forward pass of its own."""
    if batch.forward_mode.is_decode():
        return decode_row([req.seqlen for req in batch.reqs])
    shape = BatchShape()
    if batch.forward_mode.is_extend():
        num_prefills = len(batch.reqs) - len(batch.decoding_reqs or ())
        lengths = zip(batch.extend_lens, batch.prefix_lens, strict=True)
        for index, (new_tokens, cached_tokens) in enumerate(lengths):
            if index < num_prefills:
                shape.add_prefill(new_tokens, cached_tokens)
            else:
                shape.add_decode(cached_tokens + 1)
    return shape.row() if len(shape) else None


def install_step_timer(model_runner: Any) -> StepTimer:
    """Put our timer where the runner looks for one."""
    import torch

    timer = StepTimer(model_runner.device_timer, on_device=torch.cuda.is_available())
    model_runner.device_timer = timer
    return timer


def _device_event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_over(end: Any) -> bool:
    return isinstance(end, float) or bool(end.query())


def _elapsed_s(start: Any, end: Any) -> float:
    if isinstance(end, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000.0
