"""The two batch-time models that are one weighted sum: HyGen's and BROS's."""

from __future__ import annotations

from typing import Any

import numpy as np

from echo_sgl.estimators.batch_time_model import FeatureModel


class LinearBatchTime(FeatureModel):
    """Linear in the totals of tokens and requests, and in the squares of the token totals.

    Cached tokens cost nothing here: HyGen has no term for them. Its fit is not bounded below;
    ours has no negative coefficient, since "more work, less time" would be exploited.

    Source: HyGen eq. 1, f(S_p, S_d, S_p^2, S_d^2, N_p, N_d), with S_d the total context and
            the squares those of the totals; the intercept is that of any linear regression.
    Units:  tokens in, seconds out.
    """

    NAME = "linear"
    COEFFICIENTS = (
        "prefill_token",
        "prefill_token_square",
        "prefill_request",
        "decode_token",
        "decode_token_square",
        "decode_request",
        "step",
    )

    def _features(self, batch: Any, num_decodes: Any) -> tuple[Any, ...]:
        prefill_tokens, decode_tokens = batch.prefill_tokens, batch.decode_tokens
        return (
            prefill_tokens,
            prefill_tokens * prefill_tokens,
            batch.num_prefills,
            decode_tokens,
            decode_tokens * decode_tokens,
            num_decodes,
            _one(num_decodes),
        )


class BrosBatchTime(FeatureModel):
    """Tokens, and tokens times all context, of prefill and decode apart; their times add up.

    Attention is priced as if every new token attended to the context of all requests. We
    fit both halves together, so that mixed steps teach them too; without mixed steps this
    is BROS's separate fit.

    Source: BROS 4.1, a0 * Ln + a1 * Ln * La + b; La includes the cached prefix.
    Units:  tokens in, seconds out.
    """

    NAME = "bros"
    COEFFICIENTS = (
        "prefill_token",
        "prefill_token_context",
        "prefill_step",
        "decode_request",
        "decode_request_context",
        "decode_step",
    )

    def _features(self, batch: Any, num_decodes: Any) -> tuple[Any, ...]:
        prefill_tokens = batch.prefill_tokens
        return (
            prefill_tokens,
            prefill_tokens * (prefill_tokens + batch.cached_tokens),
            batch.num_prefills > 0,
            num_decodes,
            num_decodes * batch.decode_tokens,
            num_decodes > 0,
        )


def _one(like: Any) -> Any:
    return np.ones_like(like) if isinstance(like, np.ndarray) else 1
