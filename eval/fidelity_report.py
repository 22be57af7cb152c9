"""Real figures beside simulated ones: which differences stay within their bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_sgl.batch_shape import BatchRow, StepKind
from echo_sgl.cli.calibration import host_gaps
from echo_sgl.estimators.profile import Profile
from echo_sgl.types import Task
from eval.records import Record
from eval.summary import class_stats, harvest_window, steady_window, tokens_per_s

Tree = dict[str, Any]
Figure = tuple[str, Sequence[float | None], float]  # its name, real and simulated, its bound

BOUNDS = {"tokens/s": 0.05, "hit ratio": 0.05, "p50": 0.10, "p99": 0.20}
# A class that hardly shares anything has a hit ratio of noise.
LEAST_HIT_RATIO = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one class in one phase. `bound`: largest share that they may differ by."""

    arm: str
    phase: str
    task: Task
    figure: str
    real: float | None
    sim: float | None
    bound: float

    @property
    def difference(self) -> float | None:
        """Of the simulated figure, as a share of the real one."""
        return None if not self.real or self.sim is None else self.sim / self.real - 1.0

    @property
    def is_kept(self) -> bool | None:
        """None where one of the two has no such figure."""
        return None if self.difference is None else abs(self.difference) <= self.bound


def rows_of_phase(
    arm: str,
    phase: str,
    real: Sequence[Record],
    sim: Sequence[Record],
    window_s: tuple[float, float] | None = None,
) -> Iterator[Row]:
    """Online latencies, the job's speed and hits. `window_s`: when online requests came."""
    for task in Task:
        stats = [class_stats(records, task) for records in (real, sim)]
        if not stats[0]["requests"]:
            continue
        figures = _latencies(stats)
        if task is Task.OFFLINE:
            speeds = [_speed(records, window_s) for records in (real, sim)]
            figures = [("tokens/s", speeds, BOUNDS["tokens/s"])]
        if (stats[0]["hit_ratio"] or 0.0) >= LEAST_HIT_RATIO:
            figures.append(("hit ratio", [one["hit_ratio"] for one in stats], BOUNDS["hit ratio"]))
        for figure, (measured, simulated), bound in figures:
            yield Row(arm, phase, task, figure, measured, simulated, bound)


def _latencies(stats: Sequence[Tree]) -> list[Figure]:
    return [
        (f"{metric.upper()} {point} ms", [one[f"{metric}_ms"][point] for one in stats], bound)
        for metric in ("ttft", "tpot")
        for point, bound in BOUNDS.items()
        if point.startswith("p")
    ]


def _speed(records: Sequence[Record], window_s: tuple[float, float] | None) -> float:
    if window_s is None:
        return tokens_per_s(records, *steady_window(records))
    return tokens_per_s(records, *harvest_window(records, *window_s))


def step_evidence(profile: Profile, notes: Sequence[Tree]) -> Tree:
    """What real steps took over what the profile says of the same steps, and the host's gaps.

    Tells a profile that did not hold (the machine was slower than when it was calibrated) from
    a simulator that decides otherwise.
    """
    model, host = profile.estimator, profile.host
    real, said = dict.fromkeys(StepKind, 0.0), dict.fromkeys(StepKind, 0.0)
    for note in notes:
        if note["time_s"] is not None:
            row = BatchRow(*(note[name] for name in BatchRow._fields))
            real[row.kind] += note["time_s"]
            said[row.kind] += model.predict_s(row)
    gaps = host_gaps(notes)
    host_said_s = sum(host.between_s(count) for count, _ in gaps) if host else 0.0
    return {
        "num_steps": len(notes),
        "device_s": sum(real.values()),
        "device_over_profile": _over(sum(real.values()), sum(said.values())),
        **{f"{kind}_over_profile": _over(real[kind], said[kind]) for kind in StepKind},
        "host_s": sum(gap_s for _, gap_s in gaps),
        "host_over_profile": _over(sum(gap_s for _, gap_s in gaps), host_said_s),
        "median_gap_ms": float(np.median([gap_s for _, gap_s in gaps]) * 1000) if gaps else None,
    }


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def cause_of(row: Row, evidence: Tree | None) -> str:
    """Why a row is out of its bound, as far as the steps' times tell."""
    if row.is_kept is not False:
        return ""
    over = (evidence or {}).get("device_over_profile")
    if over is None:
        return "not known: no steps were kept"
    if row.figure != "hit ratio" and abs(over - 1.0) > row.bound / 2:
        return f"steps took {over:.2f} x what the profile says"
    return "decisions or waits differ"


def markdown(config: Tree, rows: Sequence[Row], evidence: dict[str, Tree]) -> str:
    """summary.md."""
    kept = [row.is_kept for row in rows if row.is_kept is not None]
    lines = [
        "# Fidelity: the simulator against real servers",
        "",
        f"    {config['command']}",
        "",
        f"- machine: {config['machine']}; date: {config['date']}; SGLang {config['sglang']}",
        f"- workload {config['options']['workload']}, model {config['options']['model']}; "
        f"{config['online']['requests']} online requests, {config['offline']['lines']} lines; "
        f"load of the machine when it began: {config.get('load_average', '-')}",
        "- each server is calibrated just before it is measured; the simulator gets the requests",
        "  at the times at which they were sent, the same tokens, the server's config, and that",
        "  profile: the model of its steps, their scatter, and the host's time around them",
        f"- kept: {sum(kept)} of {len(kept)} figures",
        "",
        "| arm | phase | class | figure | real | simulated | difference | bound | kept | cause |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        difference = "-" if row.difference is None else f"{row.difference:+.1%}"
        kept_text = {True: "yes", False: "no", None: "-"}[row.is_kept]
        cells = [row.arm, row.phase, row.task, row.figure, _number(row.real), _number(row.sim)]
        cells += [difference, f"{row.bound:.0%}", kept_text]
        cells.append(cause_of(row, evidence.get(row.arm)))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Did the profile hold?", ""]
    lines += [
        "Real time of all steps over what the profile, measured minutes before, says of them.",
        "",
        "| arm | steps | prefill | decode | mixed | all | host between steps | median gap ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, one in evidence.items():
        keys = [f"{kind}_over_profile" for kind in StepKind]
        keys += ["device_over_profile", "host_over_profile", "median_gap_ms"]
        cells = [arm, str(one["num_steps"]), *(_number(one[key]) for key in keys)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
