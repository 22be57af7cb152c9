"""The budget of a step that moves with what online requests get, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from echo_sgl.policies.limits.online_attainment import WINDOW_REQUESTS
from eval.servers.server import Server
from tests.engine.tight import UNTRIED, num_running, num_waiting
from tests.engine.traffic import completion, is_idle, metric, post, send_all, until, wait_until
from tests.servers import COMMON_ARGS, STRICT

pytestmark = pytest.mark.server

BUDGET_S = 0.05
PLACES, ATTEMPTS = 4, 5
# Nobody gets that.
CONFIG: dict[str, Any] = {
    "slo": {"ttft_s": 0.001, "tpot_s": 1e-6},
    "steps": {"limit": "budget", "budget_s": BUDGET_S, "adapt_budget": True},
}


@pytest.fixture
def server(server_for, write_config):
    args = (*COMMON_ARGS, *UNTRIED, "--max-running-requests", str(PLACES))
    server = server_for(args, config=str(write_config(**CONFIG)), env=STRICT)
    yield server
    post(server, "/abort_request", {"abort_all": True})


def budget_s(server: Server) -> float:
    """What a step may take now, beside online requests."""
    return metric(server, "echo_sgl_step_limit_seconds", task="offline")


def falls(
    server: Server, act: Callable[[asyncio.Task[Any]], Awaitable[Any]], *, num_beside: int
) -> bool:
    """Whether the budget has fallen by a fifth after that, while so many online requests go on."""
    lasting = [completion(f"lasting {n}", 7000 // num_beside) for n in range(num_beside)]
    wait_until(lambda: is_idle(server), "the server is idle")
    assert post(server, "/echo/forget-traffic", {}).status_code == 200

    async def run() -> bool:
        beside = asyncio.create_task(send_all(server, lasting))
        await until(lambda: beside.done() or num_running(server) == num_beside, "they run, or did")
        await until(
            lambda: beside.done() or budget_s(server) == pytest.approx(BUDGET_S),
            "the budget is the first",
        )
        await act(beside)
        await until(
            lambda: beside.done() or budget_s(server) == pytest.approx(0.8 * BUDGET_S),
            "it has fallen, or they have ended",
        )
        has_fallen = not beside.done()
        await asyncio.to_thread(post, server, "/abort_request", {"abort_all": True})
        await beside
        return has_fallen

    return asyncio.run(run())


def test_a_budget_falls_when_promises_are_broken(server):
    late = [completion(f"late {number}", 4) for number in range(WINDOW_REQUESTS)]
    # Those beside may end too soon.
    assert any(
        falls(server, lambda beside: send_all(server, late), num_beside=2) for _ in range(ATTEMPTS)
    )


def test_who_gives_up_before_the_first_token_was_promised_one_too(server):
    """All places are taken; nobody of those that wait is ever answered."""
    waiting = [completion("waits", 4, rid=f"waits-{n}") for n in range(WINDOW_REQUESTS)]

    async def give_up(beside: asyncio.Task[Any]) -> None:
        calls = asyncio.create_task(send_all(server, waiting))
        await until(lambda: beside.done() or num_waiting(server) == WINDOW_REQUESTS, "they wait")
        for body in waiting:
            await asyncio.to_thread(post, server, "/abort_request", {"rid": body["rid"]})
        await calls

    assert any(falls(server, give_up, num_beside=PLACES) for _ in range(ATTEMPTS))
