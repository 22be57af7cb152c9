"""What BROS's shared KV blocks are worth beside parking, on a simulated server short of memory.

    python -m eval.shared_blocks

serves an online trace and endless offline lines with each layout of the KV memory and each page
size, and writes eval/results/shared-blocks/ with config.json, summary.json and summary.md. A
simulation under an assumed profile: no server runs. Source: BROS 5 and 7.4.1.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.progress import track

from echo_sgl.errors import EchoError
from echo_sgl.sim.block_server import BlockConfig, BlockResults, BlockServer, Row
from echo_sgl.sim.shared_blocks import Layout
from eval.corun.report import table
from eval.fleet import setting
from eval.options import add_arguments, check_options, option
from eval.paths import RESULTS_DIR
from eval.servers.machine import provenance
from eval.workloads import find_data
from eval.workloads.traces import read_trace

PAGES = (1, 16, 64)
# BROS 7.1: best-effort prompts and answers, uniform.
BROS_PROMPTS, BROS_ANSWERS, NUM_LINES = (512, 1024), (32, 128), 5000
JOBS = {
    "bros": "BROS's best-effort lengths (prompts of 512-1,024, answers of 32-128 tokens)",
    "ooc": "log-normal lengths around OOCO's offline means (1,201 / 672 tokens)",
}
NOTE = """\
Lost: offline KV that online requests took. It is computed again, or read back from host memory over
a link of {link:g} GB/s while the step computes. Empty: slots without a token in pages that have an
owner, in % of the pool, on the average. Offline tokens are prompt and answer of lines that ended.

`retract` drops all KV of the offline request that started last; `park` takes its last pages, one
by one, which is what Echo's parking does when the pool is full; `park-host` also keeps a copy in
host memory, as SGLang's host tier can; `shared` is BROS: an online request fills empty slots of
offline pages from the other end, then overwrites single tokens, which are kept in host memory.
With pages of one token there is nothing to share. All follow one scheduler: online first, offline
within {limit_ms:g} ms a step, {reserve:.0%} of the pool kept from offline requests that start.
Copies to the host take the link's time, too. What attention over two directions costs is not
simulated; BROS gives no figure of it.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOptions:
    """What is simulated."""

    name: str = option("shared-blocks", "folder under eval/results/ that takes the results")
    trace: str = option("azure_conv_2023.csv.gz", "CSV of arrivals: path or real workload's name")
    duration_s: float = option(300.0, "how much of the trace, from its start", 1)
    online_scale: float = option(0.5, "requests of the trace that one server gets, as a factor", 0)
    kv_tokens: int = option(60_000, "KV pool: small, so that there is something to fight for", 64)
    limit_ms: float = option(85.0, "what a step with online requests may take", 1)
    seed: int = option(0, "of dropped requests and lengths", 0)

    def __post_init__(self) -> None:
        check_options(self)


def offline_lines(job: str, seed: int) -> Sequence[tuple[int, int]]:
    """Prompt and answer tokens of a job's lines."""
    if job != "bros":
        return setting.offline_lengths(job, seed=seed)
    rng = random.Random(seed)
    return [(rng.randint(*BROS_PROMPTS), rng.randint(*BROS_ANSWERS)) for _ in range(NUM_LINES)]


def cases() -> Iterator[tuple[str, int, Layout]]:
    """Job, page size and layout of each run."""
    for job in JOBS:
        for page_tokens in PAGES:
            for layout in Layout:
                if layout is not Layout.SHARED or page_tokens > 1:
                    yield job, page_tokens, layout


def block_config(options: BlockOptions, page_tokens: int, layout: Layout) -> BlockConfig:
    return BlockConfig(
        setting.device(), options.kv_tokens, page_tokens, layout, options.limit_ms / 1000
    )


def run_case(
    options: BlockOptions, online: Sequence[Row], case: tuple[str, int, Layout]
) -> dict[str, Any]:
    """One row of the results."""
    job, page_tokens, layout = case
    config = block_config(options, page_tokens, layout)
    server = BlockServer(config, online, offline_lines(job, options.seed))
    result = server.run(options.duration_s)
    return {"job": job, "page_tokens": page_tokens, "layout": layout.value, **figures(result)}


