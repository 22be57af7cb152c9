"""The results of `eval.two_servers` for people."""

from __future__ import annotations

from typing import Any


def markdown(summary: dict[str, Any]) -> str:
    """Arms as a table, and what the batch service cost."""
    head = (
        f"# One job on one server and on two\n\n{summary['lines']} questions about files of "
        f"Python's library, at most {summary['window_lines']} lines in each server, every arm on\n"
        f"empty caches. {summary['machine']}: two servers share them, and one thread each, so two "
        "are not\ntwice as fast. Seconds are of the whole command, `batch run`: start, check, "
        "upload, work, download.\nIn every arm the output held each line exactly once and no line "
        "failed.\n\n"
        "| servers | seconds | lines/s | tokens/s | hits | lines finished by each | load |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    rows = "".join(
        f"| {row['arm']} | {row['seconds']:.1f} | {row['lines_per_s']:.1f} | "
        f"{row['tokens_per_s']:,.0f} | {row['hit_ratio']:.1%} | "
        f"{' + '.join(map(str, row['lines_by_server']))} | {row['machine_load']:.0f} |\n"
        for row in summary["arms"]
    )
    notes = (
        "\nA killed server's lines were counted just before the kill. With PostgreSQL the others "
        "take over its\nlines when its lease of 30 s has run out; with `--url` at once. A load of "
        "more than about 3 is of other\nprocesses on the machine, and makes the seconds longer.\n\n"
    )
    return head + rows + notes + _routed(summary["router"]) + _cost(summary)


def _routed(router: dict[str, Any] | None) -> str:
    """What passes SGLang's router."""
    if router is None:
        return ""
    statuses = ", ".join(f"`{what}` {status}" for what, status in router["statuses"].items())
    classes = "with" if router["metrics_by_class"] else "without"
    return (
        f"Through sglang-router {router['version']}: {statuses}; its `/engine_metrics` shows both "
        f"servers' metrics\n{classes} their classes.\n\n"
    )


def _cost(summary: dict[str, Any]) -> str:
    """CPU time of the HTTP process, with the dispatcher and with a client instead of it."""
    service, client = summary["arms"][:2]
    lines = summary["lines"]
    parts = [
        f"{row['http_cpu_s'] / row['seconds']:.1%} of a core ({1e3 * row['http_cpu_s'] / lines:.1f}"
        f" ms a line) {how}"
        for row, how in (
            (service, "with the job in the batch service"),
            (client, "with the same lines from a client"),
        )
    ]
    return (
        "CPU time of one server's HTTP process (tokenizer, routes, dispatcher, store) over a run: "
        f"{parts[0]},\n{parts[1]}.\n"
    )
