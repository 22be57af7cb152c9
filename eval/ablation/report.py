"""The readable side of an ablation: summary.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eval.ablation.arms import ALONE_ARM, BASE_ARM
from eval.ablation.figures import ENOUGH_ATTAINMENT
from eval.ablation.options import WORKLOADS, AblationOptions
from eval.corun.report import LATENCY_NAMES, ms, spread, table, times
from eval.figures.step_shares import KINDS
from eval.figures.summary import MIN_HARVEST_SHARE

Tree = Mapping[str, Any]
Arms = Mapping[str, Tree]

SHOWN_LATENCIES = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99"))
WHOLE, PERCENT = "{:.0f}", "{:.1%}"


def summary_markdown(config: Tree, arms: Arms) -> str:
    """The results as tables; every figure is the median over repetitions [min-max]."""
    sections = {
        "Promises kept, and what the job got": _overview(arms),
        f"At equal attainment: runs that reach {ENOUGH_ATTAINMENT:.0%} of alone": _equal(arms),
        "Online: alone, together, and how much slower": _online(arms),
        "Offline: alone, together, and cache hits by class": _offline(arms),
        "Where the time goes while both run": _steps(arms),
        "Work set aside, lost and late": _lost(arms),
        "What went wrong": _faults(arms),
    }
    lines = [f"# Ablation `{config['name']}`", "", *_setting(config), ""]
    for title, rows in sections.items():
        lines += [f"## {title}", "", *rows, ""]
    return "\n".join([*lines, *_legend(), ""])


def _setting(config: Tree) -> list[str]:
    options, online = config["options"], config["online"]
    limits = f"KV pool {options['pool_tokens']} tokens" if options["pool_tokens"] else "own KV pool"
    load = options["online_load"]
    if options["online_rps"]:
        load = options["online_rps"] / config["saturation_rps"]
    lines = [
        f"    {config['command']}",
        "",
        f"- machine: {config['machine']}; date: {config['date']}",
        f"- SGLang {config['sglang']}, torch {config['torch']}, Python {config['python']}",
        f"- model: {options['model']}; {limits}; "
        f"{options['max_running_requests'] or 'any number of'} running requests; "
        f"prefill chunk {options['chunked_prefill_size'] or 'default'}",
        f"- workload {options['workload']}: {_about(options)}",
        f"- online: {online['requests']} requests in {options['duration_s']:g} s, "
        f"{load:.0%} of the {config['saturation_rps']:.2f} requests/s at which "
        f"the stock server saturates; {online['prompt_tokens']} prompt tokens and "
        f"{online['output_tokens']} to generate",
        f"- offline: {config['offline']['lines']} lines",
        f"- promised: {config['slo_factors'][0]:g} x the p99 TTFT and {config['slo_factors'][1]:g} "
        f"x the p99 TPOT of the stock server alone: {_promises(config)}",
    ]
    lines += [f"- the stock server alone measured again keeps that for {_again(config)}"]
    if options["rounds"] > 1 and len(config["arms"]) > options["servers_up"]:
        lines += [
            f"- {options['servers_up']} servers were up at a time: arms of one group were measured "
            "in turn, the groups one after the other"
        ]
    for name, budgets in config["budgets"].items():
        lines += [f"- {name}: {_budget(found)}" for found in budgets]
    return lines + [f"- NOT MEASURED: {failure}" for failure in config["failures"]]


def _budget(found: Tree) -> str:
    """What replays on the arm's server gave before it was measured."""
    if found["budget_s"] is None:
        return (
            "its preset's budget, since no replay kept the promises, not even without offline work"
        )
    kept = "the largest" if found["keeps_promises"] else "the smallest tried, since none"
    return f"a budget of {1000 * found['budget_s']:.1f} ms, {kept} whose replays keep the promises"


def _about(options: Tree) -> str:
    """What was sent; what stands in for the workload's own is named."""
    about = WORKLOADS[options["workload"]].about
    if options["trace"] != AblationOptions().trace and options["workload"] != "llm-d":
        about += f"; trace {options['trace']}"
    return about + (f"; job {options['job']} in place of its own" if options.get("job") else "")


def _promises(config: Tree) -> str:
    slos = config["slos"]
    bounds = []
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        values = sorted(slo[key] * 1000 for slo in slos)
        bounds.append(f"{name} {values[0]:.0f}-{values[-1]:.0f} ms")
    return ", ".join(bounds) + f" (measured {len(slos)} times)"


def _again(config: Tree) -> str:
    """How promises that come of one run alone are kept by another: what chance is worth."""
    shares = [f"{share:.1%}" for share in config["alone_again"] if share is not None]
    return ", ".join(shares) + " of the requests" if shares else "an unknown share (once only)"


def _overview(arms: Arms) -> list[str]:
    rows = [
        [
            name,
            f"{tree['repetitions']}",
            *(
                spread(tree["attainment"][key], PERCENT)
                for key in ("alone", "together", "of_alone")
            ),
            times(tree["vs_stock_alone"]["ttft_ms_p99"]),
            times(tree["vs_stock_alone"]["tpot_ms_p99"]),
            *(spread(tree[f"harvest_of_{what}"], PERCENT) for what in ("ceiling", "room")),
            spread(tree["harvest_tokens_per_s"], WHOLE),
            times(tree["vs_base"]),
            times(tree["machine_slowness"]),
        ]
        for name, tree in arms.items()
    ]
    head = ["arm", "runs", "attainment alone", "together", "of alone"]
    head += ["TTFT p99 vs stock alone", "TPOT p99"]
    tail = ["harvest of ceiling", "of the room", "tokens/s", f"vs {BASE_ARM}", "machine's time"]
    return table([*head, *tail], rows)


