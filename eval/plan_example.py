"""The example of `echo-sgl plan` in docs/planning.md: `python -m eval.plan_example`.

Writes five minutes of the Azure conversation trace, at a tenth of its rate, and the QMSum job to
build/plan-example/, and runs the planner on them under the profile of a CPU server.
"""

from __future__ import annotations

import csv
import gzip
import subprocess
import sys
from pathlib import Path

from eval.paths import BUILD_DIR, PROFILES_DIR
from eval.servers.models import demo_model
from eval.workloads import find_data
from eval.workloads.jobs import text_set_files, text_set_lines, write_job
from eval.workloads.prompts import load_tokenizer

FOLDER = BUILD_DIR / "plan-example"
PROFILE = PROFILES_DIR / "base-cpu.json"
TRACE_S, EVERY, DOCUMENT_TOKENS = 300.0, 10, 2000
PLAN_ARGS = (
    *("--slo", "ttft_p99=2500ms,tpot_p99=150ms"),
    *("--kv-tokens", "20000,40000"),
    *("--instances", "1,2"),
    *("--max-running-requests", "16"),
    *("--chunked-prefill-tokens", "512"),
    "--disable-overlap-schedule",
    *("--picture", str(FOLDER / "plan.svg")),
    *("--price-per-hour", "0.1"),
)


def write_trace(path: Path) -> None:
    """Every tenth request of the trace's first five minutes."""
    with gzip.open(find_data("azure_conv_2023.csv.gz"), "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if float(row["t_s"]) < TRACE_S]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows[::EVERY])


def main() -> None:
    """Exit with the planner's code."""
    trace, jobs = FOLDER / "online.csv", FOLDER / "jobs.jsonl"
    write_trace(trace)
    tokenizer = load_tokenizer(str(demo_model("base")))
    files = text_set_files("qmsum_val")
    lines = text_set_lines(files, tokenizer, model="base", document_tokens=DOCUMENT_TOKENS)
    write_job(jobs, lines)
    inputs = ("--trace", str(trace), "--jobs", str(jobs), "--profile", str(PROFILE))
    command = [sys.executable, "-m", "echo_sgl.cli", "plan", *inputs, *PLAN_ARGS]
    sys.exit(subprocess.call(command))


if __name__ == "__main__":
    main()
