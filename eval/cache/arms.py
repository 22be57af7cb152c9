"""The arms of the cache experiments and the config files by which Echo's own differ."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_sgl.config import parse_config
from echo_sgl.types import OFFLINE_SERVICE_TIER
from eval.arms import Arm

Sections = Mapping[str, Mapping[str, Any]]


def _echo(**sections: Mapping[str, Any]) -> Arm:
    """Prefix order for the offline job and the given sections of the config."""
    return Arm(
        settings={"offline": {"order": "psm"}, **sections},
        offline_fields={"service_tier": OFFLINE_SERVICE_TIER},
    )


# The reserve is a matter of the burst experiment: elsewhere it would hold memory back from
# the arms whose eviction is compared, at its cold start a quarter of the pool.
_NO_RESERVE = {"predictor": "off"}

CACHE_ARMS: dict[str, Arm] = {
    "stock-fcfs": Arm(args=("--schedule-policy", "fcfs")),
    "stock-lpm": Arm(args=("--schedule-policy", "lpm")),
    "stock-lpm-128": Arm(args=("--schedule-policy", "lpm")),
    "psm": _echo(cache={"order": "stock"}, reserve=_NO_RESERVE),
    "psm-lru": _echo(cache={"order": "lru"}, reserve=_NO_RESERVE),
    "psm-echo": _echo(cache={"order": "echo"}, reserve=_NO_RESERVE),
    "psm-next-use": _echo(cache={"order": "next-use"}, reserve=_NO_RESERVE),
    "reserve-off": _echo(reserve=_NO_RESERVE),
    "reserve-mean-std": _echo(reserve={"predictor": "mean-std"}),
    "reserve-peak": _echo(reserve={"predictor": "peak"}),
}

# SGLang 0.5.23 falls back from lpm to fcfs while more than 128 requests wait.
ARM_WINDOWS = {"stock-lpm-128": 128}


def parse_settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Config sections from texts like `cache.protected_share=0.4`; a word needs no quotes.

    Errors: `ValueError` shows the text that is not of that form.
    """
    sections: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and section and name and value.strip()):
            raise ValueError(f"{text!r} is not of the form section.key=value")
        sections.setdefault(section, {})[name] = _toml_value(value.strip())
    return sections


def with_settings(arm: Arm, changes: Sections) -> Arm:
    """The arm with changed config values; a stock arm has no config and stays as it is.

    Errors: `ConfigError` names the key, its value and what is allowed.
    """
    if not arm.settings:
        return arm
    names = [*arm.settings, *(name for name in changes if name not in arm.settings)]
    settings = {name: {**arm.settings.get(name, {}), **changes.get(name, {})} for name in names}
    parse_config(settings)
    return dataclasses.replace(arm, settings=settings)


def with_config_file(arm: Arm, path: Path) -> Arm:
    """Write the arm's settings to `path`, which the returned arm's server reads."""
    if not arm.settings:
        return arm
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(arm.settings), encoding="utf-8")
    return dataclasses.replace(arm, config=str(path))


def to_toml(sections: Sections) -> str:
    """Sections of strings, numbers and booleans; JSON writes these as TOML does."""
    blocks = []
    for name, values in sections.items():
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        blocks.append("\n".join([f"[{name}]", *lines, ""]))
    return "\n".join(blocks)


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