def _equal(arms: Arms) -> list[str]:
    rows = []
    for name, tree in arms.items():
        equal, num_runs = tree["at_equal_attainment"], tree["repetitions"]
        if not equal["runs"]:
            rows.append([name, f"0 of {num_runs}", "does not reach it", "-", "-"])
            continue
        verdict = "always" if equal["runs"] == num_runs else "sometimes"
        figures = [
            spread(equal["harvest_tokens_per_s"], WHOLE),
            spread(equal["harvest_of_ceiling"], PERCENT),
        ]
        rows.append([name, f"{equal['runs']} of {num_runs}", verdict, *figures])
    return table(["arm", "runs", "reaches it", "harvest tokens/s", "of ceiling"], rows)


def _online(arms: Arms) -> list[str]:
    rows = []
    for name, tree in arms.items():
        for latency, point in SHOWN_LATENCIES:
            key = f"{latency}_{point}"
            values = [tree[phase][latency][point] for phase in ("online_alone", "online_together")]
            ratios = [tree[base][key] for base in ("vs_alone", "vs_stock_alone")]
            label = f"{LATENCY_NAMES[latency]} {point}"
            rows.append([name, label, *map(ms, values), *map(times, ratios)])
    return table(["arm", "", "alone ms", "together ms", "vs alone", "vs stock alone"], rows)


def _offline(arms: Arms) -> list[str]:
    rows = [
        [
            name,
            spread(tree["ceiling"]["tokens_per_s"], WHOLE),
            spread(tree["harvest_tokens_per_s"], WHOLE),
            "yes" if tree["job_ran_dry"]["max"] else "no",
            spread(tree["ceiling"]["hit_ratio"], PERCENT),
            spread(tree["offline_together"]["hit_ratio"], PERCENT),
            spread(tree["online_alone"]["hit_ratio"], PERCENT),
            spread(tree["online_together"]["hit_ratio"], PERCENT),
        ]
        for name, tree in arms.items()
    ]
    head = ["arm", "alone tok/s (ceiling)", "together tok/s", "job ran dry"]
    hits = ["offline hits alone", "together", "online hits alone", "together"]
    return table([*head, *hits], rows)


def _steps(arms: Arms) -> list[str]:
    rows = [
        [
            name,
            *(spread(tree["steps"][kind], PERCENT) for kind in (*KINDS, "planning")),
            spread(tree["steps"]["prefill_tokens"], WHOLE),
            spread(tree["steps"]["offline_decodes"], "{:.1f}"),
            spread(tree["steps"]["room"], PERCENT),
        ]
        for name, tree in arms.items()
    ]
    tail = ["of it Echo's planning", "tokens in an offline prefill", "offline in a decode of both"]
    return table(["arm", *KINDS.values(), *tail, "room"], rows)


def _lost(arms: Arms) -> list[str]:
    rows = [
        [
            name,
            *(spread(tree[key], WHOLE) for key in ("recomputed_tokens", "parks", "retractions")),
            spread(tree["online_together"]["ttft_ms"]["max"], WHOLE),
            spread(_in_ms(tree["longest_wait_s"]), WHOLE),
            spread(tree["most_offline_steps_waited"], WHOLE),
            *(spread(tree["deadlines"][key], WHOLE) for key in ("judged", "missed")),
        ]
        for name, tree in arms.items()
    ]
    head = ["arm", "recomputed tokens", "parks", "retractions", "longest TTFT ms"]
    waits = ["longest wait for its prefill ms", "steps with offline work waited for, at most"]
    tail = [*waits, "windows closed", "missed"]
    return table([*head, *tail], rows)


def _faults(arms: Arms) -> list[str]:
    rows = []
    for name, tree in arms.items():
        for phase in ("online_alone", "online_together", "offline_together"):
            counts = ("requests", "ok", "error", "cancelled", "late")
            shown: Iterable[str] = (spread(tree[phase][count], WHOLE) for count in counts)
            rows.append([name, phase.replace("_", " "), *shown])
    return table(["arm", "phase", "requests", "answered", "errors", "given up", "sent late"], rows)


def _legend() -> list[str]:
    return [
        "Attainment: share of the online requests that were answered in full with TTFT and TPOT "
        "both within the promise; errors and unanswered requests are missed. Alone is the same "
        f"server without offline work; of alone: held against the arm `{ALONE_ARM}`, the stock "
        "server without a job in the same round; where there is none, against the better of the "
        "arm's own server alone and the stock server's when promises were taken. TTFT counts from "
        "the scheduled time.",
        "",
        "Machine's time: how many times longer a fixed piece of work took just before the run than "
        "when the promises had been measured; a shared machine changes its speed.",
        "",
        "Harvest: prompt + generated tokens of offline lines completed per second while online "
        "requests come; the ceiling is the same arm's without online work. Where the job ran dry "
        "the harvest's window ends there, and there is none (-) if it lasted for less than "
        f"{MIN_HARVEST_SHARE:.0%} of that time.",
        "",
        "Room: the share of the steps' time that online requests leave, if each of their tokens "
        "took its part of a full decode step. The harvest of the room is that of the ceiling over "
        "it: what was left of the ceiling for the job, and was used. It may be above 100%: the "
        "machine's speed changes, and lines that were begun before count where they end.",
        "",
        "Parks, retractions and recomputed tokens are the server's own counts while both ran; `-` "
        "where it has none. A window counts as closed when its line was answered or its time was "
        "over within the phase. The waits are the longest of the last minute, behind other online "
        "requests too; of the steps before a request's prefill those with offline work count.",
    ]


def _in_ms(value: Tree) -> Tree:
    return {key: None if one is None else one * 1000 for key, one in value.items()}
