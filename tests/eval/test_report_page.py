"""The report's page, from small results made here and from those that are committed."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import orjson
import pytest

from echo_sgl.types import Task
from eval.load.records import Record, Status, write_records
from eval.paths import RESULTS_DIR
from eval.report_page import run as report_page
from eval.report_page.figures import binned, median
from eval.report_page.markdown import to_html
from eval.report_page.plots import bars, lines, points
from eval.report_page.run import (
    SECTIONS,
    PdfError,
    ReportError,
    build_page,
    command_of,
    main,
    module_of,
    write_pdf,
)

VOID = {"meta", "br", "hr"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed in the wrong place or never."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(page: str) -> list[str]:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    return parser.tags


def write_result(folder: Path, summary: Any, *, command: str, markdown: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(orjson.dumps({"command": command}))
    (folder / "summary.json").write_bytes(orjson.dumps(summary))
    (folder / "summary.md").write_text(markdown)
    return folder


def figures(value: float | None) -> dict[str, Any]:
    return {"median": value, "min": value, "max": value}


def ablation_arm(attainment: float, harvest: float | None) -> dict[str, Any]:
    return {
        "attainment": {"together": figures(attainment)},
        "harvest_tokens_per_s": figures(harvest),
        "vs_stock_alone": {"ttft_ms_p99": figures(1.2), "tpot_ms_p99": figures(None)},
        "online_together": {"hit_ratio": figures(0.0)},
        "offline_together": {"hit_ratio": figures(0.5)},
    }


def answer(number: int, task: Task, *, end_s: float) -> Record:
    record = Record(str(number), task, scheduled_s=end_s - 1, prompt_tokens=100, cached_tokens=50)
    record.end(Status.OK, end_s)
    return record


def test_an_empty_folder_gives_a_page_that_names_every_command(tmp_path: Path) -> None:
    page = build_page(tmp_path, tmp_path / "bench.json")
    tags_of(page)
    for section in SECTIONS:
        assert section.title in page and section.command in page
    assert page.count("Not measured yet") == len(SECTIONS)
    assert "make bench" in page


def test_an_ablation_shows_its_command_its_plots_and_its_tables(tmp_path: Path) -> None:
    arms = {"stock": ablation_arm(0.5, 900.0), "echo": ablation_arm(0.99, 1234.0)}
    arms["broken"] = ablation_arm(0.1, None)
    folder = write_result(
        tmp_path / "ablation-small",
        {"arms": arms},
        command="python -m eval.ablation --workload small",
        markdown="# A\n\n    python -m x\n\n## B\n\n| arm | v |\n| --- | --- |\n| echo | 7 |",
    )
    records = [answer(n, Task.ONLINE, end_s=float(n + 1)) for n in range(20)]
    records += [answer(n, Task.OFFLINE, end_s=float(n + 1)) for n in range(20)]
    write_records(folder / "raw" / "echo-together-1.jsonl.gz", records)
    page = build_page(tmp_path, tmp_path / "bench.json")
    assert "python -m eval.ablation --workload small" in page
    assert page.count("Not measured yet") == len(SECTIONS) - 1
    assert tags_of(page).count("svg") == 6  # three of the summary, three over time
    assert "<td>echo</td>" in page and '<td class="n">7</td>' in page
    assert "Offline hits so far" in page


def test_the_reserve_shows_predicted_and_true_peaks_over_time(tmp_path: Path) -> None:
    row = {"trace": "t", "predictor": "peak", "coverage": 1.0, "over_reservation": 0.5}
    command = "python -m eval.reserve_coverage"
    folder = write_result(tmp_path / "reserve", {"rows": [row]}, command=command)
    assert tags_of(build_page(tmp_path, tmp_path / "bench.json")).count("svg") == 2
    config = {"command": command, "curve_step_s": 20}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    curves = {"t": {"use": [5, 6, 7], "peak predicted": [None, 9, 9]}}
    (folder / "curves.json").write_bytes(orjson.dumps(curves))
    page = build_page(tmp_path, tmp_path / "bench.json")
    assert tags_of(page).count("svg") == 3
    assert "predicted and true: t" in page and "peak predicted" in page


def test_simulated_fleets_show_both_figures_of_each_setting(tmp_path: Path) -> None:
    rows = [
        {
            "job": "ooc",
            "tpot_s": tpot_s,
            "arm": arm,
            "load_rps": load,
            "violations": 0.01 * load,
            "offline_tokens_per_s": 100.0 * load,
        }
        for tpot_s in (0.1, 0.05)
        for arm in ("base-pd", "ooco")
        for load in (0.0, 1.0)
    ]
    write_result(tmp_path / "fleet", {"rows": rows}, command="python -m eval.fleet")
    page = build_page(tmp_path, tmp_path / "bench.json")
    for setting in ("ooc, TPOT 0.1 s", "ooc, TPOT 0.05 s"):
        assert f"Broken promises under offline load: {setting}" in page
        assert f"Offline work: {setting}" in page
    tags_of(page)


def test_shared_blocks_show_one_plot_a_job(tmp_path: Path) -> None:
    rows = [
        {"job": job, "page_tokens": page, "layout": layout, "offline_tokens_per_s": 50.0 + page}
        for job in ("bros", "ooc")
        for page, layout in ((1, "park"), (16, "park"), (16, "shared"))
    ]
    write_result(tmp_path / "blocks", {"rows": rows}, command="python -m eval.shared_blocks")
    page = build_page(tmp_path, tmp_path / "bench.json")
    assert page.count("Offline work of each layout: ") == 2 * page.count(
        "Offline work of each layout: bros"
    )
    assert "Offline work of each layout: ooc" in page


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    folder = write_result(tmp_path / "cache-x", {"arms": {}}, command="python -m eval.cache x")
    for text in ("{", '{"other": 1}', "[]"):
        (folder / "summary.json").write_text(text)
        with pytest.raises(ReportError, match=r"cache-x/summary.json cannot be shown"):
            build_page(tmp_path, tmp_path / "bench.json")
    with pytest.raises(SystemExit, match="cache-x"):
        main(["--results", str(tmp_path), "--output", str(tmp_path / "report.html")])
    assert not (tmp_path / "report.html").exists()


def test_results_of_an_unknown_module_are_shown_as_they_are(tmp_path: Path) -> None:
    write_result(tmp_path / "new", {}, command="python -m eval.new", markdown="told <so>")
    page = build_page(tmp_path, tmp_path / "bench.json")
    assert "Other results" in page and "told &lt;so&gt;" in page


def test_benchmarks_are_a_table(tmp_path: Path) -> None:
    bench = {"name": "split | x", "ours": 1.5, "stock": None, "ratio": None, "unit": "us"}
    path = tmp_path / "bench.json"
    path.write_bytes(orjson.dumps([bench | {"n": 200, "machine": "m"}]))
    page = build_page(tmp_path, path)
    assert "<td>split / x</td>" in page and '<td class="n">1.5</td>' in page


def one_of_each_module(into: Path) -> Path:
    """A folder of committed results: of each module that made some, the smallest."""
    by_module: dict[str, list[Path]] = {}
    whole = (one for one in RESULTS_DIR.iterdir() if one.suffix != ".part")
    for folder in whole:
        by_module.setdefault(module_of(command_of(folder)), []).append(folder)
    assert {name for section in SECTIONS for name in section.modules} <= set(by_module)
    into.mkdir()
    for folders in by_module.values():
        smallest = min(folders, key=lambda folder: (folder / "summary.json").stat().st_size)
        (into / smallest.name).symlink_to(smallest)
    return into


def test_committed_results_make_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    output, results = tmp_path / "report.html", one_of_each_module(tmp_path / "results")
    command = [sys.executable, "-m", "eval.report_page", "--no-pdf", "--results", str(results)]
    subprocess.run([*command, "--output", str(output)], check=True, capture_output=True)
    page = output.read_text()
    tags = tags_of(page)
    assert tags.count("svg") >= 15 and "img" not in tags and "script" not in tags
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert links and all(link.startswith("#") for link in links)
    for folder in results.iterdir():
        assert f"<h3>{folder.name}</h3>" in page


FIND_PDF = "for one; do case $one in --print-to-pdf=*) pdf=${one#*=};; esac; done\n"
TROUBLES = {
    "": "no PDF: that needs a browser; none of chromium, ",
    "echo first >&2; echo cannot open display >&2; exit 3": (
        "chromium failed with exit code 3: first\ncannot open display\n"
    ),
    "exit 3": "chromium failed with exit code 3: it told nothing\n",
    "echo half > $pdf; kill -9 $$": "chromium failed with exit code -9: ",
    "echo half > $pdf; exec /bin/sleep 60": "chromium took longer than 2 s\n",
    "exit 0": "ended without an error and wrote nothing: it told nothing\n",
    ": > $pdf; echo why >&2": "wrote nothing: why\n",
}


def printed(
    folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the command says when `script` is the only browser, and an older PDF lies there."""
    browsers = folder / "bin"
    browsers.mkdir()
    if script:
        (browsers / "chromium").write_text(f"#!/bin/sh\n{FIND_PDF}{script}\n")
        (browsers / "chromium").chmod(0o755)
    monkeypatch.setenv("PATH", str(browsers))
    monkeypatch.setattr(report_page, "PDF_TIMEOUT_S", 2.0)
    (folder / "report.pdf").write_text("older")
    results = folder / "results"
    results.mkdir()
    main(["--results", str(results), "--output", str(folder / "report.html")])
    return capsys.readouterr().out


