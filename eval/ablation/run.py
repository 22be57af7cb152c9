"""Compare schedulers under promises: stock servers, Echo's stages, and other systems' policies.

    python -m eval.ablation --workload azure-qmsum --arms stock,stock-priority,echo
    python -m eval.ablation --workload bursts-loogle --name long --resume

The stock server's saturation is measured first and gives the online rate. In each repetition
the stock server's latencies alone give the promises, which each arm's config then names.
Writes eval/results/ablation-NAME/ with config.json, configs/, raw/, summary.json and
summary.md after every arm, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console

from eval.ablation.arms import with_promises
from eval.ablation.budget import find_arm_budget, wants_budget
from eval.ablation.figures import ceiling_figures, reference_figures, run_figures, summarise
from eval.ablation.load import (
    build_mix,
    calibration_requests,
    calibration_window,
    check_inputs,
    in_flight,
)
from eval.ablation.options import AblationOptions, parse_options
from eval.ablation.phases import PHASES, ArmRun, run_arm, run_reference
from eval.ablation.report import summary_markdown
from eval.ablation.store import Store
from eval.arms import ARMS, Arm
from eval.cache.arms import with_config_file, with_settings
from eval.corun.phases import empty_cache
from eval.figures.deadlines import deadlines_of
from eval.figures.slo import Slo, attainment, derive_slo, parse_factors
from eval.load.mix import SERVED_MODEL, Mix
from eval.load.records import Record, write_records
from eval.load.saturation import saturate, saturation_rps
from eval.paths import LOGS_DIR, RESULTS_DIR
from eval.servers.machine import device_args, on_cpu, probe_s, provenance
from eval.servers.models import find_model
from eval.servers.server import Server, ServerStartError, start_server, stop_server, wait_ready
from eval.workloads import WorkloadError
from eval.workloads.prompts import load_tokenizer

Tree = dict[str, Any]

STOCK = ARMS["stock"]
CPU_SLO_FACTORS, GPU_SLO_FACTORS = (1.5, 1.5), (1.2, 1.1)

_console = Console(stderr=True)


def main(argv: list[str]) -> None:
    """Run the ablation; ends with code 1 for wrong input and when an arm could not be measured."""
    options = parse_options(argv, prog="python -m eval.ablation")
    run_and_print(options, f"python -m eval.ablation {shlex.join(argv)}".strip())


def run_and_print(options: AblationOptions, command: str) -> None:
    """Measure and print; what went wrong is the end of the process, with code 1."""
    try:
        ablation = Ablation(options, command)
        ablation.run()
    except (WorkloadError, ServerStartError, httpx.HTTPError) as error:
        sys.exit(f"error: {error}")
    print((ablation.store.folder / "summary.md").read_text(encoding="utf-8"))
    if ablation.failures:
        sys.exit("error: not measured (try again with --resume): " + "; ".join(ablation.failures))


def server_args(options: AblationOptions, arm: Arm) -> tuple[str, ...]:
    """Arguments of one arm's server; options of 0 are left to the server."""
    limits = {
        "--max-total-tokens": options.pool_tokens,
        "--max-running-requests": options.max_running_requests,
        "--chunked-prefill-size": options.chunked_prefill_size,
    }
    args = ["--served-model-name", SERVED_MODEL, "--enable-cache-report", "--enable-metrics"]
    args += ["--random-seed", str(options.seed)]
    for flag, value in limits.items():
        args += [flag, str(value)] if value else []
    return (*device_args(), *args, *shlex.split(options.server_args), *arm.args)


