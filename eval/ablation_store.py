"""What an ablation has measured so far, in its results folder; what is there stays there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from eval.ablation_options import AblationOptions
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
                f"{folder} holds results already; go on with --resume, give another --name, or "
                "remove the folder"
            )
        self._check(measured_with)

    def _check(self, wanted: Tree) -> None:
        for key, measured in self.read("options").items():
            if wanted.get(key, measured) != measured:
                raise WorkloadError(
                    f"{self.folder} was measured with {flag(key)} {measured!r}, not "
                    f"{wanted[key]!r}; give the same, or another --name"
                )

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
