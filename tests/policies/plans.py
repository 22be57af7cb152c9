"""Planners whose steps take exactly what a linear clock says."""

from __future__ import annotations

import math

from echo_sgl.batch_shape import BatchShape
from echo_sgl.config import EchoConfig, SloConfig, StepsConfig
from echo_sgl.policies.decodes.batch_size import create_batch_size
from echo_sgl.policies.decodes.decode_selection import Decode
from echo_sgl.policies.decodes.decode_selections import create_decode_selection
from echo_sgl.policies.limits.step_limit import Ending
from echo_sgl.policies.limits.step_limits import create_step_limit
from echo_sgl.policies.prefills.chunk_wait import ChunkWait
from echo_sgl.policies.step_planner import StepPlanner

NOW_S = 64.0
CHUNK_TOKENS = 512
ALL_SLACK = {
    "slack_share": 1.0,
    "lag_tokens": 0.0,
    "place_share": 0.0,
    "place_gain": 0.0,
    "chunk_overhead": 0.0,
}


class Clockwork:
    """1 ms a prefilled token, 10 ms a decode, nothing else."""

    is_ready = True

    @property
    def upper(self):
        return self

    def spread(self, kind):
        return 1.0

    def predict_s(self, step):
        return 0.001 * step.prefill_tokens + 0.010 * step.num_decodes


class Attention(Clockwork):
    """The time of a decode grows with its context."""

    def predict_s(self, step):
        return super().predict_s(step) + 1e-4 * (step.decode_tokens + step.max_decode_tokens)


class Unknown(Clockwork):
    is_ready = False

    def predict_s(self, step):
        return math.inf


def decode(number, *, context=100, is_running=True):
    return Decode(
        rid=str(number),
        context_tokens=context,
        uncached_tokens=context,
        waiting_since_s=None if is_running else NOW_S,
        laxity_s=math.inf,
        is_running=is_running,
        sequence=number,
    )


def planner(
    estimator=None, *, slo=None, max_decodes=64, selection="shortest", **steps
) -> StepPlanner:
    """With `steps` as in a config."""
    slo = slo or SloConfig(ttft_s=100.0, tpot_s=100.0)
    config = StepsConfig(**{"limit": "slack", "max_stall_s": 10.0, **ALL_SLACK, **steps})
    return StepPlanner(
        EchoConfig(steps=config, slo=slo),
        create_step_limit(config, slo),
        estimator or Clockwork(),
        selection=create_decode_selection(selection, seed=0),
        batch_size=create_batch_size(config.batch_size, base=8, maximum=max_decodes),
        chunk_wait=ChunkWait(config.chunk_overhead, config.min_chunk_tokens, CHUNK_TOKENS),
        max_requests=max_decodes,
        chunk_tokens=CHUNK_TOKENS,
    )


def begin(
    plan,
    *,
    decodes=0,
    due_in_s=math.inf,
    first_due_in_s=math.inf,
    waiting=0,
    waiting_tokens=0,
    endings=(),
    now_s=NOW_S,
):
    shape = BatchShape()
    for _ in range(decodes):
        shape.add_decode(100)
    plan.begin(
        now_s,
        shape,
        decode_due_s=now_s + due_in_s,
        first_due_s=now_s + first_due_in_s,
        num_waiting=waiting,
        waiting_tokens=waiting_tokens,
        endings=tuple(Ending(now_s + in_s, num_left) for in_s, num_left in endings),
    )
    return plan
