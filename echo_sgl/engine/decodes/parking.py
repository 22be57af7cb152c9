"""Offline decodes that sit out: out of the running batch, with their KV and their row kept.

    running batch  a b C D       park C, D     running batch  a b
                                  --------->   parked         C D
                                  <---------
                                   resume

Nothing is computed again when they resume. If memory gets short they are the first to give
theirs up: retracted, what they computed goes into the tree and stays there, evictable.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator


class ParkedDecodes:
    """The requests that sit out, as a batch of SGLang's that no step runs.

    A request's last sampled token waits for it in SGLang's relay, by the request's row; its
    lengths and sampling parameters wait here, and so does what SGLang counted of its tokens for
    penalties.
    """

    def __init__(self) -> None:
        self._batch: ScheduleBatch | None = None

    def __len__(self) -> int:
        return len(self._batch.reqs) if self._batch is not None else 0

    def __iter__(self) -> Iterator[Req]:
        return iter(self._batch.reqs if self._batch is not None else ())

    def park(self, batch: ScheduleBatch, indices: Sequence[int]) -> None:
        """Move these requests out of a batch."""
        leaving = _split(batch, indices)
        if self._batch is None:
            self._batch = leaving
        else:
            self._batch.merge_batch(leaving)

    def resume(self, batch: ScheduleBatch, rids: Collection[str]) -> None:
        """Move parked requests into a batch that has requests already."""
        indices = [index for index, req in enumerate(self) if req.rid in rids]
        if indices:
            batch.merge_batch(self._take(indices))

    def take_all(self) -> ScheduleBatch | None:
        """All of them as a batch of their own; nobody is parked any more."""
        batch, self._batch = self._batch, None
        return batch

    def drop_finished(self) -> None:
        """Forget requests that ended with the result of the step in which they were parked."""
        if self._batch is not None and any(req.finished() for req in self._batch.reqs):
            self._batch.filter_batch()
            self._forget_if_empty()

    def retract(self, rid: str) -> Req:
        """Take one out of memory; it is to wait in the pool again."""
        assert self._batch is not None
        req = next(req for req in self._batch.reqs if req.rid == rid)
        retract(self._batch, req, num_decoding=0)
        self._forget_if_empty()
        return req

    def _take(self, indices: Sequence[int]) -> ScheduleBatch:
        assert self._batch is not None
        if len(indices) == len(self):
            taken, self._batch = self._batch, None
        else:
            taken = _split(self._batch, indices)
        return taken

    def _forget_if_empty(self) -> None:
        if self._batch is not None and self._batch.is_empty():
            self._batch = None


def retract(batch: ScheduleBatch, req: Req, *, num_decoding: int) -> None:
    """Take a request out of a batch and of memory; what it computed stays in the tree.

    SGLang also evicts what so many decoding requests need next.
    """
    index = batch.reqs.index(req)
    batch.release_req(index, num_decoding)
    batch.filter_batch(keep_indices=[one for one in range(len(batch.reqs)) if one != index])


def has_prompt_logprobs(req: Req) -> bool:
    """Whether a request is to say how likely tokens of its prompt were."""
    return req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)


def _split(batch: ScheduleBatch, indices: Sequence[int]) -> ScheduleBatch:
    """Move requests into a new batch. Both go on independently: no tensor is changed in place."""
    chosen = set(indices)
    part = copy.copy(batch)
    part.sampling_info = copy.copy(batch.sampling_info)
    penalties = batch.sampling_info.penalizer_orchestrator
    # The shared one would lose the counts of those that stay.
    part.sampling_info.penalizer_orchestrator = _penalties(part, ())
    part.filter_batch(keep_indices=list(indices))
    part.sampling_info.penalizer_orchestrator = _penalties(part, penalties.penalizers)
    _count_on(part.sampling_info.penalizer_orchestrator, penalties, indices)
    kept = [index for index in range(len(batch.reqs)) if index not in chosen]
    batch.filter_batch(keep_indices=kept)
    return part


def _penalties(batch: ScheduleBatch, penalizers: Iterable[Any]) -> Any:
    vocab_size = batch.sampling_info.vocab_size
    return BatchedPenalizerOrchestrator(vocab_size, batch, set(penalizers))


def _count_on(part: Any, whole: Any, indices: Sequence[int]) -> None:
    """Give requests that leave a batch what was counted of their tokens there."""
    rows = torch.tensor(indices, dtype=torch.int64, device=whole.device)
    for kind, penalizer in part.penalizers.items():
        if penalizer.is_prepared():  # by one of them, so in the whole batch as well
            counts = vars(whole.penalizers[kind]).items()
            vars(penalizer).update(
                {name: rowed[rows] for name, rowed in counts if isinstance(rowed, torch.Tensor)}
            )
