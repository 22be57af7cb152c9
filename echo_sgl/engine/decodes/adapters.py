"""Adapters (LoRA): a step's requests may need as many as the server holds weights of at a time.

Offline decodes make way for an online request whose adapter finds no room beside theirs: they sit
out. Against each other they keep their claim while they sit out, and take turns by how long they
have waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from sglang.srt.managers.schedule_batch import Req

from echo_sgl.engine.requests.roster import may_sit_out
from echo_sgl.engine.requests.tasks import is_offline

Adapters = set[str | None]

# Of a long queue those that start next matter.
MOST_AWAITED = 16


class AdapterRoom:
    """`fits`: whether a server can hold these at once. None, no adapter, is one of them."""

    def __init__(self, fits: Callable[[Adapters], bool]) -> None:
        self._fits = fits

    @classmethod
    def create(cls, scheduler: Any) -> AdapterRoom | None:
        """None where a server has no adapters."""
        if not scheduler.enable_lora:
            return None
        return cls(scheduler.tp_worker.model_runner.lora_manager.validate_lora_batch)

    def has(self, reqs: Iterable[Req], awaited: Iterable[Req] = ()) -> bool:
        """Whether all of these may be in one step."""
        return self._fits(_adapters((*reqs, *islice(awaited, MOST_AWAITED))))

    def without_room(
        self, reqs: Sequence[Req], offline: Sequence[Req], awaited: Iterable[Req] = ()
    ) -> set[str]:
        """The ids of those that cannot be in a step with all that come before them.

        `reqs` run, and those of them that may not sit out come first, then the other online ones,
        then `awaited` online requests that would start in this step, then `offline`, those that
        run or sit out, in this order. Somebody stays: a step without any decode ends nothing.
        """
        online = [req for req in reqs if not _makes_way(req)]
        held = _adapters(req for req in online if not may_sit_out(req))
        without = {req.rid for req in online if may_sit_out(req) and not self._join(held, req)}
        for req in islice(awaited, MOST_AWAITED):
            self._join(held, req)
        without |= {req.rid for req in offline if not self._join(held, req)}
        if offline and len(without) == len(online) + len(offline):
            without.discard(offline[0].rid)
        return without

    def _join(self, held: Adapters, req: Req) -> bool:
        if req.lora_id not in held and not self._fits({*held, req.lora_id}):
            return False
        held.add(req.lora_id)
        return True


def claimed_adapters(
    req: Req, *, running: Iterable[Req], starting: Iterable[Req], parked: Iterable[Req]
) -> Adapters:
    """Those beside which the adapter of a request must find room for it to start.

    `starting` are in its pass already.
    """
    if is_offline(req):
        return _adapters((*running, *starting, *parked))
    return _adapters((*starting, *(one for one in running if not _makes_way(one))))


def _makes_way(req: Req) -> bool:
    return is_offline(req) and may_sit_out(req)


def _adapters(reqs: Iterable[Req]) -> Adapters:
    return {req.lora_id for req in reqs if not req.finished()}
