"""What the whole suite shares: its model, its servers, and which tests run beside each other."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from eval.servers.models import demo_model
from eval.servers.server import Server
from tests.engine.traffic import decided_texts
from tests.servers import COMMON_ARGS, NAMED, STRICT, ServerPool, max_alive_servers

# Every run draws the same examples, so that what fails today failed when it was written; new ones
# are looked for with `pytest --hypothesis-profile explore`. A limit on an example's time would
# measure the machine.
settings.register_profile("same-examples", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("same-examples")

# Modules that share servers go to one worker, and so do the tests of any other module. What
# takes longest comes first, so that no worker is left alone with it at the end.
GROUPS = (
    (
        "engine/test_scheduler",
        "engine/cache/test_cache_manager",
        "engine/cache/test_host_tier",
        "engine/metrics/",
        "engine/test_server_kits",
        "engine/steps/test_step_timing",
        "engine/requests/test_tasks",
        "engine/test_traffic",
        "engine/http/",
        "engine/test_gathering",
        "engine/test_peer_rules",
        "eval/load/test_client",
        "eval/test_online_only",
    ),
    (
        "engine/test_steps",
        "engine/test_faults",
        "engine/requests/test_places",
        "engine/test_first_tokens",
    ),
    ("cli/", "engine/test_batch_service"),
    ("engine/test_switch",),
    ("engine/test_pool_lifecycle",),
    ("cpu/test_server",),
    ("configs/test_grafana",),
    ("engine/test_explain",),
    ("engine/steps/test_estimation",),
    ("sim/test_kept_memory",),
    ("batches/test_embeddings",),
)
for _name in itertools.chain(*GROUPS):
    if not any(Path(__file__).parent.glob(f"{_name}*")):
        raise pytest.UsageError(f"tests/conftest.py groups {_name!r}, which is not there any more")
# Within a group, tests run by the server that they need, so that none starts twice. Texts of the
# stock server are asked for all along.
SERVERS = (
    "echo_server",
    "stock_server",
    "tight_server",
    "reserving_server",
    "unreserved_server",
    "cramped_server",
    "small_server",
    "doomed_server",
)


# For every Python process that the suite starts, workers included.
_paths = str(Path(__file__).parent / "quick_start"), os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))


class ByGroup(LoadFileScheduling):
    """Gives a worker all tests of a group, and of a module that is in none."""

    def _split_scope(self, nodeid: str) -> str:
        rank = _rank(nodeid)
        module: str = super()._split_scope(nodeid)
        return module if rank == len(GROUPS) else f"group {rank}"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByGroup | None:
    return ByGroup(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (_rank(item.nodeid), _server_rank(item)))


def _server_rank(item: pytest.Item) -> int:
    fixtures = getattr(item, "fixturenames", ())
    return next((rank for rank, name in enumerate(SERVERS) if name in fixtures), len(SERVERS))


def _rank(nodeid: str) -> int:
    name = nodeid.removeprefix("tests/")
    return next((rank for rank, group in enumerate(GROUPS) if name.startswith(group)), len(GROUPS))


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return demo_model("tiny")


@pytest.fixture(scope="session")
def server_for() -> Iterator[ServerPool]:
    pool = ServerPool(max_alive_servers())
    yield pool
    pool.close()


@pytest.fixture
def echo_server(server_for: ServerPool) -> Server:
    """Echo as it comes, for tests that only need some server."""
    return server_for((*COMMON_ARGS, *NAMED), config="echo", env=STRICT)


@pytest.fixture
def stock_server(server_for: ServerPool) -> Server:
    return server_for((*COMMON_ARGS, *NAMED))


@pytest.fixture(scope="session")
def stock_texts(server_for: ServerPool) -> Callable[[Sequence[dict[str, Any]]], list[str]]:
    """What the stock server answers to completions; each set is asked for once."""
    known: dict[str, list[str]] = {}

    def answered(bodies: Sequence[dict[str, Any]]) -> list[str]:
        key = json.dumps(bodies)
        if key not in known:
            known[key] = decided_texts(server_for((*COMMON_ARGS, *NAMED)), bodies)
        return known[key]

    return answered
