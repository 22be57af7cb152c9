"""The arms of the ablation: stock servers, and one arm for each preset with the run's promises.

`echo:steps.place_share=0.5:estimator.quantile=0.9` is an arm too: a preset with other settings.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from echo_sgl.config import resolve_config_path
from echo_sgl.types import OFFLINE_SERVICE_TIER
from eval.arms import ARMS, Arm, pick_arms
from eval.cache.arms import Sections, parse_settings, with_settings
from eval.figures.slo import Slo

PRESETS = ("bs", "bs-e", "bs-e-s", "echo", "hygen", "bros", "ooco")
ERRORS = (-0.10, -0.05, -0.01, 0.0, 0.01, 0.05, 0.10)
BASE_ARM = "stock-priority"
# The stock server without a job, measured in turn with the others: what they are held against.
ALONE_ARM = "alone"
_FILE_NAME = re.compile(r"[\w.:=-]+", re.ASCII)


def preset_arm(name: str, **changes: dict[str, Any]) -> Arm:
    """The packaged preset as settings that can be changed and written to a file."""
    sections = tomllib.loads(resolve_config_path(f"{name}.toml").read_text(encoding="utf-8"))
    arm = Arm(settings=sections, offline_fields={"service_tier": OFFLINE_SERVICE_TIER})
    return with_settings(arm, changes)


def error_arm_name(error: float) -> str:
    return f"error{error:+.0%}".replace("%", "")


def mixed(arm: Arm) -> Arm:
    """The arm on a server whose steps prefill and decode at once."""
    return dataclasses.replace(arm, args=(*arm.args, "--enable-mixed-chunk"))


_COMPARED = {
    "stock": ARMS["stock"],
    BASE_ARM: ARMS[BASE_ARM],
    **{name: preset_arm(name) for name in PRESETS},
}
ABLATION_ARMS: dict[str, Arm] = {
    ALONE_ARM: dataclasses.replace(ARMS["stock"], has_job=False),
    **_COMPARED,
    **{f"{name}-mixed": mixed(arm) for name, arm in _COMPARED.items()},
    **{error_arm_name(error): preset_arm("echo", estimator={"error": error}) for error in ERRORS},
}


def ablation_arms(names: Sequence[str], changes: Sections | None = None) -> dict[str, Arm]:
    """The named arms, in the given order; files are named after them.

    `changes`: of the config of all of them, before what an arm's own name says.
    Errors: `ValueError` names the arm and what is wrong with it; `ConfigError` a setting.
    """
    known = dict(ABLATION_ARMS)
    for name in names:
        base, colon, settings = name.partition(":")
        if base in ABLATION_ARMS:
            arm = with_settings(ABLATION_ARMS[base], changes or {})
            known[name] = _changed(name, arm, settings) if colon else arm
    return pick_arms(names, known)


def _changed(name: str, arm: Arm, settings: str) -> Arm:
    if not arm.settings:
        raise ValueError(f"arm {name!r}: a stock server has no settings of Echo's to change")
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(
            f"arm {name!r} names files: only letters, digits and . : = _ - are allowed"
        )
    sections = parse_settings(settings.split(":"))
    if "slo" in sections:
        raise ValueError(f"arm {name!r}: [slo] is what the run promises; see --slo-factor")
    return with_settings(arm, sections)


def with_promises(arm: Arm, slo: Slo) -> Arm:
    """The arm told what its online users are promised; stock arms have nobody to tell."""
    return with_settings(arm, {"slo": dataclasses.asdict(slo)})
