"""Hold the simulator against real servers: the same requests, figure beside figure.

    python -m eval.fidelity --arms echo,hygen,bs
    python -m eval.fidelity --replay-only
    python -m eval.fidelity --replay-only --folder ablation-azure-qmsum --profile FILE

Runs the ablation's phases on a server of each arm that was calibrated just before, replays what
was sent in `echo_sgl.sim` under the same config and that profile, once as it is and once with the
steps as fast or slow as they were. The job begins when the server has all of its lines, in their
order: which lines are done first hangs on who came first, and hundreds that are sent at once come
in an order that nobody sees. Writes
eval/results/fidelity/ with config.json, configs/, raw/, summary.json and summary.md (with what lies
there as causes.md). `--replay-only` replays what lies in a folder: its own, or an ablation's, whose
servers left no profile (`--profile`).
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import os
import random
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console

from echo_sgl.batch_shape import BatchRow
from echo_sgl.cli.server_route import fetch
from echo_sgl.cli.tuning.calibration import Driver, fit_all
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.profile import Profile, load_profile, save_profile
from echo_sgl.sim.server_config import ServerConfig, SpeedChange
from eval.ablation.figures import reference_figures
from eval.ablation.options import AblationOptions, parse_options
from eval.ablation.phases import PHASES, ArmRun
from eval.ablation.run import Ablation
from eval.arms import Arm
from eval.fidelity.options import (
    DEFAULT_ARMS,
    SETTINGS,
    Load,
    check_load,
    facts_of,
    given_load,
    stored_options,
)
from eval.fidelity.replay import (
    Prompts,
    bodies_of,
    replay,
    server_config,
    with_unfinished,
)
from eval.fidelity.report import (
    Row,
    cause_of,
    markdown,
    rows_of_phase,
    speed_changes,
    step_evidence,
)
from eval.figures.slo import Slo
from eval.load.records import Record, read_records
from eval.paths import RESULTS_DIR
from eval.servers.server import LOCAL, Server, ServerStartError
from eval.workloads import WorkloadError

NOTE_COLUMNS = (*BatchRow._fields, "start_s", "time_s")
CAUSES = "causes.md"  # what was found by hand; goes into the summary as it is
# A figure is the median of so many, which differ in how the times of steps scatter.
NUM_SIMULATIONS = 15

Tree = dict[str, Any]
_console = Console(stderr=True)


class Fidelity(Ablation):
    """An ablation whose servers are calibrated just before they are measured, then simulated.

    Errors: `WorkloadError` names the arms that the simulator does not play.
    """

    def __init__(
        self,
        options: AblationOptions,
        command: str,
        *,
        folder_name: str,
        load: Load | None = None,
        calibrate_s: float = 60.0,
        profile: Path | None = None,
        results_dir: Path = RESULTS_DIR,
    ) -> None:
        check_load(options)
        super().__init__(options, command, results_dir=results_dir, folder_name=folder_name)
        self._load, self._calibrate_s, self._profile = load, calibrate_s, profile
        self._load_average = f"{os.getloadavg()[0]:.1f}"

    @property
    def summary_path(self) -> Path:
        """An ablation's own summary stays beside ours."""
        name = "summary.md" if self._profile is None else "fidelity.md"
        return self.store.folder / name

    def _reference(self, repetition: int) -> tuple[Slo, Tree]:
        """As the ablation measures them on a stock server, unless they are given."""
        if self._load is None or self.store.has("reference", repetition):
            return super()._reference(repetition)
        slo = self._load.slo
        rps = self._load.rate_rps / self.options.online_load
        self.store.write({"rps": rps, "window": 0}, "calibration")
        reference = {**reference_figures([], slo), "attainment": 0.0}
        self.store.write({"slo": dataclasses.asdict(slo), **reference}, "reference", repetition)
        return slo, reference

    def replay_all(self) -> list[Row]:
        """Simulate what was measured, and write the summary."""
        rows: list[Row] = []
        evidence: dict[str, dict[str, Tree]] = {}
        prompts = Prompts(bodies_of(self.mix), self._tokenizer)
        for name, runs in self.store.runs(list(self._arms)).items():
            for repetition in runs:
                arm = name if len(runs) == 1 else f"{name} {repetition}"
                _console.log(f"simulating {arm}")
                steps = self._steps(name, repetition)
                first_s = {phase: self._first_s(name, phase, repetition) for phase in PHASES}
                evidence[arm] = evidence_of(self._profile_of(name, repetition), steps, first_s)
                for row in self._replay(name, repetition, prompts, steps, evidence[arm]):
                    rows.append(dataclasses.replace(row, arm=arm))
        self._write(rows, evidence)
        return rows

    def _replay(
        self,
        name: str,
        repetition: int,
        prompts: Prompts,
        steps: Tree,
        evidence: dict[str, Tree],
    ) -> Iterator[Row]:
        config = server_config(
            self._profile_of(name, repetition),
            self._facts(name, repetition),
            self.store.folder / "configs" / f"{name}-{repetition}.toml",
        )
        options = self.options
        window_s = (options.lead_s, options.lead_s + options.duration_s)
        for phase in PHASES:
            path = self.store.raw_path(f"{name}-{phase}", repetition)
            if not path.exists():
                continue
            real = with_unfinished(read_records(path), prompts)
            came_s = steps.get("online_window_s", window_s)
            window = came_s if phase == "together" else None
            simulated = self._simulate(config, real, prompts)
            again: list[list[Record]] = []
            if (known := evidence.get(phase)) is not None:
                start_s, _ = steps["spans_s"][phase]
                notes = notes_of(steps, phase, self._first_s(name, phase, repetition))
                changes = speed_changes(self._profile_of(name, repetition), notes, start_s)
                again = self._simulate(at_speed(config, known, changes), real, prompts)
            yield from rows_of_phase(name, phase, real, simulated, window, again)

    def _first_s(self, name: str, phase: str, repetition: int) -> float:
        """When the first request of a phase was sent; those that held the job ran before it."""
        path = self.store.raw_path(f"{name}-{phase}", repetition)
        sent_s = [one.sent_s for one in read_records(path) if one.sent_s] if path.exists() else []
        return min(sent_s, default=0.0)

    def _simulate(
        self, config: ServerConfig, real: Sequence[Record], prompts: Prompts
    ) -> list[list[Record]]:
        """What came of the same requests when steps scattered in other ways."""
        seeds = range(NUM_SIMULATIONS)
        return [replay(dataclasses.replace(config, seed=s), real, prompts)[0] for s in seeds]

    def _profile_of(self, name: str, repetition: int) -> Profile:
        path = self._profile or self._profile_path(name, repetition)
        if not path.exists():
            raise WorkloadError(
                f"{self.store.folder} holds no profile of {name}'s server; name one that was "
                "measured on such a server by --profile"
            )
        return load_profile(path, device="", model="", force=True)

    def _facts(self, name: str, repetition: int) -> Tree:
        """What the server said of itself, else what its options made of it."""
        if self.store.has(f"server-{name}", repetition):
            return self.store.read(f"server-{name}", repetition)
        config = orjson.loads((self.store.folder / "config.json").read_bytes())
        return facts_of(self.options, config["server_args"][name], f"{self.store.folder}, {name}")

    def _run_arm(
        self,
        server: Server,
        arm: Arm,
        options: AblationOptions,
        key: tuple[str, int],
        *,
        has_ceiling: bool,
    ) -> ArmRun:
        """Calibrate, run the phases, and keep their steps."""
        self._calibrate_server(server, *key)
        run = super()._run_arm(server, arm, options, key, has_ceiling=has_ceiling)
        seconds = time.monotonic() - run.spans_s[PHASES[0]][0]
        [replica] = fetch(server.url, "/echo/trace", None, seconds=seconds)["replicas"]
        places = [replica["columns"].index(column) for column in NOTE_COLUMNS]
        kept = {
            "online_window_s": run.online_window_s,
            "spans_s": run.spans_s,
            "columns": NOTE_COLUMNS,
            "rows": [[row[place] for place in places] for row in replica["rows"]],
        }
        self._steps_path(*key).write_bytes(gzip.compress(orjson.dumps(kept), mtime=0))
        return run

    def _calibrate_server(self, server: Server, name: str, repetition: int) -> None:
        driver = Driver(server.url, None, random.Random(self.options.seed))
        samples = driver.measure(self._calibrate_s, on_wave=lambda share: None)
        fitted = fit_all(samples, driver.server, seed=self.options.seed, host=driver.host_time())
        save_profile(fitted.profile(), self._profile_path(name, repetition))
        info = LOCAL.get(f"{server.url}/server_info", timeout=30).json()
        facts = {**driver.server, **{key: info[key] for key in SETTINGS}}
        self.store.write(facts, f"server-{name}", repetition)

    def _steps(self, name: str, repetition: int) -> Tree:
        """What is kept of the phases: when they and the online requests were, and the steps."""
        path = self._steps_path(name, repetition)
        if not path.exists():
            return {"notes": []}
        kept: Tree = orjson.loads(gzip.decompress(path.read_bytes()))
        notes = [dict(zip(kept["columns"], row, strict=True)) for row in kept["rows"]]
        return {**kept, "notes": notes}

    def _steps_path(self, name: str, repetition: int) -> Path:
        return self.store.folder / "raw" / f"steps-{name}-{repetition}.json.gz"

    def _profile_path(self, name: str, repetition: int) -> Path:
        return self.store.folder / "raw" / f"profile-{name}-{repetition}.json"

    def _write_summary(self) -> None:
        """Only how it is measured: the figures come with the replay."""
        config = {**self._config(), "load_average": self._load_average}
        self.store.write_json("config.json", config)

    def _write(self, rows: Sequence[Row], evidence: dict[str, dict[str, Tree]]) -> None:
        folder = self.store.folder
        config = orjson.loads((folder / "config.json").read_bytes())
        trees = [
            {
                **dataclasses.asdict(row),
                "difference": row.difference,
                "is_kept": row.is_kept,
                "difference_at_speed": row.difference_at_speed,
                "is_kept_at_speed": row.is_kept_at_speed,
                "cause": cause_of(row, evidence[row.arm].get(row.phase)),
            }
            for row in rows
        ]
        name = self.summary_path.with_suffix(".json").name
        self.store.write_json(name, {"rows": trees, "steps": evidence})
        path = folder / CAUSES
        causes = path.read_text(encoding="utf-8") if path.exists() else ""
        text = markdown(config, rows, evidence, causes)
        self.summary_path.write_text(text, encoding="utf-8")


