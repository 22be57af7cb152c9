"""How often the predicted online KV use covers the peak that came, on arrival traces.

    python -m eval.reserve_coverage --trace azure_conv_2023.csv.gz

replays traces through a simple service model, feeds one sample a second to each predictor and
writes eval/results/reserve-coverage/ with config.json, summary.json, curves.json and summary.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from rich.console import Console
from rich.table import Table

from echo_sgl.config import ReserveConfig
from echo_sgl.estimators.kv_demand import KvDemandPredictor, create_kv_demand
from eval.options import folder_name, positive
from eval.paths import RESULTS_DIR
from eval.servers.machine import provenance
from eval.workloads import WorkloadError, find_data
from eval.workloads.traces import Arrival, read_trace

TRACES = ("azure_conv_2023.csv.gz", "mooncake_synthetic_trace.jsonl.gz")
CONFIGS = {
    "peak": ReserveConfig(predictor="peak"),
    "mean-std": ReserveConfig(predictor="mean-std"),
}
FIRST_INSTANT_S = 60
CURVE_STEP_S = 20
COLUMNS = {
    "trace": "trace",
    "predictor": "predictor",
    "instants": "instants",
    "coverage": "peak covered",
    "instant_coverage": "instant covered",
    "over_reservation": "over reserved",
    "mean_reserve": "mean reserve",
}
Series = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceModel:
    """A server that never queues: prefill at a fixed speed, then one token every `tpot_s`.

    A request holds its prompt from arrival on and each token once generated, until its last.
    """

    prefill_tokens_per_s: float = 20_000.0
    tpot_s: float = 0.03


def online_use(arrivals: Sequence[Arrival], model: ServiceModel) -> Series:
    """KV tokens held by all requests, at each whole second up to the last arrival."""
    at_s, prompt, output = np.array(
        [(one.at_s, one.prompt_tokens, one.output_tokens) for one in arrivals], dtype=np.float64
    ).T
    first_s = at_s + prompt / model.prefill_tokens_per_s
    end_s = first_s + output * model.tpot_s
    use = np.zeros(int(at_s[-1]) + 1)
    second = np.ceil(at_s)
    while (live := (second < end_s) & (second < len(use))).any():
        generated = np.clip((second - first_s) / model.tpot_s, 0.0, output)
        np.add.at(use, second[live].astype(np.intp), np.floor(prompt + generated)[live])
        second += 1
    return use


def coverage_row(use: Series, predictor: KvDemandPredictor, *, horizon_s: int) -> dict[str, Any]:
    """Coverage, over-reservation and reserve of one predictor fed with one sample a second.

    Counts every instant from `FIRST_INSTANT_S` on that has a whole horizon ahead; one without a
    prediction counts as not covered, and as a prediction of the present use.

    Errors: `WorkloadError` when no instant is left.
    """
    if len(use) <= FIRST_INSTANT_S + horizon_s:
        raise WorkloadError(
            f"a trace of {len(use)} s leaves no instant to judge: it must be longer than "
            f"{FIRST_INSTANT_S + horizon_s} s (warm-up and horizon)"
        )
    predicted = predictions(use, predictor)
    peaks = np.lib.stride_tricks.sliding_window_view(use[1:], horizon_s).max(axis=1)
    judged = slice(FIRST_INSTANT_S, len(peaks))
    now, following, peaks = use[judged], use[1:][judged], peaks[judged]
    predicted = predicted[judged]
    known = ~np.isnan(predicted)
    predicted = np.where(known, predicted, now)
    return {
        "instants": len(peaks),
        "coverage": float(np.mean(known & (peaks <= predicted))),
        "instant_coverage": float(np.mean(known & (following <= predicted))),
        "over_reservation": float(np.maximum(predicted - peaks, 0).mean() / peaks.mean()),
        "mean_reserve": float(np.maximum(predicted - now, 0).mean() / now.mean()),
    }


def predictions(use: Series, predictor: KvDemandPredictor) -> Series:
    """The predicted peak at each second, that second's sample seen; nan where there is none."""
    predicted = np.full(len(use), np.nan)
    for second, tokens in enumerate(use):
        predictor.observe(float(second), int(tokens))
        tokens_ahead = predictor.predict_peak(float(second))
        if tokens_ahead is not None:
            predicted[second] = tokens_ahead
    return predicted


def evaluate(traces: Iterable[str], model: ServiceModel) -> list[dict[str, Any]]:
    """One row per trace and predictor. Errors: `WorkloadError` names an unusable trace."""
    rows = []
    for name in traces:
        use = online_use(read_trace(find_data(name)), model)
        for predictor_name, config in CONFIGS.items():
            predictor = create_kv_demand(config)
            assert predictor is not None
            row = coverage_row(use, predictor, horizon_s=round(config.horizon_s))
            rows.append(
                {"trace": Path(name).name.partition(".")[0], "predictor": predictor_name, **row}
            )
    return rows


