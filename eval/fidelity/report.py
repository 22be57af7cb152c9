"""Real figures beside simulated ones: which differences stay within their bounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_sgl.batch_shape import BatchRow, StepKind
from echo_sgl.cli.tuning.calibration import host_gaps
from echo_sgl.estimators.profile import Profile
from echo_sgl.sim.server_config import SpeedChange
from echo_sgl.types import Task
from eval.figures.step_samples import LONGEST, mean_context
from eval.figures.summary import (
    STEADY_CUT,
    class_stats,
    harvest_tokens_per_s,
    steady_window,
    streamed_tokens_per_s,
    tokens_per_s,
)
from eval.load.records import Record

Tree = dict[str, Any]
Span = tuple[float, float]

NUM_RESAMPLES = 1000
BOUNDS = {"tokens/s": 0.05, "hit ratio": 0.05, "p50": 0.10, "p99": 0.20}
_APART_LINES = [
    "- each phase begins as on a new server, without what the last one taught reserve and budget,",
    "  and the job when the server has all of its lines, in their order: which of them are done",
    "  hangs on who came first",
]
_YES = {True: "yes", False: "no", None: "-"}
# A shared machine changes its speed within seconds; fewer steps than that tell little of it.
SPEED_WINDOW_S, MIN_STEPS = 4.0, 8
# A class that hardly shares anything has a hit ratio of noise.
LEAST_HIT_RATIO = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one class in one phase. `bound`: largest share that they may differ by.

    `sim_at_speed`: simulated once more, with steps that take as much longer or shorter than the
    profile says as they really did: what is left is the simulator's own error. `span_at_speed`:
    the least and the largest of these simulations. `real_span`: where 95 % of the figure would
    lie if other requests like these had come (bootstrap), for percentiles.
    """

    arm: str
    phase: str
    task: Task
    figure: str
    real: float | None
    sim: float | None
    bound: float
    sim_at_speed: float | None = None
    span_at_speed: Span | None = None
    real_span: Span | None = None

    @property
    def difference(self) -> float | None:
        """Of the simulated figure, as a share of the real one."""
        return _difference(self.real, self.sim)

    @property
    def is_kept(self) -> bool | None:
        """None where one of the two has no such figure."""
        return _is_within(self.difference, self.bound)

    @property
    def difference_at_speed(self) -> float | None:
        return _difference(self.real, self.sim_at_speed)

    @property
    def is_kept_at_speed(self) -> bool | None:
        return _is_within(self.difference_at_speed, self.bound)


def _difference(real: float | None, sim: float | None) -> float | None:
    if real is None or sim is None:
        return None
    if not real:
        return math.inf if sim else 0.0
    return sim / real - 1.0


def _is_within(difference: float | None, bound: float) -> bool | None:
    return None if difference is None else abs(difference) <= bound


def rows_of_phase(
    arm: str,
    phase: str,
    real: Sequence[Record],
    sims: Sequence[Sequence[Record]],
    window_s: tuple[float, float] | None = None,
    at_speed: Sequence[Sequence[Record]] = (),
) -> Iterator[Row]:
    """Online latencies, the job's speed and hits. `window_s`: when online requests came.

    Of several simulations, each figure's median is held against the real one.
    """
    for task in Task:
        measured = figures_of(real, task, window_s, is_streamed=_is_streamed(real))
        simulated, again = (
            [figures_of(one, task, window_s, is_streamed=_is_streamed(real)) for one in runs]
            for runs in (sims, at_speed)
        )
        if not measured:
            continue
        if (measured.get("hit ratio") or 0.0) < LEAST_HIT_RATIO:
            measured.pop("hit ratio", None)
        for figure, value in measured.items():
            sims_at_speed = _values(again, figure)
            span = (min(sims_at_speed), max(sims_at_speed)) if sims_at_speed else None
            yield Row(
                arm,
                phase,
                task,
                figure,
                real=value,
                sim=_median(_values(simulated, figure)),
                bound=bound_of(figure),
                sim_at_speed=_median(sims_at_speed),
                span_at_speed=span,
                real_span=real_span(real, task, figure),
            )


