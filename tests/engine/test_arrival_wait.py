"""How long a step with offline work may be on a real server, by what online requests need."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from eval.servers.server import LOCAL
from tests.cli.jobs import run_cli
from tests.engine.tight import learn
from tests.engine.traffic import FLEX, completion, is_idle, post, send_all, until, wait_until
from tests.servers import COMMON_ARGS, NAMED, STRICT

pytestmark = pytest.mark.server

# No prefill of the test's model takes a noticeable part of it.
TTFT_S = 600.0
# Limits are in what steps take at most; of the median that is about what is expected of them.
CONFIG = {
    "estimator": {"quantile": 0.5},
    "slo": {"ttft_s": TTFT_S, "tpot_s": 60.0},
    "steps": {"max_stall_s": 3600.0, "stall_share": 1.0},
}


@pytest.fixture
def server(server_for, write_config):
    server = server_for(COMMON_ARGS, config=str(write_config(**CONFIG)), env=STRICT)
    wait_until(lambda: is_idle(server), "the server is idle")
    return server


def offline_limits_s(server) -> list[float]:
    """Of the steps of one offline request, with nobody online."""
    start_s = time.monotonic()
    post(server, "/v1/completions", {**completion("an offline question", 8), **FLEX})
    wait_until(lambda: is_idle(server), "it has ended")
    params = {"seconds": time.monotonic() - start_s}
    [steps] = LOCAL.get(f"{server.url}/echo/trace", params=params).json()["replicas"]
    offline, limit = (steps["columns"].index(name) for name in ("num_offline", "limit_s"))
    limits_s = [row[limit] for row in steps["rows"] if row[offline]]
    assert limits_s, "its steps are in the trace"
    return limits_s


def test_offline_steps_are_as_long_as_the_prompts_that_were_seen_allow(server):
    learn(server)
    assert LOCAL.post(f"{server.url}/echo/forget-traffic").is_success
    assert max(offline_limits_s(server)) < 0.75 * TTFT_S, "nothing is known of online prompts"
    post(server, "/v1/completions", completion("an online question", 8))
    assert min(offline_limits_s(server)) > 0.75 * TTFT_S, "but for their prefills, all of it"
    assert LOCAL.post(f"{server.url}/echo/forget-traffic").is_success
    assert max(offline_limits_s(server)) < 0.75 * TTFT_S


def test_who_never_fits_beside_online_requests_is_told_so_and_starts_without(
    server_for, write_config
):
    steps = {"max_stall_s": 1e-6}
    config = str(write_config(**{**CONFIG, "steps": steps}))
    server = server_for((*COMMON_ARGS, *NAMED), config=config, env=STRICT)
    wait_until(lambda: is_idle(server), "the server is idle")
    learn(server)

    held: dict[str, Any] = {}

    def told(rid: str) -> dict[str, Any]:
        answer = LOCAL.get(f"{server.url}/echo/requests/{rid}", timeout=60)
        return answer.json() if answer.is_success else {}

    def never_fits() -> bool:
        held.update(told("off").get("held_back") or {})
        return "most_s" in held

    async def run() -> None:
        online = asyncio.create_task(send_all(server, [completion("on", 6000, rid="on")]))
        await until(lambda: told("on").get("state") == "decoding", "it decodes")
        body = completion("off " * 90, 4, rid="off", **FLEX)
        offline = asyncio.create_task(send_all(server, [body]))
        await until(never_fits, "it never fits")
        assert held["most_s"] < held["smallest_chunk_s"]
        said = await asyncio.to_thread(run_cli, "explain", "off", "--url", server.url)
        assert "Whoever arrives waits for at most" in said.stdout
        await asyncio.to_thread(post, server, "/abort_request", {"rid": "on"})
        [answer] = await offline
        assert answer.status_code == 200
        await online

    asyncio.run(run())
