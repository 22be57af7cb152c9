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
# 1: use a profile that was measured on another device or model.
FORCE_PROFILE_ENV = "ECHO_SGL_FORCE_PROFILE"
# Seconds: measure the server once it is up and write the profile that the config names.
CALIBRATE_ENV = "ECHO_SGL_CALIBRATE_S"
STATE_DIR_ENV = "ECHO_SGL_STATE_DIR"  # the batch service is on when it is set
DATABASE_URL_ENV = "ECHO_SGL_DATABASE_URL"
KEYS_FILE_ENV = "ECHO_SGL_KEYS_FILE"
MAX_POOL_REQUESTS = 1_000_000


def _number(default: float, low: float, high: float) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


def _choice(default: str, *allowed: str) -> Any:
    return field(default=default, metadata={"choices": allowed})


def _switch(default: bool) -> Any:
    return field(default=default, metadata={"choices": (True, False)})


def _text(default: str) -> Any:
    return field(default=default, metadata={"is_text": True})


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
    `offline.order` "psm" and "echo" otherwise; all are in `policies/cache/eviction_order.py`.
    Online use of the last `protected_window_s` is protected up to `protected_share` of the KV pool;
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
    max_share: float = _number(0.25, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class SloConfig:
    """The latency that online requests are promised; 0 names none.

    A request may name its own. It may always ask for more time; `min_ttft_s` and `min_tpot_s`
    are the least that it may ask for, 0 means: no less than `ttft_s` and `tpot_s`.
    """

    ttft_s: float = _number(0.0, 0.0, 3600.0)
    tpot_s: float = _number(0.0, 0.0, 3600.0)
    min_ttft_s: float = _number(0.0, 0.0, 3600.0)
    min_tpot_s: float = _number(0.0, 0.0, 3600.0)


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """How long a step with offline work in it may take, and what it may hold.

    `limit`: "slack" is Echo's, the least time that a running online request has until its
    next token is due; "budget" is HyGen's, `budget_s` for every step with online work, moved
    by the attainment measured against `attainment` while `adapt_budget` is on; "relative"
    needs no SLO: steps take at most `max_inflation` times what the online work in them would
    alone, and what is left of that is kept for later. "auto" is "slack" where both SLOs are
    named and "relative" otherwise; "off" limits nothing.

    A request that arrives waits for the step that runs: no step with offline work is longer than
    `max_stall_s`, or expected to be longer than `stall_share` of what its own prefill, and of
    others that come meanwhile, leave of the TTFT that is promised, see
    `policies/limits/arrival_wait.py`. With "slack", no offline request decodes while an online one
    waits whose first token would come later than `ttft_margin` of its TTFT before it is due; 0 lets
    offline work use all of it. And a step takes `slack_pace` of the TPOT and `slack_share` of the
    slack beyond that, so that online decodes are ahead when an online prefill stops them; a step
    that only prefills may take all that is more than `reserve_tokens` TPOTs of it. A first token
    that would be late may make them fall `lag_tokens` TPOTs behind. Unless `ttft_margin` is 0, a
    decode with few tokens left ends before an online prefill makes it late for good. Where online
    requests hold or wait for two thirds of `place_share` of the server's places
    (`--max-running-requests`), offline work gets less beside them, and nothing from `place_share`
    on; with 0 places do not matter. What is more than their mean over `place_trend_s` counts twice,
    for a burst goes on. Where all are taken, an online decode that is ahead of its due time gives
    its place to an online request that comes too close to its own (`ttft_margin`), and is back when
    it is due: if the other one has it for `place_gain` times what the return takes from all others,
    see `policies/prefills/places.py`; with 0 none does. One whose first token is late lets others
    go first that can be in time, until it is late by `late_wait_s`; with 0 all are served as they
    came. `online_chunks` "whole" prefills online prompts in SGLang's chunks, with decodes between
    them where they are due; "slack" cuts them to what online decodes have left. With
    `split_online`, unless `ttft_margin` is 0, online requests are prefilled in two steps where one
    would make a first token late or compute twice what they share, see
    `policies/prefills/first_tokens.py`.

    `decode_selection` says who sits out when offline decodes do not all fit, see
    `policies/decodes/decode_selection.py`; those are parked, with their KV kept, if `park` is on,
    and all run otherwise; while more than `parked_share` of all that have started are, nobody
    starts. With `replace` the online decode that is due last gives its turn to an
    offline one that found no room, if it is in time nevertheless (BROS), see
    `policies/decodes/replacement.py`. With `pack` online requests go by least slack, and no more of
    them into a step than end in time for who is due first (BROS), see
    `policies/decodes/packing.py`. `batch_size` "adaptive" also limits how many requests a step
    decodes (BROS). Offline prefill chunks below `min_chunk_tokens` wait for a better step, and
    those whose tokens take longer than `1 + chunk_overhead` times what they would in the best chunk
    wait under "slack" while the room for them grows, see `policies/prefills/chunk_wait.py`; not
    with 0. Nor does a limit cut online chunks shorter than that where online requests queue.
    `candidates`: how many requests are weighed for each prefill. `gather` lets them wait while
    there is room for few, until so many start in one prefill step that it pays, see
    `policies/prefills/gathering.py`; `gather_online` does the same for online requests in a long
    queue, as far as first tokens allow. `gate` lets offline ones wait while those that decode make
    more of the time than one more would, its prompt computed as often as such are lost to online
    requests (OOCO), see `policies/prefills/gating.py`.
    """

    limit: str = _choice("auto", "auto", "slack", "budget", "relative", "off")
    budget_s: float = _number(0.05, 0.0, 3600.0)
    adapt_budget: bool = _switch(True)
    attainment: float = _number(0.99, 0.0, 1.0)
    max_inflation: float = _number(1.1, 1.0, 1000.0)
    max_stall_s: float = _number(0.1, 0.0, 3600.0)
    stall_share: float = _number(0.5, 0.0, 1.0)
    ttft_margin: float = _number(0.5, 0.0, 1.0)
    slack_pace: float = _number(0.5, 0.0, 1.0)
    slack_share: float = _number(0.1, 0.0, 1.0)
    reserve_tokens: float = _number(4.0, 0.0, 1000.0)
    lag_tokens: float = _number(4.0, 0.0, 1000.0)
    place_share: float = _number(0.67, 0.0, 1.0)
    place_trend_s: float = _number(10.0, 0.0, 3600.0)
    place_gain: float = _number(3.0, 0.0, 1000.0)
    late_wait_s: float = _number(0.0, 0.0, 3600.0)
    online_chunks: str = _choice("whole", "whole", "slack")
    split_online: bool = _switch(True)
    decode_selection: str = _choice(
        "shortest", "shortest", "in-order", "mix", "bottleneck", "uncached"
    )
    park: bool = _switch(True)
    parked_share: float = _number(0.25, 0.0, 1.0)
    pack: bool = _switch(False)
    replace: bool = _switch(False)
    batch_size: str = _choice("fixed", "fixed", "adaptive")
    min_chunk_tokens: int = _number(64, 1, 1_000_000)
    chunk_overhead: float = _number(0.1, 0.0, 1000.0)
    candidates: int = _number(4, 1, 64)
    gather: bool = _switch(True)
    gather_online: bool = _switch(True)
    gate: bool = _switch(False)


@dataclass(frozen=True, slots=True)
class EstimatorConfig:
    """The model of a step's time that the limit is held against.

    `profile` is a file that `echo-sgl calibrate` wrote; its model then takes the place of
    `model`. Without one the model is fitted to the first live steps. `quantile` of the upper
    band is used; every `refit_steps` steps the model is fitted again, 0 means never. What was
    not observed for `stale_s` is not trusted. `error` makes every prediction wrong by that
    share, for experiments.
    """

    model: str = _choice("pooled", "pooled", "linear", "bros", "roofline")
    profile: str = _text("")
    quantile: float = _number(0.95, 0.01, 0.999)
    refit_steps: int = _number(500, 0, 1_000_000)
    stale_s: float = _number(60.0, 0.0, 86_400.0)
    error: float = _number(0.0, -0.9, 10.0)


@dataclass(frozen=True, slots=True)
class BatchesConfig:
    """Bounds of the batch service; those on files, batches and uploads hold for each API key.

    `window_lines` and `window_tokens` are what the service keeps in the engine at a time, and so
    what a crash computes again, never more than may wait there (`offline.max_pool_requests`); a
    line counts once for each answer that it asks for. `max_line_attempts` bounds replies that
    broke (5xx), and refusals (429, 503) only of a line that is refused each time while others are
    answered, or for what does not pass. `infeasible` "refuse" turns a batch away whose window the
    measured rate misses.
    """

    window_lines: int = _number(256, 1, 50_000)
    window_tokens: int = _number(1_000_000, 1, 1_000_000_000)
    max_line_attempts: int = _number(5, 1, 1000)
    max_lines: int = _number(50_000, 1, 1_000_000)
    max_file_bytes: int = _number(209_715_200, 1, 100_000_000_000)
    max_files: int = _number(10_000, 1, 1_000_000_000)
    max_stored_bytes: int = _number(100_000_000_000, 1, 10**15)
    max_open_batches: int = _number(100, 1, 100_000)
    max_uploads_per_minute: int = _number(60, 1, 1_000_000)
    file_days: float = _number(30.0, 0.01, 3650.0)
    infeasible: str = _choice("accept", "accept", "refuse")


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """All that Echo can be told, one section per concern."""

    offline: OfflineConfig = OfflineConfig()
    cache: CacheConfig = CacheConfig()
    reserve: ReserveConfig = ReserveConfig()
    slo: SloConfig = SloConfig()
    steps: StepsConfig = StepsConfig()
    estimator: EstimatorConfig = EstimatorConfig()
    batches: BatchesConfig = BatchesConfig()


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
    _check_slo(parsed["slo"])
    return _resolve_limit(_resolve_cache_order(EchoConfig(**parsed)))


def _check_slo(slo: SloConfig) -> None:
    """A request may always ask for more time than is promised."""
    for name in ("ttft_s", "tpot_s"):
        promised_s, least_s = getattr(slo, name), getattr(slo, f"min_{name}")
        if 0.0 < promised_s < least_s:
            raise ConfigError(
                f"slo.min_{name} is {least_s}, above slo.{name}, {promised_s}; it is the least "
                "that a request may ask for itself, so it can be at most the promise"
            )


def _resolve_limit(config: EchoConfig) -> EchoConfig:
    """Replace "auto" by the limit that the promises allow, and check that they are there."""
    slo, steps = config.slo, config.steps
    has_slo = slo.ttft_s > 0 and slo.tpot_s > 0
    if steps.limit == "auto":
        limit = "slack" if has_slo else "relative"
        return dataclasses.replace(config, steps=dataclasses.replace(steps, limit=limit))
    if steps.limit == "budget" and not steps.budget_s:
        raise ConfigError(
            "steps.budget_s is 0.0 with steps.limit 'budget'; it must be above 0, or nothing ever "
            "runs beside online requests. `echo-sgl budget` finds the largest that keeps an SLO"
        )
    if steps.limit == "slack" and not has_slo:
        raise ConfigError(
            f"steps.limit is 'slack', which needs both promises, but slo.ttft_s is {slo.ttft_s} "
            f"and slo.tpot_s is {slo.tpot_s}; name both, or set steps.limit to relative or budget"
        )
    return config


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
    preset = given.name.removesuffix(".toml")
    if not given.is_file() and given.parent == Path() and preset in preset_names():
        return _presets_dir() / f"{preset}.toml"
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
        # A TOML 1 is not true: equality alone would let it pass.
        if value not in choices or type(value) is not type(item.default):
            allowed = ", ".join(str(one).lower() for one in choices)
            raise ConfigError(f"{key} is {value!r}; allowed are {allowed}")
        return value
    if item.metadata.get("is_text"):
        if not isinstance(value, str):
            raise ConfigError(f"{key} is {value!r}; it must be a text")
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
