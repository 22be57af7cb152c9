"""Passes that start nobody leave the positions of retracted requests what they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.mm_utils import extend_mrope_positions_for_retracted_request

from echo_sgl.engine.requests.positions import kept_positions, restore_positions

NUM_OUTPUTS = 5


def retracted(*, is_retracted: bool = True) -> Any:
    positions = torch.arange(10).expand(3, -1).clone()
    inputs = SimpleNamespace(mrope_positions=positions)
    return SimpleNamespace(is_retracted=is_retracted, multimodal_inputs=inputs)


def look_at(reqs: list[Any]) -> None:
    """As SGLang does in a pass, whether or not it starts them."""
    for req in reqs:
        inputs = req.multimodal_inputs
        inputs.mrope_positions = extend_mrope_positions_for_retracted_request(
            inputs.mrope_positions, NUM_OUTPUTS
        )


def test_positions_are_extended_once_and_in_the_pass_that_starts() -> None:
    waits, starts = retracted(), retracted()
    text = SimpleNamespace(is_retracted=True, multimodal_inputs=None)
    before = waits.multimodal_inputs.mrope_positions
    for _ in range(3):
        kept = kept_positions([waits, starts, text, retracted(is_retracted=False)])
        look_at([waits, starts])
        restore_positions(kept, ())
    kept = kept_positions([waits, starts, text])
    look_at([waits, starts])
    restore_positions(kept, [starts])
    assert waits.multimodal_inputs.mrope_positions is before
    extended = starts.multimodal_inputs.mrope_positions
    assert extended.shape == (3, 10 + NUM_OUTPUTS)
    assert extended[0].tolist() == list(range(10 + NUM_OUTPUTS))
