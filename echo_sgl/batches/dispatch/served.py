"""Which batches this server can work on: others, or a start before it, may have other models."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from echo_sgl.batches.dispatch.line_engine import LineEngine
from echo_sgl.batches.lines.job_line import shortened
from echo_sgl.batches.lines.model_names import is_served
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.offers import Offer

MAX_MODELS_CHARS = 400
logger = logging.getLogger(__name__)


class ServedBatches:
    """Tells batches that this server has all models of from those of another.

    SGLang answers any model's name with the model that it has, so nobody else would notice.
    """

    def __init__(self, engine: LineEngine) -> None:
        self._engine = engine
        self.names: Mapping[str, str] = {}  # as last asked for; see `LineEngine.models`
        self._foreign: set[int] = set()

    async def foreign(self, rows: Iterable[BatchRow]) -> set[int]:
        """Numbers of the batches in progress that wait for another server; each is logged once."""
        rows = [row for row in rows if row.status == "in_progress"]
        # Of what it does not have by the last answer, an adapter may have been loaded since.
        if rows and (not self.names or any(map(self._is_foreign, rows))):
            self.names = await self._engine.models()
        found = {row.number: row for row in rows if self.names and self._is_foreign(row)}
        for number in found.keys() - self._foreign:
            logger.warning(
                "%s is for %s of %s and waits for a server that has it; this one has %s of %s",
                found[number].id,
                found[number].endpoint,
                _listed(_needed_models(found[number])),
                ", ".join(self._engine.endpoints),
                _listed(self.names),
            )
        self._foreign = set(found)
        return self._foreign

    def _is_foreign(self, row: BatchRow) -> bool:
        has_models = all(is_served(model, self.names) for model in _needed_models(row))
        return not has_models or row.endpoint not in self._engine.endpoints


def _needed_models(row: BatchRow) -> Sequence[str]:
    """What a server must have for a batch.

    None if it has several and was checked by an echo-sgl that did not keep them: then each line is
    looked at when it is claimed.
    """
    return row.models or ([] if row.model is None else [row.model])


def _listed(names: Iterable[str]) -> str:
    return shortened(", ".join(names), MAX_MODELS_CHARS)


class LeftToOthers:
    """Batches whose files name models that this server lacks and another one has, or may have.

    They wait unchecked, until what the servers have changes. What a server said before a batch was
    created does not count: it may have loaded an adapter since.
    """

    def __init__(self, server_id: str) -> None:
        self._server_id = server_id
        self._offers: Sequence[Offer] = ()
        self._left: dict[int, dict[str, Sequence[str]]] = {}

    def look(self, offers: Sequence[Offer], rows: Iterable[BatchRow]) -> set[int]:
        """Numbers of the open batches that are still left to others, who now offer this."""
        self._offers = offers
        kept = {row.number: self._models(row) for row in rows if row.number in self._left}
        self._left = {
            number: models for number, models in kept.items() if models == self._left[number]
        }
        return set(self._left)

    def models_of_others(self, batch: BatchRow) -> list[Sequence[str]]:
        """The models of each other live server, none if they are not known."""
        found = self._models(batch)
        return [models for server, models in found.items() if server != self._server_id]

    def leave(self, batch: BatchRow) -> None:
        """Leave a batch to the others, until they offer something else than at the last look."""
        self._left[batch.number] = self._models(batch)
        logger.warning(
            "%s names models that this server does not have, and waits for one that has them",
            batch.id,
        )

    def _models(self, batch: BatchRow) -> dict[str, Sequence[str]]:
        return {
            offer.server: offer.models if offer.said_at_s >= batch.created_at_s else []
            for offer in self._offers
        }
