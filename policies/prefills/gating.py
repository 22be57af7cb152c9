"""Whether a new offline request is prefilled, or those that decode go on without it."""

from __future__ import annotations

from echo_sgl.batch_shape import BatchRow, BatchShape
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.policies.order.answer_lengths import AnswerLengths

# Of what passes before the last one taught.
FADE = 0.98
# One lost start is forgotten after some 30 that were not.
LEAST_LOST = 0.5


def gate_opens(
    predictor: StepPredictor,
    decodes: BatchRow,
    context_tokens: int,
    *,
    prefill_s: float,
    expected_outputs: float,
    lost_share: float,
) -> bool:
    """Whether a request whose prompt has `context_tokens` should start beside these `decodes`.

    It should when the time that a larger batch saves, over the tokens that the request is
    expected to make, is more than computing its prompt again, `prefill_s`, times the share of
    prefills that are lost to online requests. Source: OOCO 3.4.2, which leaves its cost model
    open: the formula is ours. Units: tokens, seconds.
    """
    num = decodes.num_decodes
    if not num:
        return True
    joined = _joined(decodes, context_tokens)
    alone_s = predictor.predict_s(decodes)
    saved_s = expected_outputs * ((num + 1) * alone_s / num - predictor.predict_s(joined))
    return saved_s > lost_share * prefill_s


def _joined(decodes: BatchRow, context_tokens: int) -> BatchRow:
    """These decodes with one more."""
    tokens = decodes.decode_tokens + context_tokens
    longest_tokens = max(decodes.max_decode_tokens, context_tokens)
    return BatchRow(0, 0, 0, 0, decodes.num_decodes + 1, tokens, longest_tokens)


class Gating:
    """Asks `gate_opens` with what offline requests were like lately.

    Open before anybody has started, answered and been lost, and always with `is_on` false.
    Units: requests, tokens. Deterministic: every rank sees the same.
    """

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        # Starts, and of their prefills: new tokens, cached tokens, area; and how many were lost.
        self._started: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        self._num_lost = 0.0
        self._answers = AnswerLengths()

    def note_started(self, prefills: BatchShape) -> None:
        """A pass started offline requests: their prefills, to the last chunk."""
        if not prefills.num_prefills:
            return
        fade = FADE**prefills.num_prefills
        sums = (
            prefills.num_prefills,
            prefills.prefill_tokens,
            prefills.cached_tokens,
            prefills.prefill_area,
        )
        before = zip(self._started, sums, strict=True)
        self._started = tuple(fade * old + new for old, new in before)
        self._num_lost *= fade

    def note_lost(self) -> None:
        """An offline request gave up its memory and starts again later."""
        self._num_lost += 1.0

    def note_answer(self, num_tokens: int) -> None:
        """An offline request ended with so many tokens."""
        self._answers.note(num_tokens)

    def num_open(self, predictor: StepPredictor, decodes: BatchRow, most: int) -> int:
        """How many of `most` that could start beside these decodes do so, one after the other."""
        num_started, outputs = self._started[0], self._answers.mean_tokens
        if not (self.is_on and num_started and self._num_lost >= LEAST_LOST) or outputs is None:
            return most
        _, tokens, cached_tokens, area = (int(part / num_started) for part in self._started)
        prefill_s = predictor.predict_s(
            BatchRow(1, tokens, cached_tokens, area, 0, 0, 0, tokens + cached_tokens)
        )
        lost_share, context_tokens = self.lost_share, tokens + cached_tokens
        for num in range(most):
            if not gate_opens(
                predictor,
                decodes,
                context_tokens,
                prefill_s=prefill_s,
                expected_outputs=outputs,
                lost_share=lost_share,
            ):
                return num
            decodes = _joined(decodes, context_tokens)
        return most

    @property
    def lost_share(self) -> float:
        """Of the offline prefills, those whose memory was taken before the answer was complete."""
        num_started = self._started[0]
        return min(1.0, self._num_lost / num_started) if num_started else 0.0

    @property
    def facts(self) -> dict[str, float]:
        """What decides, for people who ask why a request waits."""
        return {"lost_share": self.lost_share, "expected_tokens": self._answers.mean_tokens or 0.0}
