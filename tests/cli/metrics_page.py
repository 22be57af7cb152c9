"""A page of metrics as a server with Echo shows it, and a web server that hands pages out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TTFT_BOUNDS_S = (0.1, 0.2, 0.4)


def metrics_page(*, requests: int = 10, lines: int = 30, pooled: int = 7) -> str:
    """A server that has ended so many online requests and lines of a batch."""
    registry = CollectorRegistry()

    def gauge(name: str, value: float, **labels: str) -> None:
        made = Gauge(f"echo_sgl_{name}", "x", list(labels), registry=registry)
        (made.labels(**labels) if labels else made).set(value)

    by_task = ["task"]
    ended = Counter("echo_sgl_requests", "x", ["task", "outcome"], registry=registry)
    ended.labels("online", "finished").inc(requests)
    ended.labels("online", "expired").inc(1)
    prompt = Counter("echo_sgl_prompt_tokens", "x", by_task, registry=registry)
    prompt.labels("online").inc(100 * requests)
    cached = Counter("echo_sgl_cached_prompt_tokens", "x", by_task, registry=registry)
    cached.labels("online").inc(25 * requests)
    ttft = Histogram(
        "echo_sgl_ttft_seconds", "x", by_task, buckets=TTFT_BOUNDS_S, registry=registry
    )
    for _ in range(requests):
        ttft.labels("online").observe(0.15)
    gauge("promised_ttft_seconds", 0.5, task="online")
    gauge("promised_tpot_seconds", float("inf"), task="online")
    gauge("step_limit_seconds", 0.0123, task="offline")
    gauge("step_time_coverage_ratio", 0.955, kind="decode")
    gauge("step_time_evidence", 2, kind="decode")
    gauge("pool_requests", pooled, task="offline")
    gauge("pool_oldest_age_seconds", 7200, task="offline")
    gauge("open_batches", 2, status="in_progress")
    gauge("batch_waiting_lines", 4000)
    gauge("batch_lines_in_flight", 256)
    done = Counter("echo_sgl_batch_lines", "x", ["outcome"], registry=registry)
    done.labels("answered").inc(lines)
    return generate_latest(registry).decode()


class Pages:
    """What the web server hands out next; None answers 503."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.num_served = 0
        self.url = ""


@contextlib.contextmanager
def serving(text: str | None) -> Iterator[Pages]:
    """A web server with a page of metrics, until the block ends."""
    pages = Pages(text)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if pages.text is None else 200)
            self.end_headers()
            self.wfile.write((pages.text or "").encode())
            pages.num_served += 1

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pages.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield pages
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
