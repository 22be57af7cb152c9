"""How much of the online decodes' slack offline work should use: the ablation's loads, simulated.

    python -m eval.slack_use

replays online patterns and their jobs on a simulated CPU server under several settings of the
slack limit, and with predictions that are wrong on purpose (HyGen figure 14), and writes
eval/results/slack-use/ with config.json, summary.json and summary.md. What is promised is the p99
of the online load alone, as stock would run it, times the factors that `eval.ablation` has on a
CPU and on a GPU; and the first once more on a machine that has become slower since. The steps'
times and their scatter come from a profile that `echo-sgl calibrate` measured; no server runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import track

from echo_sgl.config import load_config
from echo_sgl.errors import EchoError
from echo_sgl.estimators.profile import Profile, load_profile
from echo_sgl.types import Task
from eval.ablation.arms import ERRORS
from eval.cache.arms import Sections
from eval.corun.report import table
from eval.figures.summary import tokens_per_s
from eval.options import add_arguments, check_options, option
from eval.paths import CONFIGS_DIR, RESULTS_DIR
from eval.servers.machine import provenance
from eval.simulated.load import (
    CPU_SERVER,
    LEAD_S,
    Load,
    Pattern,
    SimulatedServer,
    latencies,
    with_sections,
    with_slo,
)

LONG = Pattern("azure-qmsum", rate_factor=0.4, length_scale=1.0, max_prompt_tokens=4000)
LOADS = (
    *(Pattern("azure-qmsum", start_s=start_s) for start_s in (0.0, 900.0, 1800.0)),
    *(dataclasses.replace(LONG, start_s=start_s) for start_s in (0.0, 900.0)),
    *(Pattern("bursts-loogle", seed) for seed in range(2)),
    *(Pattern("llm-d", seed, rate_factor=3.0) for seed in range(2)),
)
# SLO over alone p99, TTFT[,TPOT]; how many times longer steps take than when that was measured.
CASES = (("1.5", 1.0), ("1.5", 1.3), ("1.2,1.1", 1.0))
ALONE = "no job at all"
ANY_PLACES = {"place_share": 0.0, "place_gain": 0.0}
ALL = {"slack_share": 1.0, "lag_tokens": 0.0, **ANY_PLACES}
# Name, preset, what is set otherwise in it.
SETTINGS: dict[str, tuple[str, Sections]] = {
    "all of the slack (Echo)": ("echo", {"steps": {**ALL, "ttft_margin": 0.0}}),
    "yielding to first tokens": ("echo", {"steps": ALL}),
    "pace 0.7": ("echo", {"steps": {"slack_pace": 0.7}}),
    "pace 0.5 (echo.toml)": ("echo", {}),
    "pace 0.3": ("echo", {"steps": {"slack_pace": 0.3}}),
    "pace 0.5, no lag": ("echo", {"steps": {"lag_tokens": 0.0}}),
    **{
        f"pace 0.5, share {share:g}": ("echo", {"steps": {"slack_share": share}})
        for share in (0.15, 0.2)
    },
    "pace 0.5, who arrives waits for 0.2 s": ("echo", {"steps": {"max_stall_s": 0.2}}),
    "pace 0.5, however many places": ("echo", {"steps": ANY_PLACES}),
    "pace 0.5, each keeps its place": ("echo", {"steps": {"place_gain": 0.0}}),
    "pace 0.5, half of the places": ("echo", {"steps": {"place_share": 0.5, "place_trend_s": 0.0}}),
    "pace 0.5, no trend of places": ("echo", {"steps": {"place_trend_s": 0.0}}),
    "online chunks cut to the slack": ("echo", {"steps": {"online_chunks": "slack"}}),
    "a budget (hygen.toml)": ("hygen", {}),
    **{
        f"predictions {error:+.0%}": ("echo", {"estimator": {"error": error}})
        for error in ERRORS
        if error
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class SlackOptions:
    """What is simulated."""

    name: str = option("slack-use", "folder under eval/results/ that takes the results")
    profile: str = option("", "from `echo-sgl calibrate`; default: eval/profiles/base-cpu.json")
    rates_rps: str = option("1,1.6", "comma list of mean online rates")
    duration_s: float = option(60.0, "how long online requests keep coming", 1)
    workers: int = option(1, "processes; the results are the same", 1)

    def __post_init__(self) -> None:
        check_options(self)
        for text in self.rates_rps.split(","):
            if not text.replace(".", "", 1).isdigit() or float(text) <= 0:
                raise ValueError(f"--rates-rps holds {text!r}; allowed are numbers above 0")

    @property
    def profile_path(self) -> Path:
        return Path(self.profile) if self.profile else CPU_SERVER.profile

    @property
    def rates(self) -> list[float]:
        return [float(text) for text in self.rates_rps.split(",")]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One load under one setting; `load` is a place in `LOADS`. `slowness`: see `CASES`."""

    rate_rps: float
    load: int
    slo_factor: str
    slowness: float
    setting: str