@pytest.mark.parametrize("script", TROUBLES)
def test_a_page_that_is_not_printed_says_why_and_leaves_no_older_pdf(
    tmp_path: Path,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert TROUBLES[script] in printed(tmp_path, script, monkeypatch, capsys)
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "report.pdf").exists()


def test_a_page_is_printed_in_place_of_an_older_pdf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = printed(tmp_path, "echo new > $pdf; echo noise >&2", monkeypatch, capsys)
    assert told.endswith(f"{tmp_path / 'report.pdf'}\n")
    assert (tmp_path / "report.pdf").read_text() == "new\n"


def test_an_older_pdf_that_cannot_go_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.pdf").mkdir()
    with pytest.raises(PdfError, match=r"report\.pdf: "):
        write_pdf(tmp_path / "report.html")


def test_a_page_is_not_named_as_its_pdf(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--results", str(tmp_path), "--output", str(tmp_path / "report.pdf")])


def test_markdown_is_escaped_and_kept_apart() -> None:
    text = "# T <1>\n\n    a < b\n    c\n\n- `x*y*z` and *so*\n- two\n  or more\n\nend | of\nit"
    assert to_html(text) == (
        "<h3>T &lt;1&gt;</h3>\n<pre>a &lt; b\nc</pre>\n"
        "<ul><li><code>x*y*z</code> and <em>so</em></li><li>two or more</li></ul>\n"
        "<p>end | of it</p>"
    )


def text_of(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]


def test_bars_show_their_figures_and_cut_what_would_flatten_the_rest() -> None:
    svg = bars("T & U", ["a", "b", "c"], {"x": [1.0, None, 2.0], "y": [1.5, 5000.0, 3.0]}, unit="s")
    assert {"a", "b", "c", "x", "y", "5,000", "1.5"} <= set(text_of(svg))
    assert 'aria-label="T &amp; U"' in svg
    assert "1000" not in text_of(svg)  # the axis ends at thirty times the median
    assert svg == bars(
        "T & U", ["a", "b", "c"], {"x": [1.0, None, 2.0], "y": [1.5, 5000.0, 3.0]}, unit="s"
    )


def test_plots_without_a_single_figure_are_drawn_empty() -> None:
    for svg in (
        bars("t", ["a"], {"x": [None]}, unit="%"),
        lines("t", {"x": ([], [])}, x="s", unit="y"),
        points("t", {}, x="x, %", unit="y"),
    ):
        assert "t" in text_of(svg)


def test_bins_hold_amounts_per_second() -> None:
    places, values = binned([(0.0, 3.0), (23.9, 6.0), (24.0, 9.0), (-1.0, 9.0)], end_s=24.0)
    assert places[0] == 0.5 and values[0] == 3.0 and values[-1] == 6.0
    assert sum(values) == 9.0


def test_a_figure_that_is_not_there_is_none() -> None:
    tree = {"a": {"median": None}, "b": {"c": {"median": 2}}, "d": float("nan")}
    assert median(tree, "b", "c") == 2.0
    assert [median(tree, "a"), median(tree, "b", "x"), median(tree, "d")] == [None] * 3