def evidence_of(profile: Profile, steps: Tree, first_s: Mapping[str, float]) -> dict[str, Tree]:
    """What is known of the steps of each phase that was kept, from so long after its begin."""
    return {
        phase: step_evidence(profile, notes_of(steps, phase, first_s[phase]))
        for phase in steps.get("spans_s", {})
    }


def notes_of(steps: Tree, phase: str, first_s: float) -> list[Tree]:
    """The steps of a phase, from so long after its begin."""
    start_s, end_s = steps["spans_s"][phase]
    return [one for one in steps["notes"] if start_s + first_s <= one["start_s"] < end_s]


def at_speed(config: ServerConfig, evidence: Tree, changes: Sequence[SpeedChange]) -> ServerConfig:
    """The twin of a server whose steps, and the gaps between them, took what was measured."""
    over = evidence["host_over_profile"] or 1.0
    host = config.host
    host = dataclasses.replace(host, step_s=host.step_s * over, request_s=host.request_s * over)
    return dataclasses.replace(config, step_factors=changes, host=host)


def main(argv: list[str]) -> None:
    """Measure and replay, or replay only; ends with code 1 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m eval.fidelity", add_help=False)
    add = parser.add_argument
    add("--folder", default="fidelity", help="under eval/results/")
    add("--calibration-s", type=float, default=60.0, help="each server is calibrated for this long")
    add("--rate-rps", type=float, default=0.0, help="online; 0: from a stock server's saturation")
    add("--promise", default="1.5,0.15", help="TTFT,TPOT in seconds, with --rate-rps")
    add("--replay-only", action="store_true", help="measure nothing, simulate what was")
    add("--profile", type=Path, default=None, help="of `echo-sgl calibrate`, for all arms")
    own, rest = parser.parse_known_args(argv)
    if {"-h", "--help"} & set(rest):
        print(parser.format_help())
    options = parse_options(
        rest,
        prog="python -m eval.fidelity",
        arms=DEFAULT_ARMS,
        repetitions=1,
        ceiling_s=15.0,
        stream_offline=True,
        phases_apart=True,
    )
    command = f"python -m eval.fidelity {shlex.join(argv)}".strip()
    try:
        if options.name:
            raise WorkloadError("--name names an ablation's folder; here it is --folder")
        if own.replay_only:
            options = stored_options(RESULTS_DIR / own.folder, options.arms)
        run = Fidelity(
            options,
            command,
            folder_name=own.folder,
            load=given_load(own.rate_rps, own.promise),
            calibrate_s=own.calibration_s,
            profile=own.profile,
        )
        if not own.replay_only:
            run.run()
        run.replay_all()
    except (WorkloadError, ConfigError, ServerStartError, httpx.HTTPError) as error:
        sys.exit(f"error: {error}")
    print(run.summary_path.read_text(encoding="utf-8"))
    if run.failures:
        sys.exit("error: not measured (try again with --resume): " + "; ".join(run.failures))
