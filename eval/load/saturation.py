"""How much online traffic a server can take at most: measured, so that rates need no guess."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eval.load.client import Phase, Request
from eval.load.records import Record, Status
from eval.servers.server import Server
from eval.workloads import WorkloadError

CUT = 0.1
# Between two lots of answers the rate is many times that of all until then.
MAX_RATE_RATIO = 1.5
WARM_UP_REQUESTS = 8
WARM_UP_LIMIT_S = 120.0


async def saturate(
    server: Server, requests: Sequence[Request], *, window: int, limit_s: float
) -> list[Record]:
    """Keep `window` online requests in flight until all are answered, or `limit_s` from now.

    A few of them warm the server up first, since imports and thread pools take their time.
    """
    first, rest = requests[:WARM_UP_REQUESTS], requests[WARM_UP_REQUESTS:]
    await Phase(server.url).closed_loop(first, window=len(first), limit_s=WARM_UP_LIMIT_S)
    phase = Phase(server.url)
    await phase.closed_loop(rest, window=min(window, len(rest)), limit_s=limit_s)
    return phase.records


def saturation_rps(records: Sequence[Record]) -> float:
    """Answers a second between the first and the last tenth of the answers.

    Errors: `WorkloadError` when there are too few to tell, or they came in so few lots, as
    requests of one length do, that what is between two of them is no rate.
    """
    began_s = min((r.sent_s for r in records if r.sent_s is not None), default=0.0)
    ends = sorted(r.end_s for r in records if r.status is Status.OK and r.end_s is not None)
    num_cut = math.ceil(len(ends) * CUT)
    middle = ends[num_cut : len(ends) - num_cut]
    if len(middle) < 2 or middle[-1] <= middle[0]:
        errors = {record.error for record in records if record.error}
        raise WorkloadError(
            f"only {len(ends)} of {len(records)} calibration requests were answered"
            f"{': ' + min(errors) if errors else ''}; raise --calibrate-s"
        )
    rps = (len(middle) - 1) / (middle[-1] - middle[0])
    if rps > MAX_RATE_RATIO * (num_cut + len(middle)) / (middle[-1] - began_s):
        raise WorkloadError(
            f"{len(ends)} calibration requests were answered in so few lots that their rate cannot "
            "be told; raise --calibrate-s and --calibration-requests"
        )
    return rps