def real_span(records: Sequence[Record], task: Task, figure: str) -> Span | None:
    """The 95 % bootstrap interval of a latency's percentile, in ms; None for other figures."""
    metric, _, point = figure.removesuffix(" ms").partition(" p")
    if not point:
        return None
    times = (getattr(one, f"{metric.lower()}_s") for one in records if one.task is task)
    times_ms = np.array([time_s * 1000 for time_s in times if time_s is not None])
    if not len(times_ms):
        return None
    drawn = np.random.default_rng(0).choice(times_ms, (NUM_RESAMPLES, len(times_ms)))
    low, high = np.percentile(np.percentile(drawn, float(point), axis=1), (2.5, 97.5))
    return float(low), float(high)


def bound_of(figure: str) -> float:
    """The largest share that real and simulated may differ by."""
    return next(bound for name, bound in BOUNDS.items() if name in figure)


def figures_of(
    records: Sequence[Record],
    task: Task,
    window_s: tuple[float, float] | None,
    *,
    is_streamed: bool,
) -> dict[str, float | None]:
    """The figures of one class in one run; empty where none of its requests came."""
    stats = class_stats(records, task)
    if not stats["requests"]:
        return {}
    if task is Task.OFFLINE:
        speed = _speed(records, window_s, is_streamed=is_streamed)
        return {"tokens/s": speed, "hit ratio": stats["hit_ratio"]}
    latencies = {
        f"{metric.upper()} {point} ms": stats[f"{metric}_ms"][point]
        for metric in ("ttft", "tpot")
        for point in ("p50", "p99")
    }
    return {**latencies, "hit ratio": stats["hit_ratio"]}


def _values(runs: Sequence[dict[str, float | None]], figure: str) -> list[float]:
    return [value for run in runs if (value := run.get(figure)) is not None]


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _is_streamed(records: Sequence[Record]) -> bool:
    return any(one.task is Task.OFFLINE and one.first_token_s is not None for one in records)


def _speed(
    records: Sequence[Record], window_s: tuple[float, float] | None, *, is_streamed: bool
) -> float | None:
    """The job's tokens a second, as they came if the real answers were streamed.

    None where it was over too early to tell.
    """
    if not is_streamed:
        if window_s is None:
            return tokens_per_s(records, *steady_window(records))
        return harvest_tokens_per_s(records, window_s)
    last_s = max(one.end_s or 0.0 for one in records)
    window_s = window_s or (STEADY_CUT * last_s, (1.0 - STEADY_CUT) * last_s)
    return harvest_tokens_per_s(records, window_s, speed=streamed_tokens_per_s)


def step_evidence(profile: Profile, notes: Sequence[Tree]) -> Tree:
    """What real steps took over what the profile says of the same steps, and the host's gaps.

    Tells a profile that did not hold (the machine was slower than when it was calibrated) from
    a simulator that decides otherwise.
    """
    model, host = profile.estimator, profile.host
    real, said = dict.fromkeys(StepKind, 0.0), dict.fromkeys(StepKind, 0.0)
    for note in notes:
        if note["time_s"] is not None:
            row = row_of(note)
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
    """Why a row is out of its bound, with or without the real speed, as far as steps tell."""
    if row.is_kept is not False and row.is_kept_at_speed is not False:
        return ""
    over = (evidence or {}).get("device_over_profile")
    if over is None:
        return "not known: no steps were kept"
    if row.is_kept_at_speed:
        return f"steps took {over:.2f} x what the profile says"
    if _lies_in(row.real, row.span_at_speed):
        return f"chance: simulations span {_spanned(row.span_at_speed)}"
    if _lies_in(row.sim_at_speed, row.real_span):
        return f"chance: of so many requests the real one spans {_spanned(row.real_span)}"
    return "decisions or waits differ"


