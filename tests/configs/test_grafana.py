"""The dashboard and the alert rules: against the code's metrics, promtool and a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from echo_sgl.config import CONFIG_ENV, FORCE_PROFILE_ENV, STATE_DIR_ENV, EstimatorConfig
from echo_sgl.estimators.profile import Profile, save_profile
from eval.servers.server import LOCAL, Server
from tests.configs.grafana import ALERTS, Query, panels, queries, running_prometheus
from tests.engine.traffic import FLEX, completion, documents, post, wait_until
from tests.estimators.steps import true_model
from tests.servers import COMMON_ARGS

NAME = re.compile(r"echo_sgl_\w+")
# prometheus_client keeps one registry per process, so the names are read in another one.
NAMES_SCRIPT = """
import json
from prometheus_client import REGISTRY
from echo_sgl.batches.dispatch.metrics import JobMetrics
from echo_sgl.config import SloConfig
from echo_sgl.engine.metrics.request_metrics import RequestMetrics, SchedulerMetrics

RequestMetrics.create(SloConfig()), SchedulerMetrics(), JobMetrics()
ours = [family for family in REGISTRY.collect() if family.name.startswith("echo_sgl_")]
suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
print(json.dumps({f.name: [f.name + end for end in suffixes[f.type]] for f in ours}))
"""


@pytest.fixture(scope="module")
def families() -> dict[str, list[str]]:
    """The series' names of each metric that the code makes."""
    environment = os.environ | {CONFIG_ENV: str(ALERTS.parents[1] / "echo.toml")}
    command = [sys.executable, "-c", NAMES_SCRIPT]
    found: dict[str, list[str]] = json.loads(
        subprocess.check_output(command, text=True, env=environment)
    )
    return found


def test_every_metric_of_panels_and_alerts_exists(families: dict[str, list[str]]) -> None:
    known = {series for names in families.values() for series in names}
    used = {name for query in queries() for name in NAME.findall(query.expr)}
    used |= set(NAME.findall(ALERTS.read_text()))
    assert len(used) > 30
    assert used - known == set()


def test_every_metric_is_on_a_panel_and_documented(families: dict[str, list[str]]) -> None:
    shown = {name for query in queries() for name in NAME.findall(query.expr)}
    assert [family for family, names in families.items() if not shown & set(names)] == []
    documented = (ALERTS.parents[2] / "docs" / "metrics.md").read_text()
    assert [family for family in families if family not in documented] == []


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    places: set[tuple[int, int]] = set()
    for panel in panels():
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (grid["x"] + right, grid["y"] + down)
            for right in range(grid["w"])
            for down in range(grid["h"])
        }
        assert not places & cells, panel["title"]
        places |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert rows == ["Overview", "Classes", "Cache", "Scheduler", "Jobs"]


HOST = 'instance="a"'
ASKED = EstimatorConfig().quantile


def ttft(at_least_s: float) -> dict[str, str]:
    """Series of 10 online requests a minute that all take between half and all of that."""
    base = f'echo_sgl_ttft_seconds_bucket{{{HOST},task="online"'
    return {
        f'{base},le="{at_least_s / 2}"}}': "0x200",
        f'{base},le="{at_least_s}"}}': "0+10x200",
        f'{base},le="+Inf"}}': "0+10x200",
    }


