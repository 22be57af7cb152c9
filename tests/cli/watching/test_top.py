"""`echo-sgl top`: its figures, its screen, and its end."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from echo_sgl.cli.watching.looks import Look, looks
from echo_sgl.cli.watching.samples import Samples
from echo_sgl.cli.watching.top_screen import screen
from echo_sgl.types import Task
from eval.servers.server import Server, free_port
from tests.cli.conftest import StartCli
from tests.cli.jobs import run_cli
from tests.cli.metrics_page import Pages, metrics_page, serving


def shown(look: Look, width: int = 140) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen("http://h:1", look))
    return console.export_text()


def row(text: str, name: str) -> list[str]:
    """The words of the first row that begins so."""
    line = next(line for line in text.splitlines() if line.strip().startswith(name))
    return line.split()


@pytest.fixture
def page() -> Iterator[Pages]:
    with serving(metrics_page()) as pages:
        yield pages


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.02)


def test_samples_are_found_by_labels_and_summed() -> None:
    samples = Samples.parse(metrics_page())
    assert samples.total("requests_total", task="online") == 11
    assert samples.total("requests_total", outcome="expired") == 1
    assert math.isnan(samples.total("requests_total", task="offline"))
    assert samples.largest("pool_oldest_age_seconds") == 7200
    assert 0.1 < samples.quantile("ttft_seconds", 0.5, task="online") < 0.2
    assert not Samples.parse("# TYPE other counter\nother_total 3\n")


def test_an_interval_holds_what_was_counted_in_it_and_gauges_as_they_are() -> None:
    before, after = (Samples.parse(metrics_page(requests=n, pooled=n)) for n in (10, 14))
    recent = after.since(before)
    assert recent.total("requests_total", outcome="finished") == 4
    assert recent.total("requests_total", outcome="expired") == 0
    assert recent.total("pool_requests") == 14
    assert recent.total("ttft_seconds_count") == 4
    restarted = before.since(after)
    assert restarted.total("requests_total", outcome="finished") == 10


def test_after_a_restart_a_histogram_counts_from_0_as_a_whole() -> None:
    """Its first bucket is higher than before already, the others are not yet."""
    pages = [
        "# TYPE echo_sgl_wait_seconds histogram\n"
        + "".join(
            f'echo_sgl_wait_seconds_bucket{{le="{bound}"}} {count}\n'
            for bound, count in zip(("0.1", "1.0", "+Inf"), counts, strict=True)
        )
        for counts in ((5, 90, 100), (10, 12, 12))
    ]
    before, after = map(Samples.parse, pages)
    assert after.since(before).quantile("wait_seconds", 0.5) == pytest.approx(0.06)


def test_the_screen_shows_counts_at_first_and_rates_later() -> None:
    before, after = (
        Samples.parse(metrics_page(requests=n, lines=lines)) for n, lines in ((10, 30), (14, 70))
    )
    first = shown(Look(before, before))
    assert row(first, "online")[:6] == ["online", "11", "1", "1,000", "-", "25.0%"]
    assert row(first, "promised") == ["promised", "500", "ms", "none"]
    assert "since the server's start" in first
    later = shown(Look(after, after.since(before), 2.0))
    assert row(later, "online")[:4] == ["online", "2.0", "0.0", "200.0"]
    assert row(later, "decode")[-3:] == ["95.5%", "fresh", "-"]
    assert "of a step 12.3 ms" in later
    assert "requests 7   oldest 2 h" in later
    assert "batches 2 in progress   lines waiting 4,000   in flight 256   done 20.0" in later
    assert "left at this rate 3.33 min" in later


def test_large_counts_and_all_columns_fit_a_terminal_of_80_characters() -> None:
    busy = Samples.parse(metrics_page(requests=1_234_567, lines=99_999))
    text = shown(Look(busy, busy), width=80)
    assert row(text, "online")[:2] == ["online", "1.23M"]
    assert "123M" in row(text, "online") and "done 99,999" in text
    assert row(text, "promised") == ["promised", "500", "ms", "none"]
    for head in ("TPOT", "protected", "punished", "reserve", "within", "drifts"):
        assert head in text
    assert text.count("p99") == 3  # of TTFT, TPOT and planning
    assert "…" not in text


def test_parks_are_those_of_offline_requests_as_resumes_are() -> None:
    parks = {("parks_total", frozenset({("task", task)})): 1.0 + len(task) for task in Task}
    samples = Samples(parks)
    assert f"parks {1 + len(Task.OFFLINE)}   resumes" in shown(Look(samples, samples))


@pytest.mark.parametrize(
    ("age_s", "said"),
    [(0, "0 s"), (2e-5, "20 us"), (0.25, "250 ms"), (61, "1.02 min"), (9000, "2.5 h")],
)
def test_times_are_shown_in_the_unit_that_fits(age_s: float, said: str) -> None:
    samples = Samples({("pool_oldest_age_seconds", frozenset()): age_s})
    assert f"oldest {said}" in shown(Look(samples, samples))


def test_a_server_without_batches_says_how_to_get_them() -> None:
    text = "# TYPE echo_sgl_pool_requests gauge\necho_sgl_pool_requests 1\n"
    samples = Samples.parse(text)
    assert "--echo-state-dir" in shown(Look(samples, samples))


def test_a_server_that_goes_away_leaves_its_last_figures_and_comes_back(page: Pages) -> None:
    first = Samples.parse(metrics_page())
    seen = looks(page.url, Look(first, first), every_s=0.01)
    assert next(seen).trouble == ""
    page.text = None
    away = next(seen)
    assert "503" in away.trouble and away.now.total("pool_requests") == 7
    assert "old figures" in shown(away)
    page.text = metrics_page(requests=20)
    back = next(seen)
    assert back.trouble == "" and back.recent.total("requests_total", outcome="finished") == 10


def test_once_prints_one_screen(page: Pages) -> None:
    result = run_cli("top", "--url", page.url, "--once")
    assert result.returncode == 0, result.stderr
    assert row(result.stdout, "online")[0] == "online"
    assert page.num_served == 1


def test_ctrl_c_ends_it_cleanly(page: Pages, cli: StartCli) -> None:
    process = cli("top", "--url", page.url, "--every", "0.1")
    wait_until(lambda: page.num_served >= 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert process.stderr is not None and process.stderr.read() == ""


def test_a_server_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = run_cli("top", "--url", url, "--once")
    assert result.returncode == 1
    assert url in result.stderr


@pytest.mark.server
def test_top_shows_a_live_server(server: Server) -> None:
    result = run_cli("top", "--url", server.url, "--once")
    assert result.returncode == 0, result.stderr
    assert row(result.stdout, "offline")[0] == "offline"
    assert "the server takes none" in result.stdout
