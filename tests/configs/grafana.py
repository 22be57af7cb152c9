"""The dashboard and the alert rules as data, and a real Prometheus to try them on."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from eval.servers.server import LOCAL, free_port

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "grafana"
ALERTS = FOLDER / "alerts.yml"


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel, with Grafana's variables filled in."""

    row: str
    panel: str
    legend: str
    expr: str

    @property
    def name(self) -> str:
        return f"{self.row}: {self.panel}: {self.legend}"


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "echo.json").read_bytes())["panels"]
    return found


def queries(interval: str = "1m") -> list[Query]:
    """Every query of the dashboard, over all servers."""
    found: list[Query] = []
    row = ""
    for panel in panels():
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", interval).replace("$instance", ".*")
            found.append(Query(row, panel["title"], target["legendFormat"], expr))
    return found


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def get(self, path: str, **params: str) -> Any:
        """The data of an API call.

        Errors: `AssertionError` with Prometheus' own words when it fails.
        """
        reply = LOCAL.get(f"{self.url}/api/v1/{path}", params=params, timeout=30).json()
        assert reply["status"] == "success", (params, reply)
        return reply["data"]

    def values(self, expr: str) -> list[float]:
        """The present values of an expression, NaN left out."""
        results = self.get("query", query=expr)["result"]
        values = [float(result["value"][1]) for result in results]
        return [value for value in values if not math.isnan(value)]

    def is_ready(self) -> bool:
        try:
            return LOCAL.get(f"{self.url}/-/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@contextlib.contextmanager
def running_prometheus(binary: str, folder: Path, target: str) -> Iterator[Prometheus]:
    """Scrape `target` (HOST:PORT) every second, with the alert rules loaded, until the end."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "echo", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    command = [
        binary,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait(30)
