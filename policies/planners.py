"""The planner that a config describes."""

from __future__ import annotations

from collections.abc import Iterable

from echo_sgl.config import EchoConfig
from echo_sgl.estimators.batch_time import StepEstimator
from echo_sgl.policies.decodes.batch_size import create_batch_size
from echo_sgl.policies.decodes.decode_selections import create_decode_selection
from echo_sgl.policies.limits.step_limits import create_step_limit
from echo_sgl.policies.prefills.chunk_wait import ChunkWait
from echo_sgl.policies.step_planner import StepPlanner

# Of the places; BROS's base is 128, half of what engines run by default.
BASE_SHARE = 0.5


def create_step_planner(
    config: EchoConfig,
    estimator: StepEstimator,
    *,
    max_requests: int,
    chunk_tokens: int,
    captured_batch_sizes: Iterable[int],
) -> StepPlanner:
    """The planner of a server, or of a simulated one, with the policies that its config names.

    `max_requests`: what SGLang runs at once; `chunk_tokens`: what it prefills in one step.
    `captured_batch_sizes`: of CUDA graphs for decodes; none where decodes run without.
    """
    steps = config.steps
    offline_tokens = min(chunk_tokens, config.offline.max_prefill_tokens_per_step or chunk_tokens)
    return StepPlanner(
        config,
        create_step_limit(steps, config.slo),
        estimator,
        selection=create_decode_selection(steps.decode_selection, seed=config.offline.seed),
        batch_size=create_batch_size(
            steps.batch_size,
            base=max(1, int(BASE_SHARE * max_requests)),
            maximum=max_requests,
            captured_batch_sizes=captured_batch_sizes,
        ),
        chunk_wait=ChunkWait(steps.chunk_overhead, steps.min_chunk_tokens, offline_tokens),
        max_requests=max_requests,
        chunk_tokens=chunk_tokens,
    )
