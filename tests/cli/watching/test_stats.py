"""`echo-sgl stats` against real servers, and while one is away."""

from __future__ import annotations

import signal

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from echo_sgl.cli import app
from echo_sgl.cli.watching.stats import make_table, readings
from echo_sgl.policies.cache.eviction_order import Worth
from echo_sgl.types import Task
from eval.servers.server import LOCAL, Server, free_port
from tests.cli.conftest import StartCli
from tests.cli.jobs import run_cli
from tests.cli.metrics_page import metrics_page, serving


def complete(server: Server, prompt: str, **body: object) -> None:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    LOCAL.post(f"{server.url}/v1/completions", json=fields | body, timeout=60).raise_for_status()


@pytest.mark.server
def test_the_table_has_both_classes_and_their_hit_rates(server: Server) -> None:
    # In a pool that others left full, the next online request has the job's KV evicted.
    LOCAL.post(f"{server.url}/flush_cache?timeout=60", timeout=90).raise_for_status()
    prompt = "import os\n" * 50
    for _ in range(2):
        complete(server, prompt, service_tier="flex")
    complete(server, "something else")
    result = run_cli("stats", "--url", server.url)
    assert result.returncode == 0, result.stderr
    for expected in (
        "online",
        "offline",
        "hit rate",
        "TTFT p99, ms",
        "pool requests",
        "%",
        "evicted pending tokens",
        "punished tokens",
        "reserve tokens",
        "protected tokens",
    ):
        assert expected in result.stdout
    figures = orjson.loads(run_cli("stats", "--url", server.url, "--json").stdout)
    offline = figures["offline"]
    assert offline["requests"]["finished"] >= 2
    assert offline["hit_rate"] == offline["cached_prompt_tokens"] / offline["prompt_tokens"] > 0
    assert 0 < offline["ttft_p50_s"] <= offline["ttft_p99_s"]
    assert offline["tpot_p50_s"] > 0
    assert offline["cached_tokens"] > 0 and figures["online"]["protected_tokens"] > 0
    assert offline["kv_limit_tokens"] > 0
    assert set(offline["evicted_tokens"]) == {worth.name.lower() for worth in Worth}


@pytest.mark.server
def test_watching_shows_what_happened_in_each_interval(server: Server, cli: StartCli) -> None:
    process = cli("stats", "--url", server.url, "--watch", "--every", "0.2", "--json")
    assert process.stdout is not None
    first = orjson.loads(process.stdout.readline())
    assert "recent" not in first
    complete(server, "watched", service_tier="flex")
    num_tokens = 0.0
    while num_tokens < 4:
        recent = orjson.loads(process.stdout.readline())["recent"]
        num_tokens += recent["offline"]["generated_tokens"]
        assert recent["interval_s"] >= 0.2
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


@pytest.mark.server
def test_a_server_without_metrics_says_how_to_get_them(small_server: Server) -> None:
    result = run_cli("stats", "--url", small_server.url)
    assert result.returncode == 1
    assert "--enable-metrics" in result.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = run_cli("stats", "--url", url)
    assert result.returncode == 1
    assert url in result.stderr


def test_watching_goes_on_when_a_server_that_went_away_is_back() -> None:
    with serving(metrics_page()) as page:
        seen = readings(page.url, every_s=0.01)
        assert next(seen).trouble == ""
        page.text = None
        away = next(seen)
        assert "503" in away.trouble and away.total[Task.ONLINE].requests["finished"] == 10
        console = Console(width=200)
        with console.capture() as shown:
            console.print(make_table(away))
        assert "old figures: " in shown.get()
        page.text = metrics_page(requests=14)
        back = next(seen)
        assert back.trouble == "" and back.recent is not None
        assert back.recent[Task.ONLINE].requests["finished"] == 4


def test_watched_json_holds_no_figures_of_a_server_that_is_away(cli: StartCli) -> None:
    with serving(metrics_page()) as page:
        process = cli("stats", "--url", page.url, "--watch", "--every", "0.1", "--json")
        assert process.stdout is not None and process.stderr is not None
        assert "recent" not in orjson.loads(process.stdout.readline())
        page.text = None
        assert "answers 503" in process.stderr.readline()
        page.text = metrics_page(requests=14)
        finished = 0.0
        while finished < 4:
            recent = orjson.loads(process.stdout.readline())["recent"]
            finished += recent["online"]["requests"]["finished"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


@pytest.mark.parametrize("given", ["inf", "1e12", "nan", "0"])
@pytest.mark.parametrize(
    "command",
    [
        "stats --watch --every",
        "top --every",
        "batch watch batch_1 --every",
        "record --output x.jsonl --seconds",
        "calibrate --output x.json --seconds",
        "budget --slo ttft_p99=1s --trace x.csv --output x.toml --seconds",
        "budget --slo ttft_p99=1s --trace x.csv --output x.toml --speed",
    ],
)
def test_what_no_clock_can_wait_for_is_refused(command: str, given: str) -> None:
    *words, option = command.split()
    result = CliRunner().invoke(app, [*words, option, given])
    assert result.exit_code == 2
    assert option in result.stderr