def _lies_in(value: float | None, span: Span | None) -> bool:
    return value is not None and span is not None and span[0] <= value <= span[1]


def _spanned(span: Span | None) -> str:
    return " to ".join(map(_number, span or ()))


def speed_changes(profile: Profile, notes: Sequence[Tree], start_s: float) -> list[SpeedChange]:
    """How many times longer steps took than the profile says, every `SPEED_WINDOW_S` anew.

    `start_s`: when the phase's clock began. A kind of which few ran in a window has the factor of
    all steps in it; a window without steps goes on as the one before.
    """
    windows: dict[int, list[Tree]] = {}
    for note in notes:
        windows.setdefault(int((note["start_s"] - start_s) // SPEED_WINDOW_S), []).append(note)
    changes = []
    for number, those in sorted(windows.items()):
        evidence = step_evidence(profile, those)
        if all_s := evidence["device_over_profile"]:
            counts = Counter(row_of(note).kind for note in those)
            factors = {
                kind: evidence[f"{kind}_over_profile"] if counts[kind] >= MIN_STEPS else all_s
                for kind in StepKind
            }
            changes.append(SpeedChange(number * SPEED_WINDOW_S, factors))
    return changes


def row_of(note: Tree) -> BatchRow:
    """What a step ran; older runs do not tell how long the longest prefill was."""
    columns = [note[name] for name in BatchRow._fields if name in note]
    row = BatchRow(*columns)
    return row if LONGEST in note else row._replace(max_prefill_tokens=mean_context(columns))


def markdown(
    config: Tree, rows: Sequence[Row], evidence: dict[str, dict[str, Tree]], causes: str = ""
) -> str:
    """summary.md. `evidence`: of each arm's phases; `causes`: text on what was found by hand."""
    kept = [row.is_kept for row in rows if row.is_kept is not None]
    at_speed = [row.is_kept_at_speed for row in rows if row.is_kept_at_speed is not None]
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
        *(_APART_LINES if config["options"].get("phases_apart") else ()),
        "- `at speed`: simulated again with steps (by kind, every few seconds anew) and the host's",
        "  time between them as many times longer as they were; what differs then is the",
        "  simulator's part",
        "- a simulated figure is the median of several, which differ in how steps' times scatter;",
        "  `chance`: the real one lies among them, or their median in the 95 % interval that the",
        "  real percentile has by bootstrap over its requests",
        "- tokens/s: of the job, where answers were streamed as they came to its client: a prompt",
        "  comes with its first token",
        f"- kept: {sum(kept)} of {len(kept)} figures; at speed {sum(at_speed)} of {len(at_speed)}",
        "",
        "| arm | phase | class | figure | real | simulated | difference | bound | kept "
        "| at speed | difference | kept | cause |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row_line(row, evidence.get(row.arm, {}).get(row.phase)) for row in rows]
    lines += ["", *(("## Causes", "", causes) if causes else ()), "## Did the profile hold?", ""]
    lines += [
        "Real time of all steps over what the profile, measured minutes before, says of them.",
        "",
        "| arm | phase | steps | prefill | decode | mixed | all | host between steps "
        "| median gap ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, phases in evidence.items():
        for phase, one in phases.items():
            keys = [f"{kind}_over_profile" for kind in StepKind]
            keys += ["device_over_profile", "host_over_profile", "median_gap_ms"]
            cells = [arm, phase, str(one["num_steps"]), *(_number(one[key]) for key in keys)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _row_line(row: Row, evidence: Tree | None) -> str:
    cells = [row.arm, row.phase, row.task, row.figure, _number(row.real)]
    cells += [_number(row.sim), _share(row.difference), f"{row.bound:.0%}", _YES[row.is_kept]]
    cells += [_number(row.sim_at_speed), _share(row.difference_at_speed)]
    cells += [_YES[row.is_kept_at_speed], cause_of(row, evidence)]
    return f"| {' | '.join(cells)} |"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
