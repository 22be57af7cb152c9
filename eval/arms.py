"""The arms of a comparison: the same SGLang, model and load under different scheduling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echo_sgl.types import OFFLINE_SERVICE_TIER, Task


@dataclass(frozen=True, slots=True)
class Arm:
    """What tells one arm from the others: server arguments, Echo's config, request fields.

    `config` names a preset or file; `settings` are config sections instead, which whoever
    runs the arm writes to a file, see `eval.cache.arms.with_config_file`. One without a job
    gets the online requests only.
    """

    args: tuple[str, ...] = ()
    config: str | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    online_fields: Mapping[str, Any] = field(default_factory=dict)
    offline_fields: Mapping[str, Any] = field(default_factory=dict)
    has_job: bool = True

    def fields(self, task: Task) -> Mapping[str, Any]:
        return self.online_fields if task is Task.ONLINE else self.offline_fields


# SGLang 0.5.23 serves larger `priority` values first and preempts a running request only for
# one whose value is higher by MORE than --priority-scheduling-preemption-threshold (10): with
# values 1 and 0 this arm would never preempt. Requests without a value count as the lowest.
ONLINE_PRIORITY, OFFLINE_PRIORITY = 100, 0

ARMS: dict[str, Arm] = {
    "stock": Arm(),
    "stock-priority": Arm(
        args=(
            "--enable-priority-scheduling",
            "--retraction-policy=priority",
            "--radix-eviction-policy=priority",
        ),
        online_fields={"priority": ONLINE_PRIORITY},
        offline_fields={"priority": OFFLINE_PRIORITY},
    ),
    "echo": Arm(config="echo", offline_fields={"service_tier": OFFLINE_SERVICE_TIER}),
}


def pick_arms(names: Sequence[str], known: Mapping[str, Arm] = ARMS) -> dict[str, Arm]:
    """The named arms, in the given order.

    Errors: `ValueError` names the unknown or repeated arm and the known ones.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"unknown arm {name!r}; known are {', '.join(known)}")
        if names.count(name) > 1:
            raise ValueError(f"arm {name!r} is named twice")
    return {name: known[name] for name in names}
