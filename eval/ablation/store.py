"""What an ablation has measured so far, in its results folder; what is there stays there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from echo_sgl.config import load_config, parse_config
from echo_sgl.errors import ConfigError
from eval.ablation.options import AblationOptions
from eval.arms import Arm
from eval.options import flag
from eval.workloads import WorkloadError

Tree = dict[str, Any]

# A run that goes on may have more of these; all else must be as it was.
MAY_CHANGE = {"name", "arms", "repetitions", "rounds", "resume", "ceilings_once", "servers_up"}


class Store:
    """JSON files and records under `raw/` of one results folder, by name and repetition.

    Errors: `WorkloadError` when the folder holds results and `resume` is not asked for, or
    those of another experiment.
    """

    def __init__(self, folder: Path, options: AblationOptions) -> None:
        self.folder = folder
        measured_with = {
            key: value
            for key, value in dataclasses.asdict(options).items()
            if key not in MAY_CHANGE
        }
        if not self.has("calibration"):
            self.write(measured_with, "options")
            return
        if not options.resume:
            raise WorkloadError(
                f"{folder} holds results already; go on with --resume, measure into another "
                "folder, or remove this one"
            )
        self._check(measured_with)

    def _check(self, wanted: Tree) -> None:
        for key, measured in self.read("options").items():
            if wanted.get(key, measured) != measured:
                raise WorkloadError(
                    f"{self.folder} was measured with {flag(key)} {measured!r}, not "
                    f"{wanted[key]!r}; give the same, or measure into another folder"
                )

    def refuse_mixing(
        self, arms: Mapping[str, Arm], repetitions: Sequence[int], now: Mapping[str, str]
    ) -> None:
        """Before more is measured: what is there must be of the same settings and machine.

        `now`: this machine's provenance. Errors: `WorkloadError` says what has changed since.
        """
        done = {name: [one for one in repetitions if self.has(name, one)] for name in arms}
        left = {name: arm for name, arm in arms.items() if len(done[name]) < len(repetitions)}
        if not left:
            return
        for name, arm in left.items():
            first = next(iter(done[name]), 0)  # of one that was not measured there is no config
            path, was_found = self.config_path(name, first), self.has(f"{name}-budget", first)
            if changed := _changed_settings(path, arm, budget_found=was_found):
                raise WorkloadError(
                    f"{self.folder} has runs of {name} with other settings: {', '.join(changed)}; "
                    f"measure into another folder, or remove raw/{name}-*.json and go on"
                )
        for key, value in self.provenance(now).items():
            if key != "date" and value != now[key]:
                raise WorkloadError(
                    f"{self.folder} was measured with {key} {value}, this is {now[key]}; measure "
                    "into another folder"
                )

    def provenance(self, now: Mapping[str, str]) -> dict[str, str]:
        """That of what was measured here; `now` if nothing was."""
        path = self.folder / "config.json"
        known = orjson.loads(path.read_bytes()) if path.exists() else {}
        return {key: known.get(key, value) for key, value in now.items()}

    def config_path(self, name: str, repetition: int) -> Path:
        """Of an arm's server."""
        return self.folder / "configs" / f"{name}-{repetition}.toml"

    def has(self, name: str, repetition: int = 0) -> bool:
        return self._path(name, repetition).exists()

    def read(self, name: str, repetition: int = 0) -> Tree:
        tree: Tree = orjson.loads(self._path(name, repetition).read_bytes())
        return tree

    def write(self, value: Tree, name: str, repetition: int = 0) -> None:
        self.write_json(str(self._path(name, repetition).relative_to(self.folder)), value)

    def write_json(self, name: str, value: Any) -> None:
        """All or nothing: a run that is stopped while it writes leaves the old file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".part")
        scratch.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
        scratch.replace(path)

    def raw_path(self, name: str, repetition: int) -> Path:
        """Where records go."""
        return self.folder / "raw" / f"{name}-{repetition}.jsonl.gz"

    def runs(self, arms: Sequence[str]) -> dict[str, dict[int, Tree]]:
        """The figures of each arm by repetition, as far as they were measured."""
        found: dict[str, dict[int, Tree]] = {}
        for name in arms:
            numbers = (
                path.stem.removeprefix(f"{name}-")
                for path in (self.folder / "raw").glob(f"{name}-*.json")
            )
            repetitions = sorted(int(number) for number in numbers if number.isdigit())
            found[name] = {number: self.read(name, number)["figures"] for number in repetitions}
        return found

    def _path(self, name: str, repetition: int) -> Path:
        stem = f"{name}-{repetition}" if repetition else name
        return self.folder / "raw" / f"{stem}.json"


def _changed_settings(path: Path, arm: Arm, *, budget_found: bool) -> list[str]:
    """Those that an arm would have now and had not, as `section.key then -> now`.

    The promises are those of then: how steps are planned follows from whether there are any. So is
    a budget that was found on the arm's server.
    """
    if not arm.settings or not path.exists():
        return []
    try:
        then = dataclasses.asdict(load_config(str(path)))
    except ConfigError as error:
        return [str(error)]
    sections = {**arm.settings, "slo": then["slo"]}
    if budget_found:
        sections["steps"] = {**sections["steps"], "budget_s": then["steps"]["budget_s"]}
    now = dataclasses.asdict(parse_config(sections))
    return [
        f"{section}.{key} {then[section][key]} -> {value}"
        for section, values in now.items()
        for key, value in values.items()
        if then[section][key] != value
    ]
