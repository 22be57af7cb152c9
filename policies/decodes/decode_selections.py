"""The decode selection that a config names."""

from __future__ import annotations

from echo_sgl.policies.decodes.bottleneck_selection import BottleneckSelection
from echo_sgl.policies.decodes.decode_selection import (
    DecodeSelection,
    InOrderSelection,
    MixSelection,
    ShortestSelection,
    UncachedSelection,
)

_SEEDLESS: dict[str, type[DecodeSelection]] = {
    "in-order": InOrderSelection,
    "shortest": ShortestSelection,
    "uncached": UncachedSelection,
}
_SEEDED: dict[str, type[MixSelection]] = {"mix": MixSelection, "bottleneck": BottleneckSelection}


def create_decode_selection(name: str, *, seed: int) -> DecodeSelection:
    """Build a selection by its config name. Errors: `ValueError` names the known ones."""
    if name in _SEEDED:
        return _SEEDED[name](seed=seed)
    if name not in _SEEDLESS:
        raise ValueError(
            f"decode selection is {name!r}; known are {', '.join((*_SEEDLESS, *_SEEDED))}"
        )
    return _SEEDLESS[name]()
