"""How long offline work may keep an online request waiting that arrives while a step runs."""

from __future__ import annotations

import math
from collections import deque

from echo_sgl.estimators.batch_time import StepPredictor, prefill_alone_s

# Online prompts that are remembered, and whose prefill must fit: nine of ten.
NUM_PROMPTS = 64
LONG_QUANTILE = 0.9
# The rate at which online requests come is that of the last seconds: each phase has its own.
RATE_WINDOW_S = 2.0
# Of the TTFT: what offline work may take however little is left, and what a prefill is taken for
# until one was seen.
LEAST_SHARE = 0.125
UNSEEN_SHARE = 0.5
# A prediction holds for so many steps: the estimator learns.
USES = 256


class ArrivalWait:
    """A share of what a first token leaves of the TTFT that is promised.

    Who arrives waits until the step that runs has ended, and then for its own prefill. While it
    does both, others come, and are prefilled with it; and online decodes that are due go first.
    For a wait of `w` seconds, a prompt that takes `long_s`, others that take `mean_s` in the mean
    and come at `rate` a second, and a decode step of `alone_s`:

        w + long_s + alone_s + rate * (w + long_s) * mean_s <= TTFT

    Of the longest such wait, offline work gets `share`: in calm hours much of the TTFT, and long
    chunks, whose fixed costs weigh less; while many come, little. An eighth of the TTFT at least,
    since a job must go on where prompts take all of it; `most_s` at most.

    All of these are expected times. Whoever decodes is stopped by every such step, and its slack is
    for what they take at most; but few of them see anybody arrive, and those that do seldom as they
    begin. And bounds say what differed lately: after a slow moment they are far above what
    steps take, for as long as it counts.

    Source: ours. Units: seconds on the caller's clock, tokens. Deterministic: every rank sees the
    same requests. `ttft_s` 0: nothing is promised, and the wait is `most_s`.
    """

    def __init__(self, *, ttft_s: float, share: float, most_s: float, chunk_tokens: int) -> None:
        self._ttft_s, self._share, self._most_s = ttft_s, share, most_s
        self.is_promised = ttft_s > 0.0
        self._chunk_tokens = chunk_tokens
        self._prompts: deque[int] = deque(maxlen=NUM_PROMPTS)
        self._num_uses = 0
        self.forget()

    def note_start(self, now_s: float, new_tokens: int) -> None:
        """An online request starts, with so many tokens to prefill."""
        self._rate = self._rate_at(now_s) + 1.0 / RATE_WINDOW_S
        self._since_s = now_s
        self._prompts.append(new_tokens)
        self._num_uses = 0

    def forget(self) -> None:
        """The requests until now were no traffic: what they taught does not count."""
        self._prompts.clear()
        self._rate, self._since_s = 0.0, -math.inf
        # Of a long prompt and of a mean one; each may be used `_num_uses` times yet.
        self._prefill_s = UNSEEN_SHARE * self._ttft_s, 0.0

    def longest_s(self, now_s: float, alone_s: float, predictor: StepPredictor | None) -> float:
        """What a step with offline work in it may be expected to take, beside online decodes.

        `alone_s`: what a step is expected to take that decodes the online requests at hand.
        `predictor`: of expected times; None while nothing is known.
        """
        if not self.is_promised:
            return self._most_s
        left_s = self.left_s(now_s, alone_s, predictor)
        return min(max(self._share * left_s, LEAST_SHARE * self._ttft_s), self._most_s)

    def left_s(self, now_s: float, alone_s: float, predictor: StepPredictor | None) -> float:
        """What it could take, and who arrives would be in time yet; may be negative."""
        long_s, mean_s = self._prefills_s(predictor)
        beside = 1.0 + self._rate_at(now_s) * mean_s
        return (self._ttft_s - alone_s) / beside - long_s

    def _rate_at(self, now_s: float) -> float:
        if math.isinf(self._since_s):
            return 0.0
        return self._rate * math.exp(min(0.0, self._since_s - now_s) / RATE_WINDOW_S)

    def _prefills_s(self, predictor: StepPredictor | None) -> tuple[float, float]:
        if predictor is None or not self._prompts:
            return self._prefill_s
        self._num_uses -= 1
        if self._num_uses <= 0:
            prompts = sorted(self._prompts)
            long_tokens = prompts[int(LONG_QUANTILE * (len(prompts) - 1))]
            mean_tokens = sum(prompts) / len(prompts)
            self._prefill_s = (
                self._alone_s(predictor, long_tokens),
                self._alone_s(predictor, mean_tokens),
            )
            self._num_uses = USES
        return self._prefill_s

    def _alone_s(self, predictor: StepPredictor, tokens: float) -> float:
        """Whole chunks, each as long as the first one."""
        chunk_s = prefill_alone_s(predictor, int(min(tokens, self._chunk_tokens)))
        return chunk_s * max(1.0, tokens / self._chunk_tokens)
