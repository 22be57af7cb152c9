"""What Echo costs while no job runs: online requests alone, on stock SGLang and on Echo.

    python -m eval.online_only

starts a stock server, one with `configs/echo.toml`, and one with promises as well. They take turns,
the order alternating: as many requests as the server takes (closed loop), then at a share of that
(open loop). Writes eval/results/online-only/ with config.json, summary.json and summary.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from echo_sgl.types import Task
from eval.arms import Arm
from eval.cache.arms import with_config_file
from eval.corun.report import table
from eval.figures.slo import Slo, attainment
from eval.figures.summary import percentiles_ms
from eval.load.client import Phase, Request, make_request
from eval.load.mix import online_body
from eval.load.records import Record, Status
from eval.load.saturation import WARM_UP_REQUESTS, saturation_rps
from eval.options import check_options, option
from eval.paths import BUILD_DIR, LOGS_DIR, RESULTS_DIR
from eval.servers.machine import device_args
from eval.servers.models import find_model
from eval.servers.server import Server, running_server
from eval.simulated.points import parse_points, write_points
from eval.workloads import WorkloadError
from eval.workloads.jobs import COMPLETIONS_URL
from eval.workloads.patterns import lognormal_lengths, poisson_arrivals
from eval.workloads.prompts import SyntheticText, load_tokenizer

STOCK = "stock"
LIMIT_S = 300.0
# `kept`: of the closed loop, the share of requests that got what `promises` promises.
KEPT = "kept"
FIGURES = ("answers_per_s", KEPT, "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
HEAD = ("answers a second", "in time", "TTFT p50, ms", "TTFT p99", "TPOT p50, ms", "TPOT p99")


@dataclasses.dataclass(frozen=True, slots=True)
class OnlineOnlyOptions:
    """What is measured."""

    name: str = option("online-only", "folder under eval/results/ that takes the results")
    model: str = option("base", "demo model (tiny, small, base, large), shape, folder or hub id")
    rounds: int = option(5, "turns of each server", 1)
    requests: int = option(160, "of the closed loop in each turn", 20)
    window: int = option(32, "of them in flight", 1)
    duration_s: float = option(15.0, "of the open loop in each turn", 1)
    load: float = option(0.6, "its rate, as a share of what stock takes at most", 0.01)
    prompt_tokens: int = option(256, "mean length of a prompt; lognormal, cut to 4 times that", 4)
    answer_tokens: int = option(64, "mean length of an answer; lognormal, cut to 4 times that", 2)
    ttft_s: float = option(2.0, "promised by the third server", 0.001)
    tpot_s: float = option(0.1, "promised by the third server", 0.001)
    max_running_requests: int = option(16, "the servers' limit", 1)
    pool_tokens: int = option(20_000, "KV pool of each server (--max-total-tokens)", 1)
    chunked_prefill_size: int = option(512, "prefill tokens a step", 1)
    server_args: str = option("--sleep-on-idle", "more arguments for all servers, as one string")
    seed: int = option(0, "of prompts, lengths and arrivals", 0)

    def __post_init__(self) -> None:
        check_options(self)

    def arms(self) -> dict[str, Arm]:
        """Stock first: the others are compared with it."""
        slo = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s}
        return {STOCK: Arm(), "echo": Arm(config="echo"), "promises": Arm(settings={"slo": slo})}


class Traffic:
    """Requests that nobody has sent before, of the same lengths whenever it is asked again."""

    def __init__(self, options: OnlineOnlyOptions, model: str) -> None:
        self._options = options
        self._texts = SyntheticText(load_tokenizer(model), options.seed)
        self._number = count()

    def requests(self, num: int, seed: int) -> list[Request]:
        """So many; equal seeds give equal lengths, never equal texts."""
        options = self._options
        drawn = [
            lognormal_lengths(mean, sigma=0.6, count=num, max_tokens=4 * mean, seed=seed + part)
            for part, mean in enumerate((options.prompt_tokens, options.answer_tokens))
        ]
        return [self._request(*one) for one in zip(*drawn, strict=True)]

    def _request(self, prompt_tokens: int, answer_tokens: int) -> Request:
        number = next(self._number)
        body = online_body(self._texts.text(number, max(4, prompt_tokens)), answer_tokens)
        return make_request(f"online-{number}", Task.ONLINE, COMPLETIONS_URL, body)


def take_turns(options: OnlineOnlyOptions) -> list[dict[str, Any]]:
    """One row for each server and turn, in the order in which they were measured."""
    model, load_args = find_model(options.model)
    traffic, rows = Traffic(options, model), []
    with contextlib.ExitStack() as stack:
        args = (*device_args(), *load_args, *_server_args(options))
        servers = dict(_servers(options, model, args, stack))
        for server in servers.values():
            warm_up(server, traffic, options)
        rate_rps = 0.0
        for number in range(options.rounds):
            for arm in list(servers)[:: -1 if number % 2 else 1]:
                row, rate_rps = measure_turn(servers[arm], traffic, options, number, rate_rps)
                rows.append({"arm": arm, "round": number, **row})
    return rows


def warm_up(server: Server, traffic: Traffic, options: OnlineOnlyOptions) -> None:
    """A few requests: what a server does for the first time takes longer than the rest of a turn.

    Errors: `WorkloadError` when one is not answered.
    """
    _closed(server, traffic.requests(2 * WARM_UP_REQUESTS, seed=1), options)


def _server_args(options: OnlineOnlyOptions) -> list[str]:
    return [
        *("--max-running-requests", str(options.max_running_requests)),
        "--enable-cache-report",
        *("--max-total-tokens", str(options.pool_tokens)),
        *("--chunked-prefill-size", str(options.chunked_prefill_size)),
        *shlex.split(options.server_args),
    ]


def _servers(
    options: OnlineOnlyOptions, model: str, args: Sequence[str], stack: contextlib.ExitStack
) -> Iterator[tuple[str, Server]]:
    for name, arm in options.arms().items():
        config = with_config_file(arm, BUILD_DIR / f"online-only-{name}.toml").config
        log_path = LOGS_DIR / f"online-only-{name}.log"
        server = running_server(model, args, config=config, log_path=log_path)
        yield name, stack.enter_context(server)


def measure_turn(
    server: Server, traffic: Traffic, options: OnlineOnlyOptions, number: int, rate_rps: float
) -> tuple[dict[str, float], float]:
    """The figures of one server's turn, and the rate of the open loop; 0: this turn sets it.

    Errors: `WorkloadError` when a request is not answered, or so few that no rate can be told.
    """
    seed = options.seed + 10 * (number + 1)
    most = _closed(server, traffic.requests(options.requests, seed), options)
    most_rps = saturation_rps(most)
    rate_rps = rate_rps or options.load * most_rps
    schedule = list(poisson_arrivals([(rate_rps, options.duration_s)], random.Random(seed)))
    requests = traffic.requests(len(schedule), seed + 5)
    phase = Phase(server.url)
    asyncio.run(phase.open_loop(zip(schedule, requests, strict=True), limit_s=LIMIT_S))
    kept = attainment(most, Slo(options.ttft_s, options.tpot_s))
    assert kept is not None, "every request of these was answered"
    row = {"answers_per_s": most_rps, KEPT: kept}
    return row | _latencies(_checked(phase.records)), rate_rps


def _closed(
    server: Server, requests: Sequence[Request], options: OnlineOnlyOptions
) -> list[Record]:
    phase = Phase(server.url)
    asyncio.run(phase.closed_loop(requests, window=options.window, limit_s=LIMIT_S))
    return _checked(phase.records)


def _checked(records: list[Record]) -> list[Record]:
    """Errors: `WorkloadError` when one was not answered."""
    failed = [record for record in records if record.status is not Status.OK]
    if failed:
        raise WorkloadError(
            f"{len(failed)} of {len(records)} requests were not answered in {LIMIT_S:.0f} s; "
            f"the first: {failed[0].error or failed[0].status}"
        )
    return records


def _latencies(records: Sequence[Record]) -> dict[str, float]:
    """Errors: `WorkloadError` when too few were sent to have any."""
    ttft = percentiles_ms(one.ttft_s for one in records if one.ttft_s is not None)
    tpot = percentiles_ms(one.tpot_s for one in records if one.tpot_s is not None)
    figures = {}
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        for share in ("p50", "p99"):
            if (value := values[share]) is None:
                raise WorkloadError(
                    f"{len(records)} requests of the open loop tell no {name}; "
                    "raise --duration-s, --load or --answer-tokens"
                )
            figures[f"{name}_{share}_ms"] = value
    return figures


def beside_stock(rows: Sequence[Mapping[str, Any]], arm: str, figure: str) -> list[float]:
    """An arm's figure over stock's, turn by turn."""
    values = {(row["arm"], row["round"]): row[figure] for row in rows}
    numbers = sorted({row["round"] for row in rows})
    return [values[arm, number] / values[STOCK, number] for number in numbers]


def summary_markdown(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """summary.md: medians, and each arm's medians of ratios to stock in the same round."""
    options, arms = config["options"], dict.fromkeys(row["arm"] for row in rows)
    cells = []
    for arm in sorted(arms, key=lambda name: name != STOCK):
        mine = {figure: [row[figure] for row in rows if row["arm"] == arm] for figure in FIGURES}
        medians = [f"{statistics.median(mine[figure]):,.1f}" for figure in FIGURES]
        medians[FIGURES.index(KEPT)] = _range("{:.0%}", mine[KEPT])
        cells.append([arm, *medians])
        if arm != STOCK:
            ratios = [
                "" if one == KEPT else _range("{:.2f}x", beside_stock(rows, arm, one))
                for one in FIGURES
            ]
            cells.append([f"{arm} / stock", *ratios])
    return "\n".join(
        [
            f"# Online requests alone `{config['name']}`",
            "",
            f"    {config['command']}",
            "",
            f"- machine: {config['machine']}; date: {config['date']}",
            f"- SGLang {config['sglang']}, torch {config['torch']}, Python {config['python']}; "
            f"model {options['model']}, {options['max_running_requests']} places, chunks of "
            f"{options['chunked_prefill_size']}",
            f"- {options['rounds']} rounds in alternating order: medians; ratios to stock in the "
            "same round, the median (least to most)",
            f"- answers a second: {options['requests']} requests, {options['window']} in flight; "
            f"in time: of these, TTFT in {options['ttft_s']:g} s and TPOT in "
            f"{options['tpot_s'] * 1e3:g} ms, which `promises` promises",
            f"- latencies: at {options['load']:.0%} of what stock took first, for "
            f"{options['duration_s']:g} s",
            "",
            *table(["", *HEAD], cells),
            "",
        ]
    )


def _range(form: str, values: Sequence[float]) -> str:
    """The median, and the least and the most in brackets."""
    middle, least, most = map(form.format, (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}-{most})"


def main(argv: Sequence[str]) -> None:
    """Measure and write; wrong options end it with code 2."""
    prog = "python -m eval.online_only"
    options = parse_points(argv, OnlineOnlyOptions, prog=prog)
    rows = take_turns(options)
    write_points(RESULTS_DIR, options, rows, summary_markdown, prog=prog, argv=argv, facts={})


if __name__ == "__main__":
    main(sys.argv[1:])
