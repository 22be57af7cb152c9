"""The readable side of the cache experiments: summary.md, its targets said in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Tree = Mapping[str, Any]

INFINITE_TARGET = 0.97
ONLINE_TARGET_POINTS = 2.0
OFFLINE_TARGET = 0.95
# What counts as equal in the control: a run's hits and time vary by about as much.
CONTROL_HIT_POINTS = 0.5
CONTROL_TIME = 1.05

EQUAL_TOKENS = (
    "Bounds count hits of one request at a time with pages of one token, from the same token "
    "ids and the same pool. `infinite` forgets nothing; `belady` evicts what is needed last and "
    "knows all requests, in the order of the job's file (stock arms) or sorted by prefix (the "
    "order that psm arms take them in, but for those taken by age)."
)


def summary_markdown(config: Tree, arms: Mapping[str, Tree]) -> str:
    """Setting, table, targets; every figure is the median over repetitions [min-max]."""
    experiment = config["options"]["experiment"]
    sections = {"overlap": _overlap, "burst": _burst}.get(experiment, _offline)
    lines = [f"# Cache: {experiment}, `{config['job']}`", "", f"    {config['command']}", ""]
    return "\n".join([*lines, *_setting(config), "", *sections(config, arms), ""])


def _setting(config: Tree) -> list[str]:
    options, load = config["options"], config["load"]
    lines = [
        f"- machine: {config['machine']}; date: {config['date']}",
        f"- SGLang {config['sglang']}, torch {config['torch']}, Python {config['python']}",
        f"- model: {options['size']}; KV pool {load['pool_tokens']} tokens ({load['pool_note']}); "
        f"{options['max_running_requests']} running requests",
        f"- offline: {load['lines']} lines in mixed order, {load['prompt_tokens']} prompt tokens, "
        f"answers of at most {options['max_answer_tokens'] or 'the recorded number of'} tokens, "
        f"{options['window']} in flight",
        f"- {options['repetitions']} server starts per arm",
    ]
    if load["turns"]:
        lines.append(
            f"- online: {load['turns']} turns of {load['sessions']} conversations "
            f"({options['sessions']}), {options['sessions_at_once']} at a time"
        )
    if load["online_requests"]:
        lines.append(
            f"- online: {load['online_requests']} requests, {options['rate_rps']:g}/s, "
            f"{options['burst_factor']:g} times as many for {options['burst_s']:g} s "
            f"after every {options['steady_s']:g} s, {options['bursts']} times"
        )
    return lines


def _offline(config: Tree, arms: Mapping[str, Tree]) -> list[str]:
    bounds, total = config["bounds"], config["load"]["prompt_tokens"]
    infinite = bounds["infinite"]
    rows = [
        [f"*{name}*", f"{hits / total:.1%}", f"{_of(hits, infinite):.1%}", "", "", "", ""]
        for name, hits in bounds.items()
    ]
    for name, tree in arms.items():
        shares = [_percent(tree[key]) for key in ("hit_ratio", "of_infinite")]
        rates = [_spread(tree[key], "{:,.0f}") for key in ("evicted_tokens",)]
        rates += [_spread(tree["time_s"], "{:.1f}"), _spread(tree["tokens_per_s"], "{:,.0f}")]
        rows.append([name, *shares, *rates, _failed(tree)])
    head = ["arm", "hit ratio", "of infinite", "evicted tokens", "time s", "tokens/s", "failed"]
    targets = _control_targets if config["options"]["experiment"] == "control" else _hit_targets
    return [*_table(head, rows), "", *targets(arms), "", EQUAL_TOKENS]


def _hit_targets(arms: Mapping[str, Tree]) -> list[str]:
    return _targets(
        f"at least {INFINITE_TARGET:.0%} of the infinite cache's hits",
        {name: tree["of_infinite"]["median"] for name, tree in _echo(arms).items()},
        lambda value: value >= INFINITE_TARGET,
        "{:.1%}",
    )


def _control_targets(arms: Mapping[str, Tree]) -> list[str]:
    """Against the best stock arm in each respect, which need not be the same one."""
    stock = [tree for name, tree in arms.items() if name.startswith("stock")]
    if not stock:
        return ["No stock arm was run: nothing to compare with."]
    best_hits = max(tree["hit_ratio"]["median"] or 0.0 for tree in stock)
    best_s = min(tree["time_s"]["median"] for tree in stock)
    mine = _echo(arms).items()
    points = {name: 100 * ((t["hit_ratio"]["median"] or 0.0) - best_hits) for name, t in mine}
    times = {name: _of(t["time_s"]["median"], best_s) for name, t in mine}
    return [
        *_targets(
            f"hit ratio not more than {CONTROL_HIT_POINTS:g} points below the best stock arm's",
            points,
            lambda value: value >= -CONTROL_HIT_POINTS,
            "{:+.1f} points",
        ),
        *_targets(
            f"time not above {CONTROL_TIME:g} of the fastest stock arm's",
            times,
            lambda value: value <= CONTROL_TIME,
            "{:.2f}x",
        ),
    ]


def _overlap(_config: Tree, arms: Mapping[str, Tree]) -> list[str]:
    rows = []
    for name, tree in arms.items():
        for task in ("online", "offline"):
            part = tree[task]
            shares = [_percent(part[key]) for key in ("alone", "together", "of_alone")]
            counts = [_spread(part[key], "{:.0f}") for key in ("matched", "errors")]
            rows.append([name, task, *shares, *counts, _spread(tree["together_s"], "{:.0f}")])
    points = {
        name: None if (value := tree["online"]["difference"]["median"]) is None else 100 * value
        for name, tree in arms.items()
    }
    shares_of_alone = {name: tree["offline"]["of_alone"]["median"] for name, tree in arms.items()}
    head = ["arm", "class", "hit ratio alone", "together", "together of alone", "requests"]
    return [
        *_table([*head, "errors", "together s"], rows),
        "",
        *_targets(
            f"online hit ratio together within {ONLINE_TARGET_POINTS:g} points of alone",
            points,
            lambda value: value >= -ONLINE_TARGET_POINTS,
            "{:+.1f} points",
        ),
        *_targets(
            f"offline hit ratio together at least {OFFLINE_TARGET:.0%} of its own alone",
            shares_of_alone,
            lambda value: value >= OFFLINE_TARGET,
            "{:.1%}",
        ),
        "",
        "Together ends with the first class that is through; the ratios are over the requests "
        "that were answered both in it and alone.",
    ]


def _burst(_config: Tree, arms: Mapping[str, Tree]) -> list[str]:
    rows = []
    for name, tree in arms.items():
        waits = [
            _spread(tree[part]["ttft_ms"][point], "{:,.0f}")
            for part in ("steady", "burst")
            for point in ("p50", "p99")
        ]
        offline = tree["offline"]
        keys = ("retractions", "recomputed_tokens", "computed_again", "ok", "tokens_per_s")
        rows.append([name, *waits, *(_spread(offline[key], "{:,.0f}") for key in keys)])
    head = ["arm", "steady TTFT ms p50", "p99", "burst TTFT ms p50", "p99", "offline retractions"]
    head += ["recomputed tokens", "prefix tokens computed again", "lines answered", "tokens/s"]
    dry = [name for name, tree in arms.items() if tree["offline"]["ran_dry"]["max"]]
    return [
        *_table(head, rows),
        "",
        *(
            [f"The job ran dry on {', '.join(dry)}: its end saw no offline work.", ""]
            if dry
            else []
        ),
        "Recomputed tokens are the server's own count, retracted requests included. Prefix tokens "
        "computed again are prompt tokens of answered lines beyond those that any cache has to "
        "compute once; they may be negative by what unanswered lines computed.",
    ]


def _targets(
    what: str, values: Mapping[str, Any], is_met: Callable[[float], bool], form: str
) -> list[str]:
    said = [
        f"{name} -" if value is None
        else f"{name} {form.format(value)} ({'met' if is_met(value) else 'missed'})"
        for name, value in values.items()
    ]  # fmt: skip
    return [f"- target: {what}: {', '.join(said)}"] if said else []


def _echo(arms: Mapping[str, Tree]) -> dict[str, Tree]:
    return {name: tree for name, tree in arms.items() if not name.startswith("stock")}


def _failed(tree: Tree) -> str:
    return f"{tree['error']['max'] + tree['cancelled']['max']:.0f}"


def _of(value: float, base: float) -> float:
    return value / base if base else 0.0


def _percent(value: Tree) -> str:
    return _spread(value, "{:.1%}")


def _spread(value: Tree, form: str) -> str:
    if value["median"] is None:
        return "-"
    median, low, high = (form.format(value[key]) for key in ("median", "min", "max"))
    return median if low == high else f"{median} [{low}-{high}]"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
