"""What a step will take on this server: the live estimator, from its profile or from nothing."""

from __future__ import annotations

import os
from typing import Any

from echo_sgl.config import CALIBRATE_ENV, FORCE_PROFILE_ENV, EchoConfig, SloConfig
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.floor import check_slo, slo_floor
from echo_sgl.estimators.live import LiveBatchTime
from echo_sgl.estimators.profile import load_profile
from echo_sgl.estimators.roofline_time import RooflineBatchTime, Transformer


def create_live_batch_time(config: EchoConfig, server: dict[str, Any]) -> LiveBatchTime:
    """The estimator of this server; `server` holds its `server_facts`.

    Errors: `ConfigError` when the profile is for another device or model (unless
    `ECHO_SGL_FORCE_PROFILE` is 1), when a promise is below what it says an idle server
    reaches, or when the model that the config names cannot be built for this server.
    """
    estimator = config.estimator
    # A server that is about to write the profile starts without the one that it replaces.
    is_profiled = bool(estimator.profile) and not os.environ.get(CALIBRATE_ENV)
    return LiveBatchTime(
        _profiled_model(config, server) if is_profiled else _new_model(config, server),
        quantile=estimator.quantile,
        refit_steps=estimator.refit_steps,
        stale_s=estimator.stale_s,
        error=estimator.error,
    )


def _profiled_model(config: EchoConfig, server: dict[str, Any]) -> BatchTimeModel:
    """The profile's model, for the graphs of this start of the server."""
    path = config.estimator.profile
    is_forced = os.environ.get(FORCE_PROFILE_ENV, "0") not in ("", "0")
    device, model = server["device"], server["model"]
    measured = load_profile(path, device=device, model=model, force=is_forced).estimator
    assert measured.coefficients_ is not None, "a profile holds a fitted model"
    fitted = create_batch_time(
        measured.NAME,
        captured_batch_sizes=server["captured_batch_sizes"],
        transformer=measured.transformer if isinstance(measured, RooflineBatchTime) else None,
    ).with_coefficients(measured.coefficients_)
    _refuse_unreachable(config.slo, fitted, path)
    return fitted


def _refuse_unreachable(slo: SloConfig, model: BatchTimeModel, path: str) -> None:
    """A promise that even the shortest prompt breaks is none."""
    if broken := check_slo(slo, slo_floor(model, prompt_tokens=1)):
        raise ConfigError(f"by the profile {path}, {broken}")


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
