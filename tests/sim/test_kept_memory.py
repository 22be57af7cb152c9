"""What policies and estimators keep does not grow with the requests that they have served."""

from __future__ import annotations

import gc
import tracemalloc

from echo_sgl.sim.server import SimServer
from tests.sim.workloads import SLO, offline_trace, online_trace, server

# The more there were, the fuller are buffers that have a bound; these were filled by the fewer.
FEW, MANY = 1500, 3000
NUM_LINES = 100
OURS = ("*/policies/*", "*/estimators/*", "*/batch_shape.py")


def kept_bytes(num_online: int) -> int:
    """What their code has allocated and not freed once all have been answered."""
    # Steps scatter, so that the estimator goes on learning.
    config = server(SLO, kv_tokens=20_000, max_running_requests=32, noise=0.1)
    online = online_trace(num_online, rate_rps=8.0, most_tokens=300)
    offline = offline_trace(NUM_LINES, num_prefixes=20)
    tracemalloc.start()
    try:
        twin = SimServer(config, online, offline)
        twin.run()
        gc.collect()  # what only refers to itself is not kept
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    assert twin.scheduler.results.online_done == num_online
    ours = snapshot.filter_traces([tracemalloc.Filter(True, pattern) for pattern in OURS])
    return sum(one.size for one in ours.statistics("filename"))


def test_twice_as_many_requests_leave_no_more_behind() -> None:
    few, many = kept_bytes(FEW), kept_bytes(MANY)
    assert few > 100_000  # what is looked at is there
    assert many < 1.1 * few