def series(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {f"echo_sgl_{name}{{{HOST}{',' + labels if labels else ''}}}": values}


CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "EchoOnlineTtftAbovePromise": (
        ttft(2.0) | series("promised_ttft_seconds", "1x200", 'task="online"'),
        ttft(2.0) | series("promised_ttft_seconds", "3x200", 'task="online"'),
    ),
    "EchoOnlineTpotAbovePromise": (
        {k.replace("ttft", "tpot"): v for k, v in ttft(2.0).items()}
        | series("promised_tpot_seconds", "1x200", 'task="online"'),
        {k.replace("ttft", "tpot"): v for k, v in ttft(0.5).items()}
        | series("promised_tpot_seconds", "1x200", 'task="online"'),
    ),
    "EchoEstimatorCoverageLow": (
        series("step_time_coverage_ratio", f"{ASKED - 0.06:g}x200", 'kind="decode"')
        | series("step_time_evidence", "2x200", 'kind="decode"'),
        series("step_time_coverage_ratio", f"{ASKED - 0.04:g}x200", 'kind="decode"')
        | series("step_time_evidence", "2x200", 'kind="decode"')
        | series("step_time_coverage_ratio", f"{ASKED - 0.06:g}x200", 'kind="prefill"')
        | series("step_time_evidence", "1x200", 'kind="prefill"'),
    ),
    "EchoEstimatorEvidenceMissing": (
        series("step_time_evidence", "0x200", 'kind="decode"') | series("pool_requests", "3x200"),
        series("step_time_evidence", "0x200", 'kind="decode"') | series("pool_requests", "0x200"),
    ),
    "EchoPoolTooOld": (
        series("pool_oldest_age_seconds", "3000+60x200"),
        series("pool_oldest_age_seconds", "3000x200"),
    ),
    "EchoReserveHoldsBack": (
        series("held_back_total", "0+5x200"),
        series("held_back_total", "0+5x10 50x190"),
    ),
    "EchoRetractionStorm": (
        series("retractions_total", "0+60x200") | series("requests_total", "0+60x200"),
        series("retractions_total", "0+30x200") | series("requests_total", "0+60x200"),
    ),
    "EchoPunishedTokens": (
        series("punished_tokens_total", "0+2000x200")
        | series("prompt_tokens_total", "0+6000x200", 'task="offline"'),
        series("punished_tokens_total", "0+200x200")
        | series("prompt_tokens_total", "0+6000x200", 'task="offline"'),
    ),
    "EchoBatchesStuck": (
        series("batch_waiting_lines", "9x200")
        | series("open_batches", "1x200", 'status="in_progress"')
        | series("batch_lines_total", "7x200", 'outcome="answered"'),
        series("batch_waiting_lines", "9x200")
        | series("open_batches", "0x200", 'status="in_progress"')
        | series("batch_lines_total", "7x200", 'outcome="answered"'),
    ),
    "EchoServerLinesStuck": (
        series("batch_lines_in_flight", "3x200")
        | series("batch_lines_total", "7x200", 'outcome="answered"'),
        series("batch_lines_in_flight", "0x200")
        | series("batch_lines_total", "7x200", 'outcome="answered"'),
    ),
}


def batch_server(host: str, job: str, *, in_flight: int, lines: str) -> dict[str, str]:
    """Series of a server that shows 3 batches and 9 waiting lines, as its peers do."""
    labels = f'job="{job}",instance="{host}"'
    return {
        f"echo_sgl_batch_waiting_lines{{{labels}}}": "9x200",
        f'echo_sgl_open_batches{{{labels},status="in_progress"}}': "2x200",
        f'echo_sgl_open_batches{{{labels},status="paused"}}': "1x200",
        f"echo_sgl_batch_lines_in_flight{{{labels}}}": f"{in_flight}x200",
        f'echo_sgl_batch_lines_total{{{labels},outcome="answered"}}': lines,
    }


BUSY = batch_server("busy", "fleet", in_flight=3, lines="0+5x200")
IDLE = batch_server("idle", "fleet", in_flight=0, lines="7x200")
STUCK = batch_server("stuck", "fleet", in_flight=3, lines="7x200")
ALONE = batch_server("alone", "other", in_flight=0, lines="7x200")
# Which alerts fire, by the label that says where.
SHARED: dict[str, tuple[dict[str, str], dict[str, list[str]]]] = {
    "a peer does the work": (BUSY | IDLE, {}),
    "nobody does": (
        IDLE | STUCK,
        {"EchoBatchesStuck": ["fleet"], "EchoServerLinesStuck": ["stuck"]},
    ),
    "one does not": (BUSY | STUCK, {"EchoServerLinesStuck": ["stuck"]}),
    "another job does": (BUSY | ALONE, {"EchoBatchesStuck": ["other"]}),
}

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool (Debian's package prometheus)"
)


@needs_promtool
def test_promtool_accepts_the_alert_rules() -> None:
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True)


@needs_promtool
def test_each_alert_fires_on_its_trouble_and_only_then(tmp_path: Path) -> None:
    names = set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
    assert set(CASES) == names

    def case(name: str, given: dict[str, str], *, fires: bool) -> dict[str, object]:
        query = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
        return rule_test(given, {query: {"{}": 1} if fires else {}})

    tests = [
        case(name, given, fires=fires)
        for name, both in CASES.items()
        for given, fires in zip(both, (True, False), strict=True)
    ]
    run_rule_tests(tests, tmp_path)


