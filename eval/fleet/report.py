"""The readable side of the fleet experiment: summary.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.corun.report import table as md_table
from eval.fleet import setting

Tree = Mapping[str, Any]

JOB_NAMES = {
    "ooc": "log-normal lengths around OOCO's published means (1,201 / 672 tokens)",
    "reasoning": "made-up log-normal lengths, short prompts and long answers (300 / 1,500 tokens)",
    "arxiv": "lengths of the arXiv summarization set (2,588 / 291 tokens on the average)",
}
READING = """\
How to read it. The online load is what base P/D alone just serves; offline requests come at a
uniform rate beside it. A promise is kept when TTFT and TPOT of the request are; one that is not
done {drain} after the trace counts as broken. The offline tokens (prompt and answer) are those of
requests that ended within the trace. Best: the most of them at the loads before the first that
breaks more than {threshold:.0%} of the promises.

What is in it. `base-pd` serves all in order of arrival. `online-priority` prefills offline work
when no online request waits, and caps the number of decodes. `ooco` interrupts offline steps
layer by layer, gates offline prefill, decodes offline requests on the prefill instance, lets the
decode instance pull them by length, and selects each step's mix; what an interrupted prefill
computed is lost. `ooco-resume` goes on with it, which the paper names for later. `{echo}` is this
project's scheduler with its slack limit and reserve on two instances that prefill and decode
both: the plugin refuses SGLang's disaggregation modes, so this is how it can run. Steps do both at
once (`--enable-mixed-chunk`); with `{cut}` its online prefills are cut to the slack of those
that decode beside them (`steps.online_chunks = "slack"`). Prefixes are not shared in any arm, so
prefix order and eviction have nothing to win here.

What SGLang 0.5.23 itself can run of it (read in its package, `sglang/srt/disaggregation`).
Base P/D: `--disaggregation-mode prefill` and `decode` with KV transfer by mooncake, nixl, mori or
ascend. Part of online priority: with `--enable-priority-scheduling` a prefill instance takes its
queue and a decode instance its preallocations by priority; a decode that runs out of memory is
retracted with its KV kept in host memory (`--disaggregation-decode-retraction-backup`), and nobody
is preempted there for an online request. None of OOCO: a prefill instance has no decode loop
(its event loop forms prefill batches only), KV moves once, after prefill and towards the instance
that was chosen when the request came, so that no decode can be pulled; a forward pass is not
interrupted; a decode instance runs all it holds, without a limit on a step's time; and an instance
changes its role (`/pd_role_switch`) only when it is idle. echo-sgl refuses both modes at start.

What is left out. Transfers do not share their link; the front end, sampling and the engine's own
host time beyond {step_ms:g} ms a step take nothing; the paper's gating has no published formula
(ours is in `sim/fleet/rules.py`), its TTFT and TPOT promises are not published either, and its own
offline trace is not public.
"""


def summary_markdown(config: Tree, summary: Tree) -> str:
    """The best of each arm, then every load."""
    options, check = config["options"], config["profile_check"]
    lines = [
        f"# Fleet `{config['name']}`: a simulation under an assumed profile",
        "",
        f"    {config['command']}",
        "",
        f"- {config['profile']}",
        f"- this profile: {check['simulated_tokens_per_s']:,.0f} tokens/s on the load of table 6 "
        f"(paper: {check['table_6_tokens_per_s']:,.0f}); GEMMs saturate at "
        f"{check['saturated_batch_size']} decodes; {config['kv_tokens']:,} KV tokens an instance",
        f"- online: the first {options['duration_s']:g} s of {options['trace']}, scaled "
        + ", ".join(f"x{scale:g} (TPOT {tpot} s)" for tpot, scale in config["scales"].items())
        + f"; TTFT {options['ttft_s']:g} s; two instances in every arm",
        f"- strict steps are planned within {config['step_share']:.0%} of the TPOT",
        "",
        "## The most offline work with the promises kept",
        "",
        *_best(config, summary),
        "",
        *_shape(summary),
        "",
    ]
    for job, tpot_s in _settings(summary["rows"]):
        lines += [f"## {JOB_NAMES[job]}, TPOT {tpot_s:g} s", "", *_loads(summary, job, tpot_s), ""]
    text = READING.format(
        drain="a minute",
        threshold=options["threshold"],
        echo=setting.ECHO,
        cut=setting.ECHO_CUT,
        step_ms=1000 * config["device"]["step"],
    )
    return "\n".join([*lines, text])


def _settings(rows: Any) -> list[tuple[str, float]]:
    return list(dict.fromkeys((row["job"], row["tpot_s"]) for row in rows))


def _best(config: Tree, summary: Tree) -> list[str]:
    found = {(row["job"], row["tpot_s"], row["arm"]): row for row in summary["best"]}
    arms = list(dict.fromkeys(row["arm"] for row in summary["rows"]))
    rows = []
    for job, tpot_s in _settings(summary["rows"]):
        base = found.get((job, tpot_s, "base-pd"))
        for arm in arms:
            best = found.get((job, tpot_s, arm))
            cells = ["-"] * 5
            if best is not None:
                cells = [
                    f"{best['load_rps']:g}",
                    f"{best['offline_tokens_per_s']:,.0f}",
                    _ratio(best, base),
                    f"{best['violations']:.1%}",
                    "-" if "relaxed_busy" not in best else _busy(best),
                ]
            rows.append([job, f"{tpot_s:g}", arm, *cells])
    head = ["job", "TPOT s", "arm", "at load, requests/s", "offline tokens/s", "of base P/D"]
    return md_table([*head, "broken", "relaxed / strict busy"], rows)


def _busy(row: Tree) -> str:
    return f"{row['relaxed_busy']:.0%} / {row['strict_busy']:.0%}"


def _ratio(row: Tree, base: Tree | None) -> str:
    if base is None or not base["offline_tokens_per_s"]:
        return "-"
    return f"{row['offline_tokens_per_s'] / base['offline_tokens_per_s']:.2f}x"


def _shape(summary: Tree) -> list[str]:
    """Which arms ever broke more promises than allowed: the shape of the paper's figure."""
    rows = []
    for job, tpot_s in _settings(summary["rows"]):
        here = [r for r in summary["rows"] if (r["job"], r["tpot_s"]) == (job, tpot_s)]
        top = max(row["load_rps"] for row in here)
        worst = {row["arm"]: row["violations"] for row in here if row["load_rps"] == top}
        told = ", ".join(f"{arm} {share:.1%}" for arm, share in worst.items())
        rows.append(f"- {job}, TPOT {tpot_s:g} s: broken at {top:g} requests/s: {told}")
    return rows


def _loads(summary: Tree, job: str, tpot_s: float) -> list[str]:
    rows = [
        [
            row["arm"],
            f"{row['load_rps']:g}",
            f"{row['violations']:.1%}",
            f"{row['offline_tokens_per_s']:,.0f}",
            f"{row['offline_done']:,} of {row['offline_came']:,}",
            f"{row['ttft_p99_s']:.2f}",
            f"{row['tpot_p99_s'] * 1000:.0f}",
            *(f"{row[key]:,}" if key in row else "-" for key in _COUNTS),
        ]
        for row in summary["rows"]
        if (row["job"], row["tpot_s"]) == (job, tpot_s)
    ]
    head = ["arm", "load", "broken", "offline tokens/s", "done", "TTFT p99 s", "TPOT p99 ms"]
    return md_table([*head, "pulls", "parks", "evictions", "interrupts", "recomputed"], rows)


_COUNTS = ("num_pulls", "num_parks", "num_evictions", "num_interrupts", "recomputed_tokens")
