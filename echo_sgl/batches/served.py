"""Which batches this server can work on: a restart may have given it another model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from echo_sgl.batches.job_file import is_served
from echo_sgl.batches.line_engine import LineEngine
from echo_sgl.batches.store.batch_rows import BatchRow

logger = logging.getLogger(__name__)


class ServedBatches:
    """Tells batches that were checked for this server's model from those of another.

    SGLang answers any model's name with the model that it has, so nobody else would notice. A
    batch of several models (adapters of one base) is not looked at: its lines name theirs.
    """

    def __init__(self, engine: LineEngine) -> None:
        self._engine = engine
        self._models: Sequence[str] = ()
        self._foreign: set[int] = set()

    async def foreign(self, rows: Iterable[BatchRow]) -> set[int]:
        """Numbers of the batches in progress that wait for another server; each is logged once."""
        rows = [row for row in rows if row.status == "in_progress"]
        if any(self._is_foreign(row) for row in rows):  # an adapter may have been loaded since
            self._models = await self._engine.models()
        found = {row.number: row for row in rows if self._models and self._is_foreign(row)}
        for number in found.keys() - self._foreign:
            logger.warning(
                "%s is for %s of %s and waits for a server that has it; this one has %s of %s",
                found[number].id,
                found[number].endpoint,
                found[number].model,
                ", ".join(self._engine.endpoints),
                ", ".join(self._models),
            )
        self._foreign = set(found)
        return self._foreign

    def _is_foreign(self, row: BatchRow) -> bool:
        has_model = row.model is None or is_served(row.model, self._models)
        return not has_model or row.endpoint not in self._engine.endpoints