@needs_promtool
@pytest.mark.parametrize("name", SHARED)
def test_servers_that_share_a_database_are_watched_together(tmp_path: Path, name: str) -> None:
    given, fires = SHARED[name]

    def found(alert: str, label: str) -> tuple[str, dict[str, int]]:
        query = f'count by ({label}) (ALERTS{{alertname="{alert}",alertstate="firing"}})'
        return query, {f'{{{label}="{value}"}}': 1 for value in fires.get(alert, ())}

    wanted = dict([found("EchoBatchesStuck", "job"), found("EchoServerLinesStuck", "instance")])
    run_rule_tests([rule_test(given, wanted)], tmp_path)


@needs_promtool
def test_panels_count_the_batches_of_a_shared_database_once(tmp_path: Path) -> None:
    [overview] = [query for query in queries() if query.name == "Overview: Open batches: batches"]
    [by_status] = [
        query for query in queries() if query.row == "Jobs" and query.panel == overview.panel
    ]
    wanted = {
        overview.expr: {"{}": 3},
        by_status.expr: {'{status="in_progress"}': 2, '{status="paused"}': 1},
    }
    run_rule_tests([rule_test(BUSY | IDLE, wanted)], tmp_path)


def rule_test(given: dict[str, str], wanted: dict[str, dict[str, int]]) -> dict[str, object]:
    """A test of promtool's: what queries should find after two hours, by labels."""
    return {
        "interval": "1m",
        "input_series": [{"series": key, "values": value} for key, value in given.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": "2h",
                "exp_samples": [{"labels": key, "value": value} for key, value in found.items()],
            }
            for query, found in wanted.items()
        ],
    }


def run_rule_tests(tests: list[dict[str, object]], folder: Path) -> None:
    path = folder / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": tests}))
    command = ["promtool", "test", "rules", str(path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def submit(server: Server, num_lines: int) -> None:
    """A batch of short lines."""
    body = {"model": "any", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    lines = [
        orjson.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": body | {"prompt": f"line {number}"},
            }
        )
        for number in range(num_lines)
    ]
    upload = LOCAL.post(
        f"{server.url}/v1/files",
        files={"file": ("jobs.jsonl", b"\n".join(lines))},
        data={"purpose": "batch"},
        timeout=60,
    ).raise_for_status()
    batch = {"input_file_id": upload.json()["id"], "endpoint": "/v1/completions"}
    answer = post(server, "/v1/batches", batch | {"completion_window": "24h"})
    answer.raise_for_status()


@pytest.fixture
def job_server(
    server_for: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Server:
    """Takes batches, and predicts steps from its first one on: a fit needs more traffic."""
    folder = tmp_path_factory.mktemp("jobs")
    profile, config = folder / "profile.json", folder / "echo.toml"
    model = true_model("pooled")
    save_profile(Profile("any device", "any", "0.5.23", "2026-01-31", 500, {}, model), profile)
    config.write_text(f'[estimator]\nprofile = "{profile}"\n')
    env = {STATE_DIR_ENV: str(folder / "state"), FORCE_PROFILE_ENV: "1"}
    args = (*COMMON_ARGS, "--max-running-requests", "16", "--served-model-name", "any")
    return server_for(args, config=config, env=env)


@pytest.mark.server
@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's package prometheus")
def test_a_real_prometheus_answers_every_panel_from_a_live_server(
    job_server: Server, tmp_path: Path
) -> None:
    binary = shutil.which("prometheus")
    assert binary is not None
    every = queries()
    empty: list[Query] = every
    [document] = documents(1, 80, seed=7)
    num_rounds = 0

    def all_show_something() -> bool:
        """One round of mixed traffic, and a look at what is still empty."""
        nonlocal empty, num_rounds
        num_rounds += 1
        post(job_server, "/v1/completions", completion(f"{document} {num_rounds}", 8))
        post(job_server, "/v1/completions", completion(f"{document} {num_rounds}", 8, **FLEX))
        if num_rounds % 25 == 1:
            submit(job_server, 40)
        empty = [query for query in empty if not prometheus.values(query.expr)]
        return not empty

    target = job_server.url.removeprefix("http://")
    with running_prometheus(binary, tmp_path, target) as prometheus:
        wait_until(prometheus.is_ready, "Prometheus is ready")
        wait_until(lambda: prometheus.values("up") == [1.0], "the server is scraped")
        try:
            wait_until(all_show_something, "every panel shows something")
        except AssertionError:
            pytest.fail(f"empty panels: {[query.name for query in empty]}")
        rules = prometheus.get("rules")["groups"][0]["rules"]
        wait_until(
            lambda: all(
                rule["health"] == "ok" for rule in prometheus.get("rules")["groups"][0]["rules"]
            ),
            "every alert rule is evaluated",
        )
    assert {rule["name"] for rule in rules} == set(CASES)
