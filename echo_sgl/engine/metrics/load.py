"""Load reports that include the pool, for routers and for SGLang's own DP balancing."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

from echo_sgl.engine.decodes.parking import ParkedDecodes
from echo_sgl.engine.pool.offline_pool import OfflinePool


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class PooledLoadInquirer(SchedulerLoadInquirer):
    """Adds the pool's running totals, so a report costs the same with 50,000 pooled requests."""

    offline_pool: OfflinePool
    sitting_out: tuple[ParkedDecodes, ...]

    def get_loads(self) -> Any:
        # A slotted dataclass is a new class, so super() without arguments would not find it.
        load = SchedulerLoadInquirer.get_loads(self)
        num_tokens = self.offline_pool.num_tokens
        cache_miss_rate = 1.0 - self.get_recent_cache_hit_rate()
        load.num_running_reqs += sum(map(len, self.sitting_out))
        load.num_waiting_reqs += len(self.offline_pool)
        load.num_waiting_uncached_tokens += int(num_tokens * cache_miss_rate)
        load.num_total_tokens += num_tokens
        load.num_active_tokens += num_tokens
        if load.queues is not None:
            load.queues.waiting += len(self.offline_pool)
        return load


def with_pooled_load(
    inquirer: SchedulerLoadInquirer, pool: OfflinePool, sitting_out: tuple[ParkedDecodes, ...]
) -> PooledLoadInquirer:
    """The same inquirer, with the pool counted as waiting and who sits out as running."""
    fields = dataclasses.fields(SchedulerLoadInquirer)
    values = {field.name: getattr(inquirer, field.name) for field in fields}
    return PooledLoadInquirer(**values, offline_pool=pool, sitting_out=sitting_out)