def figures(result: BlockResults) -> dict[str, Any]:
    """The figures as JSON takes them."""
    counts = {
        name: getattr(result, name) for name in result.__slots__ if name not in ("ttft_s", "tpot_s")
    }
    return {
        "online_done": len(result.tpot_s),
        "ttft_p99_s": float(np.percentile(result.ttft_s, 99)) if result.ttft_s else None,
        "tpot_p99_s": float(np.percentile(result.tpot_s, 99)) if result.tpot_s else None,
        "offline_tokens_per_s": result.offline_tokens / result.end_s,
        **counts,
    }


def summary_markdown(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """One table per job, and what it says."""
    options = config["options"]
    lines = [
        f"# Shared KV blocks `{config['name']}`: a simulation under an assumed profile",
        "",
        f"    {config['command']}",
        "",
        f"- {setting.PROFILE_NOTE}",
        f"- {options['kv_tokens']:,} KV tokens; online: {options['duration_s']:g} s of "
        f"{options['trace']} x{options['online_scale']:g}, which holds up to "
        f"{max(row['most_online_tokens'] for row in rows):,} of them; offline lines without end",
    ]
    if num := config.get("num_too_long"):
        lines.append(f"- {num:,} online requests need more than half of the pool and are left out")
    lines.append("")
    for job, about in JOBS.items():
        here = [row for row in rows if row["job"] == job]
        lines += [f"## {about}", "", *_rows(here), "", *_reading(here), ""]
    note = NOTE.format(
        link=config["host_bytes_per_s"] / 1e9,
        reserve=config["reserve_share"],
        limit_ms=options["limit_ms"],
    )
    return "\n".join([*lines, note])


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["page", "layout", "offline tokens/s", "TTFT p99 s", "TPOT p99 ms", "lost"]
    body = [
        [
            str(row["page_tokens"]),
            row["layout"],
            f"{row['offline_tokens_per_s']:,.0f}",
            f"{row['ttft_p99_s']:.2f}",
            f"{row['tpot_p99_s'] * 1000:.1f}",
            *(f"{row[key]:,}" for key in ("lost_tokens", "recomputed_tokens", "read_tokens")),
            f"{row['empty_share']:.1%}",
        ]
        for row in rows
    ]
    return table([*head, "computed again", "read back", "empty"], body)


def _reading(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where sharing stands against the other layouts, one line a page size."""
    rates = {(row["page_tokens"], row["layout"]): row["offline_tokens_per_s"] for row in rows}
    told = []
    for page in PAGES[1:]:
        shared = rates[page, Layout.SHARED.value]
        against = ", ".join(
            f"{shared / rates[page, layout.value] - 1:+.1%} of {layout.value}"
            for layout in Layout
            if layout is not Layout.SHARED
        )
        told.append(f"- pages of {page}: shared has offline tokens/s {against}")
    return told


def run(options: BlockOptions, *, command: str) -> Path:
    """Simulate all cases, print and write the results folder."""
    arrivals = [
        one for one in read_trace(find_data(options.trace)) if one.at_s < options.duration_s
    ]
    trace = setting.scaled_online(arrivals, options.online_scale, seed=options.seed)
    online = list(zip(trace.at_s, trace.prompt_tokens, trace.output_tokens, strict=True))
    console = Console(stderr=True)
    rows = [
        run_case(options, online, case)
        for case in track(list(cases()), description="layouts", console=console)
    ]
    sample = block_config(options, PAGES[-1], Layout.SHARED)
    config = {
        "name": options.name,
        "command": command,
        **provenance(),
        "options": dataclasses.asdict(options),
        "device": setting.device().coefficients_,
        "profile": setting.PROFILE_NOTE,
        "host_bytes_per_s": sample.host_bytes_per_s,
        "reserve_share": sample.reserve_share,
        "num_too_long": sum(not sample.takes(*lengths) for _, *lengths in online),
    }
    folder = RESULTS_DIR / options.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config", config), ("summary", {"rows": rows})):
        data = orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"
        (folder / f"{name}.json").write_bytes(data)
    text = summary_markdown(config, rows)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    Console().print(text, highlight=False, markup=False)
    return folder


def main(argv: list[str]) -> None:
    """Run the experiment; a wrong input ends with a sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.shared_blocks", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_arguments(parser, BlockOptions)
    try:
        options = BlockOptions(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
    try:
        run(options, command=f"python -m eval.shared_blocks {shlex.join(argv)}".strip())
    except EchoError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