def run_point(options: SlackOptions, point: Point) -> dict[str, Any]:
    """One row: promises kept and broken, and what the job got while online requests came."""
    load = load_of(options, point.rate_rps, LOADS[point.load])
    slo = load.promise(point.slo_factor)
    preset, sections = SETTINGS.get(point.setting, ("echo", {}))
    echo = with_slo(with_sections(load_config(CONFIGS_DIR / f"{preset}.toml"), sections), slo)
    lines = [] if point.setting == ALONE else load.offline
    records = load.run(echo, [*load.online, *lines], slowness=point.slowness)
    ttft_s, tpot_s = latencies([one for one in records if one.task is Task.ONLINE])
    late, slow = ttft_s > slo.ttft_s, tpot_s > slo.tpot_s
    return {
        **dataclasses.asdict(point),
        "ttft_promise_s": slo.ttft_s,
        "tpot_promise_s": slo.tpot_s,
        "online": len(ttft_s),
        "kept": int((~(late | slow)).sum()),
        "late_first_tokens": int(late.sum()),
        "slow": int(slow.sum()),
        "offline_tokens_per_s": tokens_per_s(records, LEAD_S, LEAD_S + options.duration_s),
    }


@functools.lru_cache(maxsize=1)
def load_of(options: SlackOptions, rate_rps: float, pattern: Pattern) -> Load:
    """Points of the same load follow each other, and share it."""
    server = SimulatedServer(options.profile_path)
    return Load(rate_rps, pattern, duration_s=options.duration_s, server=server)


def points(options: SlackOptions) -> Iterator[Point]:
    for rate_rps in options.rates:
        for load in range(len(LOADS)):
            for case in CASES:
                for setting in (ALONE, *SETTINGS):
                    yield Point(rate_rps, load, *case, setting)


def totals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By rate, promises and setting: requests summed over the loads, tokens/s averaged."""
    found: list[dict[str, Any]] = []
    for key in dict.fromkeys(tuple(row[name] for name in _KEY) for row in rows):
        group = [row for row in rows if tuple(row[name] for name in _KEY) == key]
        summed: Counter[str] = Counter()
        for row in group:
            summed.update({name: row[name] for name in _SUMMED})
        found.append({**dict(zip(_KEY, key, strict=True)), **summed, "loads": len(group)})
    return found


_KEY = ("rate_rps", "slo_factor", "slowness", "setting")
_SUMMED = ("online", "kept", "late_first_tokens", "slow", "offline_tokens_per_s")


def summary_markdown(config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """summary.md."""
    profile = config["profile"]
    cells = [
        [
            f"{one['rate_rps']:g}",
            one["slo_factor"],
            f"{one['slowness']:g}",
            one["setting"],
            f"{one['kept'] / one['online']:.1%}",
            str(one["late_first_tokens"]),
            str(one["slow"]),
            f"{one['offline_tokens_per_s'] / one['loads']:,.0f}",
        ]
        for one in totals(rows)
    ]
    head = [
        "online/s",
        "x alone",
        "slower",
        "setting",
        "kept",
        "late first tokens",
        "slow",
        "offline tokens/s",
    ]
    return "\n".join(
        [
            f"# How much slack to use `{config['name']}`: a simulation",
            "",
            f"    {config['command']}",
            "",
            f"- profile: {profile['device']}, model {profile['model']}, {profile['num_samples']} "
            f"samples, SGLang {profile['sglang_version']}; its scatter is simulated too",
            f"- loads: {', '.join(map(str, LOADS))}; {config['options']['duration_s']:g} s each; "
            "the server is the ablation's",
            "- promised: p99 TTFT and TPOT of the same online load alone, times `x alone`; "
            "`slower`: so many times longer steps take than when that was measured",
            "",
            *table(head, cells),
            "",
        ]
    )


def main(argv: Sequence[str]) -> None:
    """Simulate every point and write the results; wrong options end it with code 2."""
    parser = argparse.ArgumentParser(prog="python -m eval.slack_use")
    add_arguments(parser, SlackOptions, {})
    try:
        options = SlackOptions(**vars(parser.parse_args(argv)))
        profile = load_profile(options.profile_path, device="", model="", force=True)
    except (ValueError, EchoError) as error:
        parser.error(str(error))
    rows = run_all(options)
    config = _config(options, profile, f"python -m eval.slack_use {shlex.join(argv)}".strip())
    folder = RESULTS_DIR / options.name
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": config, "summary.json": {"rows": rows, "totals": totals(rows)}}
    for name, tree in files.items():
        (folder / name).write_bytes(orjson.dumps(tree, option=orjson.OPT_INDENT_2))
    text = summary_markdown(config, rows)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    print(text)


def run_all(options: SlackOptions) -> list[dict[str, Any]]:
    """Every point, in order, whatever the number of workers."""
    todo = list(points(options))
    with ProcessPoolExecutor(options.workers) as pool:
        done = pool.map(
            run_point, [options] * len(todo), todo, chunksize=len(CASES) * (1 + len(SETTINGS))
        )
        return list(track(done, total=len(todo), console=Console(stderr=True)))


def _config(options: SlackOptions, profile: Profile, command: str) -> dict[str, Any]:
    facts = {key: getattr(profile, key) for key in ("device", "model", "num_samples")}
    return {
        "name": options.name,
        "command": command,
        **provenance(),
        "options": dataclasses.asdict(options),
        "loads": [dataclasses.asdict(one) for one in LOADS],
        "settings": {name: {"preset": one, **more} for name, (one, more) in SETTINGS.items()},
        "profile": {**facts, "sglang_version": profile.sglang_version},
    }


if __name__ == "__main__":
    main(sys.argv[1:])
