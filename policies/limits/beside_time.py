"""What steps take beside what is predicted for them, learned from those of online work alone."""

from __future__ import annotations

import statistics
from collections import deque

from echo_sgl.batch_shape import StepKind

# How many steps tell, and how few: the host's part changes with the machine, not by the step.
NUM_STEPS, FEWEST = 50, 5
# Of what was learned, for each step since from which nothing was.
FADE = 0.9998


class BesideTime:
    """By how much online work alone takes longer than predicted, per kind of step.

    Predictions are of the device; between two steps the host plans, sends tokens and takes in
    requests: a third of the time on the H200 that was measured. Whoever compares what passes
    between two steps with a prediction has to add it, or online work is late before any offline
    work joins.

    With overlap scheduling a step's time passes while the next one is planned: only the second
    of two steps without offline work is learned from. It is their median: what is taken for more
    than it is lets offline work into every step, and then nothing is learned that would put it
    right. For the same reason it fades while nothing is learned, until online work is alone again.

    Source: ours. Units: seconds.
    """

    def __init__(self) -> None:
        self._seen_s = {kind: deque[float](maxlen=NUM_STEPS) for kind in StepKind}
        self._typical_s = dict.fromkeys(StepKind, 0.0)
        self._was_alone = False

    def typical_s(self, kind: StepKind) -> float:
        """Of one step of this kind; 0 before a few were seen, below 0 if predictions are long."""
        return self._typical_s[kind]

    def observe(self, kind: StepKind | None, beside_s: float, *, is_alone: bool) -> None:
        """A step ended that took `beside_s` more than predicted for its online work of this kind.

        `is_alone`: it held nothing else. `kind` None: it held no online work.
        """
        was_alone, self._was_alone = self._was_alone, is_alone
        if kind is None:
            return
        if not (is_alone and was_alone):
            if self._typical_s[kind] > 0:
                self._typical_s[kind] *= FADE
            return
        seen_s = self._seen_s[kind]
        seen_s.append(beside_s)
        if len(seen_s) >= FEWEST:
            self._typical_s[kind] = statistics.median(seen_s)
