"""One self-contained HTML page of all committed results: `python -m eval.report_page`.

Reads eval/results/* and build/bench.json, where that is there, and writes build/report.html.
Every part names the command that made it; a part without results names the one that would.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from echo_sgl.errors import EchoError
from eval.paths import BUILD_DIR, RESULTS_DIR
from eval.report_page.figures import PLOTS
from eval.report_page.markdown import to_html

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PDF_TIMEOUT_S = 120.0
_MODULE = re.compile(r"eval\.(\w+)")
T = TypeVar("T")


class ReportError(EchoError):
    """A result that cannot be shown; the message names its file."""


class PdfError(EchoError):
    """The page could not be printed; the message says why."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: the results of some modules of `eval`, and how to get them."""

    title: str
    about: str
    modules: tuple[str, ...]
    command: str


SECTIONS = (
    Section(
        "Online load and harvest",
        "An online trace and an offline job, alone and together.",
        ("corun",),
        "python -m eval.corun --arms stock,stock-priority,echo --name NAME",
    ),
    Section(
        "Ablation",
        "Schedulers under the same promises: attainment and what the job got.",
        ("ablation",),
        "python -m eval.ablation --workload azure-qmsum",
    ),
    Section(
        "Online requests alone",
        "What Echo costs while no job runs: stock SGLang and Echo in turns.",
        ("online_only",),
        "python -m eval.online_only",
    ),
    Section(
        "A wrong estimator",
        "The same with predictions that are wrong on purpose.",
        ("estimator_error",),
        "python -m eval.estimator_error",
    ),
    Section(
        "Fidelity",
        "The simulator beside real servers: the same requests, figure beside figure.",
        ("fidelity",),
        "python -m eval.fidelity",
    ),
    Section(
        "Cache",
        "What the orders of requests and of eviction find in the cache.",
        ("cache",),
        "python -m eval.cache offline",
    ),
    Section(
        "Burst reserve",
        "Whether the predicted peak of online KV use covered the one that came.",
        ("reserve_coverage",),
        "python -m eval.reserve_coverage",
    ),
    Section(
        "Simulated fleets",
        "Simulations under an assumed profile: offline load beside an online trace on two "
        "instances, and KV blocks that both classes share. No server ran.",
        ("fleet", "shared_blocks", "slack_use", "unpromised", "lots"),
        "python -m eval.fleet",
    ),
    Section(
        "Step times",
        "How true the models of a step's time are on live traffic.",
        ("step_times",),
        "python -m eval.step_times",
    ),
    Section(
        "Kills and soak",
        "The batch service under SIGKILL, alone and on two servers; long mixed load.",
        ("crash", "two_servers", "soak"),
        "python -m eval.crash",
    ),
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h2 { border-bottom: 2px solid #888; margin-top: 3rem; }
h3 { margin-top: 2rem; }
nav a { margin-right: 1.2rem; }
pre { background: #f2f2f2; padding: .6rem; white-space: pre-wrap; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
.plots svg { max-width: 32rem; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }
.n { text-align: right; }
details > summary { cursor: pointer; margin: .8rem 0; }
.missing { color: #555; }
@media print {
  details > summary { display: none; }
  h2 { break-before: page; }
  .plots svg { break-inside: avoid; }
}
"""


def build_page(results_dir: Path, bench_path: Path) -> str:
    """The whole page.

    Errors: `ReportError` when a file of the results cannot be read.
    """
    folders = sorted(path for path in results_dir.glob("*") if (path / "summary.json").exists())
    by_module: dict[str, list[Path]] = {}
    for folder in folders:
        by_module.setdefault(module_of(command_of(folder)), []).append(folder)
    parts = [
        section_html(
            section, [path for name in section.modules for path in by_module.get(name, ())]
        )
        for section in SECTIONS
    ]
    parts.append(bench_html(bench_path))
    known = {name for section in SECTIONS for name in section.modules}
    others = [path for name, found in by_module.items() if name not in known for path in found]
    if others:
        parts.append(f"<h2>Other results</h2>{''.join(map(folder_html, others))}")
    titles = [*(section.title for section in SECTIONS), "Against stock code"]
    links = "".join(f'<a href="#{_anchor(title)}">{html.escape(title)}</a>' for title in titles)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>echo-sgl: measured</title><style>{STYLE}</style></head><body>"
        f"<h1>echo-sgl: what was measured</h1>"
        "<p>Every part stands under the command that made it. Hatched bars are cut; their true "
        f"figure is on them.</p><nav>{links}</nav>{''.join(parts)}</body></html>\n"
    )


def command_of(folder: Path) -> str:
    """The command that made a folder: in its config, at the head of its summary, or by its name."""
    config = folder / "config.json"
    if config.exists():
        return str(_read(config, lambda tree: tree["command"]))
    summary = folder / "summary.md"
    lines = summary.read_text(encoding="utf-8").splitlines() if summary.exists() else []
    indented = (line.strip() for line in lines if line.startswith("    python"))
    return next(indented, f"python -m eval.{folder.name.replace('-', '_')}")


def module_of(command: str) -> str:
    """Which module of `eval` a command runs; empty when it runs none."""
    found = _MODULE.search(command)
    return found[1] if found else ""


def section_html(section: Section, folders: Sequence[Path]) -> str:
    """A part with its results, or with the command that makes them."""
    body = "".join(map(folder_html, folders)) or (
        '<p class="missing">Not measured yet. This command measures it:</p>'
        f"<pre>{html.escape(section.command)}</pre>"
    )
    head = f'<h2 id="{_anchor(section.title)}">{html.escape(section.title)}</h2>'
    return f"{head}<p>{html.escape(section.about)}</p>{body}"


def folder_html(folder: Path) -> str:
    """One result: its command, its plots and its tables."""
    command = command_of(folder)
    draw = PLOTS.get(module_of(command))
    plots = _read(folder / "summary.json", lambda tree: draw(folder, tree)) if draw else []
    return (
        f"<h3>{html.escape(folder.name)}</h3><pre>{html.escape(command)}</pre>"
        f'<div class="plots">{"".join(plots)}</div>'
        f"<details open><summary>Tables</summary>"
        f'<div class="scroll">{_tables(folder)}</div></details>'
    )


def bench_html(path: Path) -> str:
    """The small benchmarks, which are not committed: they belong to one machine."""
    title = "Against stock code"
    head = f'<h2 id="{_anchor(title)}">{title}</h2><pre>make bench</pre>'
    if not path.exists():
        return (
            f'{head}<p class="missing">{html.escape(path.name)} is not there; run the command.</p>'
        )
    columns = ("name", "ours", "stock", "ratio", "unit", "n", "machine")

    def rows(benches: list[Mapping[str, Any]]) -> str:
        return "\n".join(
            "| " + " | ".join(_shown(bench[column]) for column in columns) + " |"
            for bench in benches
        )

    table = "\n".join(
        [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns), _read(path, rows)]
    )
    return f'{head}<div class="scroll">{to_html(table)}</div>'


def write_pdf(page: Path) -> Path:
    """Print the page beside itself with a browser that is there; an older print goes first.

    Errors: `PdfError` when there is no browser, or it does not print; then there is no PDF.
    """
    pdf = page.with_suffix(".pdf")
    try:
        # Without a new one it would pass for a print of this page.
        pdf.unlink(missing_ok=True)
        if problem := _print_problem(page, pdf):
            pdf.unlink(missing_ok=True)  # it may be half of one
            raise PdfError(problem)
    except OSError as error:
        raise PdfError(f"{error.filename or pdf}: {error.strerror}") from error
    return pdf


def _print_problem(page: Path, pdf: Path) -> str | None:
    """Have a browser print; why that did not work, or None."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return f"that needs a browser; none of {', '.join(BROWSERS)} is installed"
    # A page of our own without scripts needs no sandbox, which root and containers do not have.
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    command = [browser, *flags, f"--print-to-pdf={pdf}", page.resolve().as_uri()]
    try:
        result = subprocess.run(command, check=False, capture_output=True, timeout=PDF_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{browser} took longer than {PDF_TIMEOUT_S:g} s"
    told = result.stderr.decode(errors="replace").strip()[-500:] or "it told nothing"
    if result.returncode:
        return f"{browser} failed with exit code {result.returncode}: {told}"
    if not pdf.exists() or not pdf.stat().st_size:
        return f"{browser} ended without an error and wrote nothing: {told}"
    return None


def _tables(folder: Path) -> str:
    """The summary without its title and command, which stand above; else its plain figures."""
    path = folder / "summary.md"
    if not path.exists():
        return to_html("\n".join(_facts(_read(folder / "summary.json", lambda tree: tree))))
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(("# ", "    "))]
    return to_html("\n".join(kept), heading=3)


def _facts(tree: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{key}: ")
        else:
            yield f"- {prefix}{key}: {_shown(value)}"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int | float) else str(value).replace("|", "/")


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def _read(path: Path, use: Callable[[Any], T]) -> T:
    """What a function makes of a JSON file.

    Errors: `ReportError` when it is no JSON, or lacks what the function needs.
    """
    try:
        return use(orjson.loads(path.read_bytes()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ReportError(
            f"{path} cannot be shown ({type(error).__name__}: {error}); measure it again, or "
            "remove its folder"
        ) from error


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.report_page", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder of results")
    parser.add_argument("--bench", type=Path, default=BUILD_DIR / "bench.json")
    parser.add_argument("--output", type=Path, default=BUILD_DIR / "report.html")
    parser.add_argument("--no-pdf", action="store_true", help="even where a browser could print")
    given = parser.parse_args(argv)
    if given.output.suffix == ".pdf":
        parser.error(f"--output is {given.output}; name the page .html, its PDF is made beside it")
    if not given.results.is_dir():
        parser.error(f"--results {given.results} is no folder")
    try:
        page = build_page(given.results, given.bench)
    except ReportError as error:
        sys.exit(f"report: {error}")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(page, encoding="utf-8")
    print(f"{given.output} ({len(page) / 1e6:.1f} MB)")
    if not given.no_pdf:
        try:
            print(write_pdf(given.output))
        except PdfError as error:
            print(f"no PDF: {error}")
