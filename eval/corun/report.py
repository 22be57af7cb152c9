"""The readable side of a co-run: summary.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.figures.summary import LATENCIES, MIN_HARVEST_SHARE, STEADY_CUT, ratio
from eval.load.records import LATE_BOUND_S

Tree = Mapping[str, Any]

LATENCY_NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "gap_ms": "token gap"}


def summary_markdown(config: Tree, arms: Mapping[str, Tree]) -> str:
    """The results as tables; every figure is the median over repetitions [min-max]."""
    return "\n".join(
        [
            f"# Co-run `{config['options']['name']}`",
            "",
            *_setting(config),
            "",
            "## Online: alone, together with the job, and how much slower",
            "",
            *_online(arms),
            "",
            "## Offline: what the job got beside online traffic",
            "",
            *_offline(arms),
            "",
            "## Cache hits by class (cached / prompt tokens)",
            "",
            *_hits(arms),
            "",
            "## What went wrong",
            "",
            *_faults(arms),
            "",
            *_legend(),
            "",
        ]
    )


def _setting(config: Tree) -> list[str]:
    options, online = config["options"], config["online"]
    limits = f"KV pool {options['pool_tokens']} tokens" if options["pool_tokens"] else "own KV pool"
    return [
        f"    {config['command']}",
        "",
        f"- machine: {config['machine']}; date: {config['date']}",
        f"- SGLang {config['sglang']}, torch {config['torch']}, Python {config['python']}",
        f"- model: {options['model']}; {limits}; "
        f"{options['max_running_requests'] or 'any number of'} running requests; "
        f"prefill chunk {options['chunked_prefill_size'] or 'default'}",
        f"- online: {options['trace']}, {online['requests']} requests in "
        f"{options['duration_s']:g} s, {online['prompt_tokens']} prompt tokens and "
        f"{online['output_tokens']} to generate",
        f"- offline: {options['job']}, {config['offline']['lines']} lines "
        f"({options['job_order']}), {options['window']} in flight",
        f"- {options['repetitions']} server starts per arm",
    ]


def _online(arms: Mapping[str, Tree]) -> list[str]:
    rows = []
    for name, tree in arms.items():
        for latency, point in LATENCIES:
            alone = tree["online_alone"][latency][point]
            mixed = tree["online_together"][latency][point]
            slower = tree["inflation"][f"{latency}_{point}"]
            label = f"{LATENCY_NAMES[latency]} {point}"
            rows.append([name, label, ms(alone), ms(mixed), times(slower)])
        waits = [tree[phase]["ttft_ms"]["max"] for phase in ("online_alone", "online_together")]
        rows.append([name, "longest wait", *map(ms, waits), ""])
    return table(["arm", "", "alone ms", "together ms", "inflation"], rows)


def _offline(arms: Mapping[str, Tree]) -> list[str]:
    base_name, base = next((name, tree["harvest_tokens_per_s"]) for name, tree in arms.items())
    rows = []
    for name, tree in arms.items():
        harvest = tree["harvest_tokens_per_s"]
        of_base = ratio(harvest["median"], base["median"])
        rows.append(
            [
                name,
                spread(tree["ceiling_tokens_per_s"], "{:.0f}"),
                spread(harvest, "{:.0f}"),
                spread(tree["harvest_of_ceiling"], "{:.1%}"),
                "-" if of_base is None else f"{of_base:.2f}x",
                "yes" if tree["job_ran_dry"]["max"] else "no",
            ]
        )
    columns = ["arm", "alone tok/s (ceiling)", "together tok/s (harvest)", "of own ceiling"]
    return table([*columns, f"vs {base_name}", "job ran dry"], rows)


def _hits(arms: Mapping[str, Tree]) -> list[str]:
    phases = ("online_alone", "online_together", "offline_alone", "offline_together")
    rows = [
        [name, *(spread(tree[phase]["hit_ratio"], "{:.1%}") for phase in phases)]
        for name, tree in arms.items()
    ]
    return table(["arm", *(phase.replace("_", " ") for phase in phases)], rows)


def _faults(arms: Mapping[str, Tree]) -> list[str]:
    rows = []
    for name, tree in arms.items():
        for phase in ("online_alone", "online_together", "offline_alone", "offline_together"):
            stats = tree[phase]
            counts = ("requests", "ok", "error", "cancelled", "late")
            shown = (spread(stats[count], "{:.0f}") for count in counts)
            rows.append([name, phase.replace("_", " "), *shown])
    head = ["arm", "phase", "requests", "answered", "errors", "given up", "sent late"]
    return table(head, rows)


def _legend() -> list[str]:
    return [
        "TTFT counts from the scheduled time; a request given up without a token counts with the "
        "time it had waited. TPOT is (last - first token) / (tokens - 1). The longest wait is the "
        "largest TTFT.",
        "",
        f"Sent late: more than {LATE_BOUND_S * 1000:.0f} ms after its time, the client's own "
        "fault. Any such request makes the latencies of its row doubtful.",
        "",
        "Tokens per second are prompt + generated tokens of the lines completed in a window: for "
        f"the ceiling between the first and the last {STEADY_CUT:.0%} of the completions, for the "
        "harvest while online requests come. Where the job ran dry the harvest's window ends "
        f"there, and there is none (-) if it lasted for less than {MIN_HARVEST_SHARE:.0%} of that "
        "time. Offline lines given up are those in flight when the phase ended.",
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def spread(value: Tree, form: str) -> str:
    """Median [min-max]; the median alone where all are equal, "-" where a run lacks it."""
    if value["median"] is None:
        return "-"
    median, low, high = (form.format(value[key]) for key in ("median", "min", "max"))
    return median if low == high else f"{median} [{low}-{high}]"


def ms(value: Tree) -> str:
    return spread(value, "{:.1f}")


def times(value: Tree) -> str:
    return spread(value, "{:.2f}x")
