"""What steps take beside what is predicted for them, learned from those of online work alone."""

from __future__ import annotations

from echo_sgl.batch_shape import StepKind

# About how far the mean goes back: the host's part changes with the machine, not by the step.
NUM_STEPS = 50


class BesideTime:
    """The mean time by which online work alone takes longer than predicted, per kind of step.

    Predictions are of the device; between two steps the host plans, sends tokens and takes in
    requests: a third of the time on the H200 that was measured. Whoever compares what passes
    between two steps with a prediction has to add it, or online work is late before any offline
    work joins.

    With overlap scheduling a step's time passes while the next one is planned: only the second
    of two steps without offline work is learned from. One step counts for `most_s` at most.

    Source: ours. Units: seconds.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._mean_s = dict.fromkeys(StepKind, 0.0)
        self._num_seen = dict.fromkeys(StepKind, 0)
        self._was_alone = False

    def mean_s(self, kind: StepKind) -> float:
        """Of one step of this kind; 0 before any was seen, below 0 where predictions are long."""
        return self._mean_s[kind]

    def observe(self, kind: StepKind | None, beside_s: float, *, is_alone: bool) -> None:
        """A step ended that took `beside_s` more than predicted for its online work of this kind.

        `is_alone`: it held nothing else. `kind` None: it held no online work.
        """
        was_alone, self._was_alone = self._was_alone, is_alone
        if kind is None or not (is_alone and was_alone):
            return
        self._num_seen[kind] += 1
        weight = 1.0 / min(self._num_seen[kind], NUM_STEPS)
        self._mean_s[kind] += weight * (min(beside_s, self._most_s) - self._mean_s[kind])
