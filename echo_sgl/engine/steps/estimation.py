"""What a step will take on this server: the live estimator, from its profile or from nothing."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from sglang.srt.runtime_context import get_serving

from echo_sgl.batch_shape import BatchRow, StepKind
from echo_sgl.config import CALIBRATE_ENV, FORCE_PROFILE_ENV, EchoConfig, SloConfig
from echo_sgl.engine.settings import active_config
from echo_sgl.engine.steps.step_timing import NUM_FIRST, StepTimer
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.conformal import Evidence
from echo_sgl.estimators.floor import SloFloor, check_slo, slo_floor
from echo_sgl.estimators.live import LiveBatchTime
from echo_sgl.estimators.profile import Profile, load_profile
from echo_sgl.estimators.roofline_time import RooflineBatchTime, Transformer

logger = logging.getLogger(__name__)

# SGLang's warm-up asks for eight tokens: one prefill and seven decodes. Others end it.
WARM_UP_STEPS, WARM_UP_DECODES = NUM_FIRST, 6


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
    floor = slo_floor(_here(profile.estimator, server), prompt_tokens=1, host=profile.host)
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
    """Tells of promises that are out of reach for everybody, where no profile told it at the start.

    SGLang's warm-up is one request alone: a server that took longer for each of its steps than it
    promises does not start. Else the log says so once, as soon as steps show it.

    `busy_s`: the time that each step since the start was run for, see `StepTimer`. What others that
    start at the same time take of the cores is no floor.
    """

    def __init__(self, slo: SloConfig, *, warms_up: bool, busy_s: Sequence[float] = ()) -> None:
        self._slo, self._busy_s = slo, busy_s
        self._is_done = not any(dataclasses.astuple(slo))
        self._num_left = WARM_UP_STEPS if warms_up and not self._is_done else 0
        self._alone: list[tuple[float, BatchRow]] = []

    @classmethod
    def create(cls, timer: StepTimer) -> FloorWatch:
        """That of the server which is starting."""
        warms_up = not get_serving().skip_server_warmup
        return cls(active_config().slo, warms_up=warms_up, busy_s=timer.first_busy_s)

    def note(self, measured: Iterable[tuple[BatchRow, float]]) -> None:
        """Take in steps that have ended. Errors: `ConfigError` names a promise and the time."""
        for row, time_s in measured if self._num_left else ():
            number = WARM_UP_STEPS - self._num_left
            self._num_left -= 1
            if row.num_decodes == 1 and not row.num_prefills:
                self._alone.append((min([time_s, *self._busy_s[number : number + 1]]), row))
            if len(self._alone) == WARM_UP_DECODES:
                self._num_left = 0
                self._judge(*min(self._alone))
            if not self._num_left:
                return

    def _judge(self, time_s: float, row: BatchRow) -> None:
        # A prompt's step takes no less than one that decodes.
        floor = SloFloor(int(row.max_decode_tokens), ttft_s=time_s, tpot_s=time_s)
        if broken := check_slo(self._slo, floor):
            raise ConfigError(f"by this server's warm-up, {broken}")

    def look(self, now_s: float, estimator: LiveBatchTime) -> None:
        """Compare them, as soon as there are enough steps."""
        kinds = StepKind.PREFILL, StepKind.DECODE
        if self._is_done or any(
            estimator.evidence(kind, now_s) is not Evidence.FRESH for kind in kinds
        ):
            return
        self._is_done = True
        if broken := check_slo(self._slo, slo_floor(estimator, prompt_tokens=1)):
            logger.warning("By the steps until now, %s", broken)


class RefusalWatch:
    """Tells the log why a fit to live steps was refused: of those after one that was not, the first
    that is looked at.
    """

    def __init__(self) -> None:
        self._num_refusals, self._told_after = 0, -1

    def look(self, estimator: LiveBatchTime) -> None:
        """See whether fits were refused since the last look."""
        is_new = estimator.num_refusals > self._num_refusals
        self._num_refusals = estimator.num_refusals
        if is_new and self._told_after != estimator.num_refits:
            self._told_after = estimator.num_refits
            what = "the last fit stays" if estimator.is_ready else "step times stay unknown"
            logger.info("A fit to live steps was refused, %s: %s", what, estimator.last_refusal)
