"""Fitted batch-time models as files: small, readable, and only for what they were measured on."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from echo_sgl.batch_shape import BatchRow, StepKind
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.held_out import StepError
from echo_sgl.estimators.host_time import HostTime
from echo_sgl.estimators.roofline_time import RooflineBatchTime, Transformer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted model and where it comes from.

    `device` and `model` are the accelerator's and the language model's names, `date` is ISO
    8601; `errors` were measured on steps that the fit did not see. `largest_step`: the highest
    value of each column of `BatchRow` among the measured steps. `host`: what the server takes
    beside its device. `num_ranks` devices share each layer (tensor parallel), whose weights are of
    the type and quantization `weights` and of the sizes `transformer`, per rank. All of these are
    None in older files.
    """

    device: str
    model: str
    sglang_version: str
    date: str
    num_samples: int
    errors: Mapping[StepKind, StepError]
    estimator: BatchTimeModel
    largest_step: dict[str, int] | None = None
    host: HostTime | None = None
    num_ranks: int | None = None
    weights: str | None = None
    transformer: dict[str, int] | None = None


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON; floats are written so that they read back equal.

    Errors: `ValueError` when its estimator was not fitted or an error figure is not finite.
    """
    estimator = profile.estimator
    if estimator.coefficients_ is None:
        raise ValueError(f"model {estimator.NAME} has no coefficients to save; fit it first")
    document = {item.name: getattr(profile, item.name) for item in dataclasses.fields(profile)}
    document["errors"] = {kind: dataclasses.asdict(one) for kind, one in profile.errors.items()}
    document["estimator"] = {
        "name": estimator.NAME,
        "captured_batch_sizes": estimator.captured_batch_sizes,
        "coefficients": estimator.coefficients_,
    }
    if isinstance(estimator, RooflineBatchTime):
        document["estimator"]["transformer"] = dataclasses.asdict(estimator.transformer)
    if profile.host is not None:
        document["host"] = dataclasses.asdict(profile.host)
    document = {name: value for name, value in document.items() if value is not None}
    text = json.dumps(document, indent=2, allow_nan=False)
    # A server that starts meanwhile reads the old file or the new one, never half of one.
    file = Path(path)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.new")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(file)


def replaced_profile(path: str | os.PathLike[str]) -> Profile | None:
    """The profile that writing to this path would replace; None when there is no file.

    Errors: `ConfigError` when there is a file that is no profile, or no folder to write to.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise ConfigError(f"profile {file} is in a folder that does not exist; make it first")
    if not file.exists():
        return None
    try:
        return load_profile(file, device="", model="", force=True)
    except ConfigError as error:
        raise ConfigError(f"{error}. It is left as it is; choose another file") from error


def load_profile(
    path: str | os.PathLike[str],
    *,
    device: str,
    model: str,
    num_ranks: int | None = None,
    weights: str | None = None,
    transformer: Mapping[str, int] | None = None,
    force: bool = False,
) -> Profile:
    """Read a profile for this device and language model; `force` takes one for others too.

    What the caller or the file does not tell (None) is not compared.

    Errors: `ConfigError` names the file, the field, the given value and what is allowed.
    """
    file = Path(path)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"profile {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"profile {file} is not valid JSON: {error}") from error
    try:
        profile = _parse(_Table("profile", document))
        if not force:
            _require_same("device", profile.device, device)
            _require_same("model", profile.model, model)
            known = {"num_ranks": num_ranks, "weights": weights, "transformer": transformer}
            for field, here in known.items():
                measured = getattr(profile, field)
                if None not in (measured, here):
                    _require_same(field, measured, here)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return profile


def _require_same(field: str, measured: object, here: object) -> None:
    if measured != here:
        raise ValueError(
            f"{field} is {measured!r} and this server's is {here!r}; its times say nothing "
            "here. Calibrate this server, or use the profile anyway with --force-profile"
        )


class _Table:
    """A JSON object whose fields are taken one by one; what is left over at the end is wrong."""

    def __init__(self, name: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"{name} is {values!r}; it must be a table of fields")
        self._prefix, self._left = "" if name == "profile" else f"{name}.", dict(values)

    def __contains__(self, field: str) -> bool:
        return field in self._left

    def take(self, field: str, kind: type[T], *, signed: bool = False) -> T:
        """The field's value, of this type. Errors: `ValueError` names field and value."""
        value = self._left.pop(field, None)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{self._prefix}{field} is {value!r}; it must be a {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self._prefix}{field} is {value!r}; it must be finite")
        if isinstance(value, int | float) and value < 0 and not signed:
            raise ValueError(f"{self._prefix}{field} is {value!r}; it must be at least 0")
        return value

    def table(self, field: str) -> _Table:
        return _Table(self._prefix + field, self.take(field, dict))

    def all(self, kind: type[T]) -> dict[str, T]:
        return {field: self.take(field, kind) for field in list(self._left)}

    def close(self) -> None:
        if self._left:
            names = ", ".join(self._prefix + field for field in sorted(self._left))
            raise ValueError(f"{names} is not known; remove it, or update echo-sgl")


def _parse(table: _Table) -> Profile:
    texts = {name: table.take(name, str) for name in ("device", "model", "sglang_version", "date")}
    try:
        date.fromisoformat(texts["date"])
    except ValueError as error:
        raise ValueError(f"date is {texts['date']!r}; write it as 2026-01-31") from error
    profile = Profile(
        **texts,
        num_samples=table.take("num_samples", int),
        errors=_errors(table.table("errors")),
        estimator=_estimator(table.table("estimator")),
        largest_step=_largest_step(table) if "largest_step" in table else None,
        host=_host(table.table("host")) if "host" in table else None,
        num_ranks=table.take("num_ranks", int) if "num_ranks" in table else None,
        weights=table.take("weights", str) if "weights" in table else None,
        transformer=table.table("transformer").all(int) if "transformer" in table else None,
    )
    table.close()
    return profile


def _largest_step(table: _Table) -> dict[str, int]:
    largest = table.table("largest_step").all(int)
    if unknown := set(largest) - set(BatchRow._fields):
        raise ValueError(f"largest_step.{min(unknown)} is not known; a step has {BatchRow._fields}")
    return largest


def _host(table: _Table) -> HostTime:
    fields = dataclasses.fields(HostTime)
    # Older profiles have none of what has a default.
    known = [one.name for one in fields if one.default is dataclasses.MISSING or one.name in table]
    host = HostTime(**{name: table.take(name, float) for name in known})
    table.close()
    return host


def _errors(table: _Table) -> dict[StepKind, StepError]:
    errors = {}
    for kind in StepKind:
        if kind in table:
            one = table.table(kind)
            errors[kind] = StepError(
                num_steps=one.take("num_steps", int),
                mape=one.take("mape", float),
                p95=one.take("p95", float),
                bias=one.take("bias", float, signed=True),
            )
            one.close()
    table.close()
    return errors


def _estimator(table: _Table) -> BatchTimeModel:
    name = table.take("name", str)
    sizes = table.take("captured_batch_sizes", list)
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"estimator.captured_batch_sizes is {sizes!r}; it must hold whole numbers")
    transformer = None
    if name == RooflineBatchTime.NAME:
        transformer = _transformer(table.table("transformer"))
    coefficients = table.table("coefficients").all(float)
    table.close()
    model = create_batch_time(name, captured_batch_sizes=sizes, transformer=transformer)
    return model.with_coefficients(coefficients)


def _transformer(table: _Table) -> Transformer:
    sizes = {item.name: table.take(item.name, int) for item in dataclasses.fields(Transformer)}
    table.close()
    return Transformer(**sizes)