def curves(traces: Iterable[str], model: ServiceModel) -> dict[str, dict[str, list[int | None]]]:
    """By trace: use, the peak that came, and each predictor's, in tokens, every `CURVE_STEP_S`.

    None where nothing was predicted, or the trace does not hold the whole horizon any more.
    """
    found = {}
    for name in traces:
        use = online_use(read_trace(find_data(name)), model)
        horizon_s = round(CONFIGS["peak"].horizon_s)
        coming = np.lib.stride_tricks.sliding_window_view(use[1:], horizon_s).max(axis=1)
        series = {"use": use, "coming peak": coming}
        for predictor_name, config in CONFIGS.items():
            predictor = create_kv_demand(config)
            assert predictor is not None
            series[f"{predictor_name} predicted"] = predictions(use, predictor)
        found[Path(name).name.partition(".")[0]] = {
            label: _thinned(values, len(use)) for label, values in series.items()
        }
    return found


def _thinned(values: Series, length_s: int) -> list[int | None]:
    padded = np.full(length_s, np.nan)
    padded[: len(values)] = values
    return [None if np.isnan(value) else round(value) for value in padded[::CURVE_STEP_S]]


def summary_markdown(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table, with the setting and what each column means."""
    model = config["service_model"]
    lines = [
        f"# Reserve coverage `{config['name']}`",
        "",
        f"    {config['command']}",
        "",
        f"- machine: {config['machine']}; date: {config['date']}",
        f"- service model: prefill {model['prefill_tokens_per_s']:,.0f} tokens/s, "
        f"{model['tpot_s'] * 1000:g} ms per token, no queue, no sharing of prefixes",
        "- predictors at their defaults: peak (coverage "
        f"{CONFIGS['peak'].coverage:g}), mean-std (Echo 5.3, k = {CONFIGS['mean-std'].k:g})",
        "",
        "| " + " | ".join(COLUMNS.values()) + " |",
        "| " + " | ".join("---" for _ in COLUMNS) + " |",
        *("| " + " | ".join(_cells(row)) + " |" for row in rows),
        "",
        f"Judged are all seconds from {FIRST_INSTANT_S} s on with a whole horizon of "
        f"{CONFIGS['peak'].horizon_s:g} s ahead, without any further burn-in; a second without a "
        "prediction counts as not covered. Peak covered: the highest use of the next horizon was "
        "at most the prediction. Instant covered: the use one second later was. "
        "Over reserved: mean of (prediction - peak that came), 0 where negative, in % of the "
        "mean peak. Mean reserve: mean of (prediction - present use) in % of the mean use.",
        "",
    ]
    return "\n".join(lines)


def run(options: argparse.Namespace, *, command: str) -> Path:
    """Evaluate, print the table and write the results folder."""
    model = ServiceModel(options.prefill_tokens_per_s, options.tpot_ms / 1000)
    rows = evaluate(options.trace, model)
    config = {
        "name": options.name,
        "command": command,
        **provenance(),
        "traces": list(options.trace),
        "service_model": dataclasses.asdict(model),
        "predictors": {name: dataclasses.asdict(config) for name, config in CONFIGS.items()},
        "first_instant_s": FIRST_INSTANT_S,
        "curve_step_s": CURVE_STEP_S,
    }
    series = curves(options.trace, model)
    folder: Path = RESULTS_DIR / options.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config", config), ("summary", {"rows": rows})):
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"
        (folder / f"{name}.json").write_bytes(text)
    (folder / "curves.json").write_bytes(orjson.dumps(series) + b"\n")
    (folder / "summary.md").write_text(summary_markdown(config, rows), encoding="utf-8")
    Console().print(_table(rows))
    return folder


def main(argv: list[str]) -> None:
    """Run the evaluation; a wrong input ends with a sentence."""
    parser = argparse.ArgumentParser(prog="python -m eval.reserve_coverage")
    add = parser.add_argument
    add("--trace", nargs="+", default=TRACES, help="CSV or Mooncake .jsonl: path or data set name")
    add("--name", type=folder_name, default="reserve-coverage", help="folder in eval/results/")
    add("--prefill-tokens-per-s", type=positive, default=20_000.0, help="speed of prefill")
    add("--tpot-ms", type=positive, default=30.0, help="time per generated token")
    command = f"python -m eval.reserve_coverage {shlex.join(argv)}".strip()
    try:
        run(parser.parse_args(argv), command=command)
    except WorkloadError as error:
        sys.exit(f"error: {error}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    values = (row[key] for key in COLUMNS)
    return [f"{value:.1%}" if isinstance(value, float) else str(value) for value in values]


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for key, title in COLUMNS.items():
        is_name = key in ("trace", "predictor")
        table.add_column(title, justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        table.add_row(*_cells(row))
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
