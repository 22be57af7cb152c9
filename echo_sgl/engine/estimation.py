"""What a step will take on this server: the live estimator, from its profile or from nothing."""

from __future__ import annotations

import logging
import os
from typing import Any

from echo_sgl.batch_shape import StepKind
from echo_sgl.config import CALIBRATE_ENV, FORCE_PROFILE_ENV, EchoConfig, SloConfig
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.conformal import Evidence
from echo_sgl.estimators.floor import check_slo, slo_floor
from echo_sgl.estimators.live import LiveBatchTime
from echo_sgl.estimators.profile import Profile, load_profile
from echo_sgl.estimators.roofline_time import RooflineBatchTime, Transformer

logger = logging.getLogger(__name__)


def create_live_batch_time(config: EchoConfig, server: dict[str, Any]) -> LiveBatchTime:
    """The estimator of this server; `server` holds its `server_facts`.

    Errors: `ConfigError` when the profile is for another device or model, when a promise is below
    what it says an idle server reaches (neither if `ECHO_SGL_FORCE_PROFILE` is 1), or when the
    model that the config names cannot be built for this server.
    """
    estimator = config.estimator
    # A server that is about to write the profile starts without the one that it replaces.
    is_profiled = bool(estimator.profile) and not os.environ.get(CALIBRATE_ENV)
    profile = _profile(config, server) if is_profiled else None
    return LiveBatchTime(
        _new_model(config, server) if profile is None else _here(profile.estimator, server),
        quantile=estimator.quantile,
        refit_steps=estimator.refit_steps,
        stale_s=estimator.stale_s,
        error=estimator.error,
        calibrated=None if profile is None else profile.largest_step,
    )


def _profile(config: EchoConfig, server: dict[str, Any]) -> Profile:
    path = config.estimator.profile
    is_forced = os.environ.get(FORCE_PROFILE_ENV, "0") not in ("", "0")
    names = ("device", "model", "num_ranks", "weights", "transformer")
    facts = {name: server[name] for name in names}
    profile = load_profile(path, **facts, force=is_forced)
    # A promise that even the shortest prompt breaks is none.
    floor = slo_floor(_here(profile.estimator, server), prompt_tokens=1)
    if broken := check_slo(config.slo, floor):
        if not is_forced:
            raise ConfigError(f"by the profile {path}, {broken}")
        logger.warning("By the profile %s, which is not this server's, %s", path, broken)
    return profile


def _here(measured: BatchTimeModel, server: dict[str, Any]) -> BatchTimeModel:
    """The profile's model, for the graphs of this start of the server."""
    assert measured.coefficients_ is not None, "a profile holds a fitted model"
    return create_batch_time(
        measured.NAME,
        captured_batch_sizes=server["captured_batch_sizes"],
        transformer=measured.transformer if isinstance(measured, RooflineBatchTime) else None,
    ).with_coefficients(measured.coefficients_)


def _new_model(config: EchoConfig, server: dict[str, Any]) -> BatchTimeModel:
    name, sizes = config.estimator.model, server["transformer"]
    if name == RooflineBatchTime.NAME and not sizes:
        raise ConfigError(
            f"estimator.model is {name!r}, which counts FLOPs and bytes, but the config of "
            f"{server['model']} does not tell its sizes; set estimator.model to pooled"
        )
    return create_batch_time(
        name,
        captured_batch_sizes=server["captured_batch_sizes"],
        transformer=Transformer(**sizes) if sizes else None,
    )


class FloorWatch:
    """Says once in the log when steps show that a promise is out of reach for everybody.

    Without a profile nothing is known of that when the server starts.
    """

    def __init__(self, slo: SloConfig, estimator: LiveBatchTime) -> None:
        self._slo, self._estimator = slo, estimator
        self._is_done = not (slo.ttft_s or slo.tpot_s)

    def look(self, now_s: float) -> None:
        """Compare them, as soon as there are enough steps."""
        kinds = StepKind.PREFILL, StepKind.DECODE
        if self._is_done or any(
            self._estimator.evidence(kind, now_s) is not Evidence.FRESH for kind in kinds
        ):
            return
        self._is_done = True
        if broken := check_slo(self._slo, slo_floor(self._estimator, prompt_tokens=1)):
            logger.warning("By the steps until now, %s", broken)
