"""One TOML file -> frozen dataclasses; every default and every allowed range stands here once."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo_sgl.errors import ConfigError

CONFIG_ENV = "ECHO_SGL_CONFIG"
MAX_POOL_REQUESTS = 1_000_000


def _number(default: float, low: float, high: float) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


def _choice(default: str, *allowed: str) -> Any:
    return field(default=default, metadata={"choices": allowed})


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    """How offline requests wait and in which order they are taken.

    `utility_ratio` is HyGen's u (A.3): the probability that the next request follows the
    prefix order; otherwise the stalest is taken. 0 in `max_running_requests` and
    `max_prefill_tokens_per_step` means: only the server's own limit holds. The latter
    limits offline prefill in steps on which an online request runs or waits.
    """

    order: str = _choice("psm", "psm", "fcfs")
    utility_ratio: float = _number(0.98, 0.0, 1.0)
    seed: int = _number(0, 0, 2**31)
    max_pool_requests: int = _number(50_000, 1, MAX_POOL_REQUESTS)
    max_running_requests: int = _number(0, 0, 1_000_000)
    max_prefill_tokens_per_step: int = _number(0, 0, 10_000_000)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Which cached tokens are evicted first.

    `order`: "stock" leaves SGLang's own tree and eviction in place; "auto" is "next-use" with
    `offline.order` "psm" and "echo" otherwise; all are in `policies/eviction_order.py`. Online
    use of the last `protected_window_s` is protected up to `protected_share` of the KV pool;
    what online requests do not use of it is lent to offline ones.
    """

    order: str = _choice("auto", "auto", "next-use", "echo", "lru", "stock")
    protected_share: float = _number(0.5, 0.0, 1.0)
    protected_window_s: float = _number(300.0, 0.0, 86_400.0)


@dataclass(frozen=True, slots=True)
class ReserveConfig:
    """How much of the KV pool active offline requests leave free for a burst of online ones.

    `predictor`: "mean-std" is Echo's mean + `k` standard deviations of online use over
    `window_s`; "peak" is calibrated on the peaks of the next `horizon_s` that it saw, to
    cover `coverage` of them. Until something was seen, `cold_start_share` of the pool is
    kept free. The reserve is never below `min_tokens` nor above `max_share` of the pool.
    """

    predictor: str = _choice("peak", "peak", "mean-std", "off")
    window_s: float = _number(3600.0, 1.0, 86_400.0)
    horizon_s: float = _number(300.0, 1.0, 3600.0)
    k: float = _number(2.0, 0.0, 100.0)
    coverage: float = _number(0.97, 0.5, 0.999)
    cold_start_share: float = _number(0.25, 0.0, 1.0)
    min_tokens: int = _number(0, 0, 1_000_000_000)
    max_share: float = _number(0.9, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """All that Echo can be told, one section per concern."""

    offline: OfflineConfig = OfflineConfig()
    cache: CacheConfig = CacheConfig()
    reserve: ReserveConfig = ReserveConfig()


def load_config(path: str | os.PathLike[str]) -> EchoConfig:
    """Read a config file.

    Errors: `ConfigError` names the file, the key, the given value and what is allowed.
    """
    file = Path(path)
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"config file {file} cannot be read: {error.strerror}. "
            f"Presets that ship with the package: {', '.join(preset_names())}."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} is not valid TOML: {error}") from error
    try:
        return parse_config(document)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def parse_config(document: Mapping[str, Any]) -> EchoConfig:
    """Build the config from parsed TOML; unknown keys and values out of range are errors."""
    defaults = EchoConfig()
    sections = {item.name: getattr(defaults, item.name) for item in dataclasses.fields(defaults)}
    _reject_unknown(document, sections, "section")
    parsed: dict[str, Any] = {}
    for name, default in sections.items():
        values = document.get(name, {})
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name} is {values!r}; write it as a section: [{name}]")
        parsed[name] = _parse_section(name, default, values)
    return _resolve_cache_order(EchoConfig(**parsed))


def _resolve_cache_order(config: EchoConfig) -> EchoConfig:
    """Replace "auto" by the best order for the offline order; only one knows its next uses."""
    if config.cache.order == "auto":
        order = "next-use" if config.offline.order == "psm" else "echo"
        return dataclasses.replace(config, cache=dataclasses.replace(config.cache, order=order))
    if config.cache.order == "next-use" and config.offline.order != "psm":
        raise ConfigError(
            f"cache.order is 'next-use', which follows the prefix walk of offline.order 'psm', but "
            f"offline.order is {config.offline.order!r}; set cache.order to auto, echo or lru"
        )
    return config


def resolve_config_path(name: str) -> Path:
    """A path as given, or the packaged preset of that name ("echo" or "echo.toml")."""
    given = Path(name)
    preset = _presets_dir() / f"{given.stem}.toml"
    if not given.exists() and given.parent == Path() and preset.exists():
        return preset
    return given.absolute()


def preset_names() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(file.stem for file in _presets_dir().glob("*.toml"))


def _presets_dir() -> Path:
    return Path(__file__).parent / "configs"


def _parse_section(name: str, default: Any, values: Mapping[str, Any]) -> Any:
    fields = {item.name: item for item in dataclasses.fields(default)}
    _reject_unknown(values, fields, "key", f"[{name}] ")
    changes = {key: _checked(f"{name}.{key}", fields[key], values[key]) for key in values}
    return dataclasses.replace(default, **changes)


def _checked(key: str, item: dataclasses.Field[Any], value: Any) -> Any:
    if choices := item.metadata.get("choices"):
        if value not in choices:
            raise ConfigError(f"{key} is {value!r}; allowed are {', '.join(choices)}")
        return value
    wanted: type[int] | type[float] = int if isinstance(item.default, int) else float
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (wanted is int and not isinstance(value, int)):
        raise ConfigError(f"{key} is {value!r}; it must be a {wanted.__name__}")
    low, high = item.metadata["low"], item.metadata["high"]
    if not low <= value <= high:
        raise ConfigError(f"{key} is {value!r}; allowed is {low} to {high}")
    return wanted(value)


def _reject_unknown(
    given: Mapping[str, Any], known: Mapping[str, Any], kind: str, where: str = ""
) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}unknown {kind} {key!r}; known are {', '.join(known)}")
