"""The parts of a simulated scheduler that follow from its config alone."""

from __future__ import annotations

import math

from echo_sgl.config import SloConfig
from echo_sgl.estimators.live import LiveBatchTime
from echo_sgl.policies.limits.step_limit import Promise
from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.offline_order import create_offline_order
from echo_sgl.sim.offline_pool import SimOfflinePool
from echo_sgl.sim.server_config import ServerConfig


def offline_pool(config: ServerConfig) -> SimOfflinePool:
    """The pool in the config's order, urgent jobs ahead."""
    offline = config.echo.offline
    order = create_offline_order(
        offline.order, utility_ratio=offline.utility_ratio, seed=offline.seed
    )
    return SimOfflinePool(DeadlineOrder(order))


def live_estimator(config: ServerConfig) -> LiveBatchTime:
    """What the scheduler believes of a step's time; it starts from the device's own model."""
    settings = config.echo.estimator
    return LiveBatchTime(
        config.device,
        quantile=settings.quantile,
        # The model is the device's own: a fit to exact times could only find it again.
        refit_steps=settings.refit_steps if config.noise else 0,
        stale_s=settings.stale_s,
        error=settings.error,
    )


def promise_of(slo: SloConfig) -> Promise:
    """Seconds; infinite where the config promises nothing."""
    return Promise(slo.ttft_s or math.inf, slo.tpot_s or math.inf)
