"""Positions of retracted requests, for models that give the tokens of images their own.

Whenever SGLang looks at a retracted request in a prefill pass, it appends the positions of the
tokens that were generated. Passes that start nobody are frequent here, and would append them anew
each time: memory and time without end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_batch import Req


class KeptPositions(NamedTuple):
    """What a request's positions were before a pass."""

    req: Req
    positions: Any


def kept_positions(waiting: Iterable[Req]) -> list[KeptPositions]:
    """Of those that a pass may extend."""
    return [
        KeptPositions(req, req.multimodal_inputs.mrope_positions)
        for req in waiting
        if req.is_retracted and req.multimodal_inputs is not None
    ]


def restore_positions(kept: Iterable[KeptPositions], started: Sequence[Req]) -> None:
    """After the pass, of those that it did not start."""
    for req, positions in kept:
        if all(req is not one for one in started):
            req.multimodal_inputs.mrope_positions = positions
