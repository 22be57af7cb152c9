"""Where a server's time goes while both classes run: its steps by what was in them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from echo_sgl.engine.steps.step_log import DEFAULT_CAPACITY
from echo_sgl.types import MAX_TRACE_S
from eval.servers.server import LOCAL, Server

Row = dict[str, Any]

KINDS = {
    "online_prefill": "online prefill",
    "offline_prefill": "offline prefill",
    "online_decode": "online decode, no offline in it",
    "shared_decode": "decode of both",
    "offline_decode": "offline decode",
    "between": "between steps",
}
# Of the largest batch of decodes: from here on one is full.
FULL_SHARE = 0.75


def step_rows(server: Server, seconds: float) -> list[Row]:
    """The steps of the last seconds from `GET /echo/trace`.

    None of a server without Echo; nor if there were more than it remembers, whose shares would
    be those of the last part only.
    """
    if seconds > MAX_TRACE_S:
        print(f"no steps: a server tells those of the last {MAX_TRACE_S:g} s", file=sys.stderr)
        return []
    answer = LOCAL.get(f"{server.url}/echo/trace", params={"seconds": seconds}, timeout=60)
    if answer.status_code == 404:
        return []
    replicas = answer.raise_for_status().json()["replicas"]
    if any(len(one["rows"]) >= DEFAULT_CAPACITY for one in replicas):
        print(f"no steps: a server remembers the last {DEFAULT_CAPACITY:,}", file=sys.stderr)
        return []
    return [dict(zip(one["columns"], row, strict=True)) for one in replicas for row in one["rows"]]


def step_shares(rows: Sequence[Row]) -> dict[str, float | None]:
    """Shares of the time from the first step's start to the last one's, which add up to 1.

    `between` is what passes on the host between two steps, waiting for requests included.
    Beside them: `planning`, Echo's own part of the time between steps, `prefill_tokens` in a
    mean prefill step with offline work, `offline_decodes` in a mean decode of both, and `room`.
    The same keys for a server that tells nothing, all None.
    """
    timed = [row for row in rows if row["time_s"] is not None]
    if len(timed) < 2:
        return dict.fromkeys([*KINDS, "planning", "prefill_tokens", "offline_decodes", "room"])
    whole_s = timed[-1]["start_s"] - timed[0]["start_s"]
    spent_s = dict.fromkeys(KINDS, 0.0)
    for row, after in pairwise(timed):
        # Under overlap a step is planned while the one before still runs.
        iteration_s = after["start_s"] - row["start_s"]
        ran_s = min(row["time_s"], iteration_s)
        spent_s[kind_of(row)] += ran_s
        spent_s["between"] += iteration_s - ran_s
    prefills = [row["prefill_tokens"] for row in timed if kind_of(row) == "offline_prefill"]
    shared = [row["num_offline"] for row in timed if kind_of(row) == "shared_decode"]
    return {
        **{kind: one_s / whole_s for kind, one_s in spent_s.items()},
        "planning": sum(row["own_s"] or 0.0 for row in timed[:-1]) / whole_s,
        "prefill_tokens": sum(prefills) / len(prefills) if prefills else None,
        "offline_decodes": sum(shared) / len(shared) if shared else None,
        "room": room(timed),
    }


def room(timed: Sequence[Row]) -> float | None:
    """Share of the steps' time that online work leaves at most; None where nothing decodes.

    Online requests need their prefills, and for each token their part of a decode step that is
    full: nobody decodes for less. What shares a step with offline prefills is not counted.
    """
    decodes = [row for row in timed if not row["num_prefills"]]
    most = max((row["num_decodes"] for row in decodes), default=0)
    full = [row for row in decodes if row["num_decodes"] >= FULL_SHARE * most]
    if not most:
        return None
    token_s = sum(row["time_s"] for row in full) / sum(row["num_decodes"] for row in full)
    prefill_s = sum(row["time_s"] for row in timed if kind_of(row) == "online_prefill")
    online_tokens = sum(row["num_decodes"] - row["num_offline"] for row in decodes)
    needed_s: float = prefill_s + token_s * online_tokens
    return 1.0 - needed_s / float(sum(row["time_s"] for row in timed))


def kind_of(row: Row) -> str:
    """What a step was for; one that prefills both classes counts as offline."""
    if row["num_prefills"]:
        return "offline_prefill" if row["num_offline"] else "online_prefill"
    if not row["num_offline"]:
        return "online_decode"
    return "offline_decode" if row["num_offline"] == row["num_decodes"] else "shared_decode"