class Ablation:
    """One run: what was measured lies in `store`, and is not measured again."""

    def __init__(
        self,
        options: AblationOptions,
        command: str,
        *,
        results_dir: Path = RESULTS_DIR,
        folder_name: str = "",
    ) -> None:
        self.options = options
        self.store = Store(results_dir / (folder_name or options.folder_name), options)
        self.failures: list[str] = []
        self._command = command
        self._arms = options.picked_arms()
        self._model, self._load_args = find_model(options.model)
        self._tokenizer = load_tokenizer(self._model)
        default = CPU_SLO_FACTORS if on_cpu() else GPU_SLO_FACTORS
        self._factors = parse_factors(options.slo_factor) if options.slo_factor else default

    def run(self) -> None:
        """Measure what the store does not hold; an arm that fails is noted and passed over."""
        _console.log(f"about {self.options.estimate_s() / 60:.0f} minutes at most")
        check_inputs(self.options, self._tokenizer)
        end = self.options.repetitions + 1
        self.store.refuse_mixing(self._arms, range(1, end), provenance())
        for first in range(1, end, self.options.rounds):
            slo, reference = self._reference(first)
            self._measure_all(range(first, min(first + self.options.rounds, end)), slo, reference)
        self._write_summary()

    def _measure_all(self, numbers: range, slo: Slo, reference: Tree) -> None:
        """Every arm in these repetitions, on the same servers and with the same promises."""
        names = in_order(list(self._arms), numbers[0])
        left = [name for name in names if not all(self.store.has(name, one) for one in numbers)]
        size = self.options.servers_up
        for start in range(0, len(left), size):
            group = left[start : start + size]
            _console.log(f"repetitions {numbers[0]} to {numbers[-1]}: {group}")
            with self._servers(group, numbers, slo) as servers:
                for round_number, repetition in enumerate(numbers, 1):
                    for name in in_order(list(servers), round_number):
                        if not self.store.has(name, repetition):
                            self._noted(
                                name, repetition, self._measure, *servers[name], slo, reference
                            )
                            self._write_summary()

    def _noted(self, name: str, repetition: int, work: Callable[..., None], *args: Any) -> bool:
        """Whether an arm could do it; what went wrong is noted, and the run goes on."""
        try:
            work(name, repetition, *args)
        except (ServerStartError, httpx.HTTPError) as error:
            self.failures.append(f"{name} {repetition}: {str(error)[:200]}")
            _console.log(f"  {error}", markup=False)
            return False
        return True

    @functools.cached_property
    def mix(self) -> Mix:
        """Both loads at the measured rate."""
        mix = build_mix(self.options, self._tokenizer, self.store.read("calibration")["rps"])
        # The prompts live as long as the run: a collector that walks them would delay sending.
        gc.collect()
        gc.freeze()
        return mix

    def _reference(self, repetition: int) -> tuple[Slo, Tree]:
        """What is promised in this repetition, and the stock server's own figures alone."""
        if not self.store.has("reference", repetition):
            _console.log(f"repetition {repetition}: the stock server alone")
            with self._server(STOCK, "reference", repetition) as server:
                if not self.store.has("calibration"):
                    self._calibrate(server)
                num = self.options.references
                runs = [run_reference(server, STOCK, self.mix, self.options) for _ in range(num)]
                probed_s = probe_s()
            slo, records, again = best_reference(runs, self._factors)
            write_records(self.store.raw_path("reference-online-alone", repetition), records)
            measured = {
                "slo": dataclasses.asdict(slo),
                **reference_figures(records, slo),
                "again": again,
                "probe_s": probed_s,
            }
            self.store.write(measured, "reference", repetition)
        reference = self.store.read("reference", repetition)
        return Slo(**reference["slo"]), reference

    def _calibrate(self, server: Server) -> None:
        requests = calibration_requests(self.options, self._tokenizer)
        window = calibration_window(self.options)
        empty_cache(server)
        limit_s = self.options.calibrate_s
        records = asyncio.run(saturate(server, requests, window=window, limit_s=limit_s))
        rps = saturation_rps(records)
        _console.log(f"  saturates at {rps:.2f} online requests/s")
        self.store.write({"rps": rps, "window": window}, "calibration")

    @contextmanager
    def _servers(
        self, names: Sequence[str], numbers: range, slo: Slo
    ) -> Iterator[dict[str, tuple[Arm, Server]]]:
        """The servers of these arms, started at once, all ready; without those that failed."""
        started_s, servers = time.monotonic(), {}
        with ExitStack() as stack:
            for name in names:
                promised = self._promised(name, slo, numbers[0])
                for number in (one for one in reversed(numbers) if not self.store.has(name, one)):
                    arm = with_config_file(promised, self.store.config_path(name, number))
                server = self._start(arm, name, numbers[0])
                stack.callback(stop_server, server)
                servers[name] = arm, server
            ready = {
                name: (arm, server)
                for name, (arm, server) in servers.items()
                if self._noted(name, numbers[0], lambda *_, server=server: wait_ready(server))
            }
            _console.log(f"  ready after {time.monotonic() - started_s:.0f} s")
            yield ready

    def _promised(self, name: str, slo: Slo, repetition: int) -> Arm:
        """The arm told what is promised; if its steps have a budget, with one that keeps that."""
        arm, key = with_promises(self._arms[name], slo), f"{name}-budget"
        said = f"{name} {self.options.settings}"
        if not (self.options.find_budget_s and wants_budget(arm, said)):
            return arm
        if not self.store.has(key, repetition):
            before = with_config_file(arm, self._log_path(f"{key}.toml"))
            with self._server(before, key, repetition) as server:
                found = find_arm_budget(
                    server,
                    self.mix,
                    slo,
                    seconds=self.options.find_budget_s,
                    job_path=self._log_path(f"{key}-job.jsonl"),
                    seed=self.options.seed,
                )
            self.store.write(found, key, repetition)
        budget_s = self.store.read(key, repetition)["budget_s"]
        return with_settings(arm, {"steps": {"budget_s": budget_s}}) if budget_s else arm

    def _measure(
        self, name: str, repetition: int, arm: Arm, server: Server, slo: Slo, reference: Tree
    ) -> None:
        """One arm on its server; its records and figures go to the store."""
        started_s, ceiling = time.monotonic(), self._known_ceiling(name)
        options = in_flight(self.options, self.mix)
        run = self._run_arm(server, arm, options, (name, repetition), has_ceiling=not ceiling)
        for phase, records in zip(PHASES, (run.online, run.ceiling, run.mixed), strict=True):
            if records:
                write_records(self.store.raw_path(f"{name}-{phase}", repetition), records)
        self._log_path(f"{name}-{repetition}-steps.json").write_bytes(orjson.dumps(run.steps))
        figures = run_figures(
            run,
            slo,
            ceiling=ceiling or ceiling_figures(run.ceiling),
            reference=reference,
            deadlines=deadlines_of(self.mix.job),
        )
        self.store.write({"figures": figures, "counters": run.counters}, name, repetition)
        _console.log(f"  {name}: done after {time.monotonic() - started_s:.0f} s")

    def _run_arm(
        self,
        server: Server,
        arm: Arm,
        options: AblationOptions,
        key: tuple[str, int],
        *,
        has_ceiling: bool,
    ) -> ArmRun:
        """The phases on one server; `key`: name and repetition, for who keeps more of it."""
        return run_arm(server, arm, self.mix, options, has_ceiling=has_ceiling)

    def _known_ceiling(self, name: str) -> Tree | None:
        """The ceiling of an earlier repetition, if one is enough."""
        if not self.options.ceilings_once:
            return None
        runs = self.store.runs([name])[name].values()
        return next((tree["ceiling"] for tree in runs), None)

    def _budgets(self, name: str, repetitions: Sequence[int]) -> list[Tree]:
        """What was found for an arm before it was measured."""
        key = f"{name}-budget"
        return [self.store.read(key, one) for one in repetitions if self.store.has(key, one)]

    @contextmanager
    def _server(self, arm: Arm, name: str, repetition: int) -> Iterator[Server]:
        """One that is ready."""
        with ExitStack() as stack:
            server = self._start(arm, name, repetition)
            stack.callback(stop_server, server)
            wait_ready(server)
            yield server

    def _start(self, arm: Arm, name: str, repetition: int) -> Server:
        log_path = self._log_path(f"{name}-{repetition}.log")
        args = (*self._load_args, *server_args(self.options, arm))
        return start_server(self._model, args, config=arm.config, log_path=log_path)

    def _log_path(self, name: str) -> Path:
        """For who wants to look closer: not kept with the results."""
        LOGS_DIR.mkdir(parents=True, exist_ok=True)
        return LOGS_DIR / f"{self.store.folder.name}-{name}"

    def _write_summary(self) -> None:
        """The tables of all that was measured so far."""
        runs = self.store.runs(list(self._arms))
        summary, config = summarise(runs), self._config()
        self.store.write_json("config.json", config)
        trees = {name: list(mine.values()) for name, mine in runs.items()}
        self.store.write_json("summary.json", {"arms": summary, "repetitions": trees})
        text = summary_markdown(config, summary)
        (self.store.folder / "summary.md").write_text(text, encoding="utf-8")

    def _config(self) -> Tree:
        """All that is needed to run it again, and the load's size as it was sent."""
        arrivals = self.mix.arrivals
        numbers = range(1, self.options.repetitions + 1)
        done = [number for number in numbers if self.store.has("reference", number)]
        return {
            "name": self.options.name or self.options.workload,
            "command": self._command,
            **self.store.provenance(provenance()),
            "options": dataclasses.asdict(self.options),
            "arms": {name: dataclasses.asdict(arm) for name, arm in self._arms.items()},
            "server_args": {name: server_args(self.options, a) for name, a in self._arms.items()},
            "saturation_rps": self.store.read("calibration")["rps"],
            "slo_factors": self._factors,
            "slos": [self.store.read("reference", number)["slo"] for number in done],
            "alone_again": [
                share
                for number in done
                for share in self.store.read("reference", number).get("again", ())
            ],
            "online": {
                "requests": len(arrivals),
                "prompt_tokens": sum(one.prompt_tokens for one in arrivals),
                "output_tokens": sum(one.output_tokens for one in arrivals),
            },
            "offline": {"lines": len(self.mix.job)},
            "budgets": {name: self._budgets(name, done) for name in self._arms},
            "failures": self.failures,
        }


def best_reference(
    runs: Sequence[Sequence[Record]], factors: tuple[float, float]
) -> tuple[Slo, Sequence[Record], list[float | None]]:
    """The promises that the fastest run gives, its records, and how far the others keep them.

    A machine that was slow for a moment would make generous promises; and a run that did not
    give them says what the same server is good for another time.
    """
    slos = [derive_slo(run, factors) for run in runs]
    best = min(range(len(runs)), key=lambda place: slos[place].ttft_s * slos[place].tpot_s)
    again = [attainment(run, slos[best]) for place, run in enumerate(runs) if place != best]
    return slos[best], runs[best], again


def in_order(names: list[str], repetition: int) -> list[str]:
    """The arms of a repetition (from 1): every second one in reverse, so that drift cancels."""
    return names if repetition % 2 else names[::-1]
