"""A config as a TOML file again, with comments that say where its values come from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from echo_sgl.config import EchoConfig


def preset_text(config: EchoConfig, comments: Iterable[str]) -> str:
    """The TOML of a config; `load_config` reads it back equal."""
    lines = [f"# {_one_line(comment)}".rstrip() for comment in comments]
    for section in dataclasses.fields(config):
        lines += ["", f"[{section.name}]"]
        values = getattr(config, section.name)
        lines += [
            f"{item.name} = {_value(getattr(values, item.name))}"
            for item in dataclasses.fields(values)
        ]
    return "\n".join([*lines, ""])


def _one_line(comment: str) -> str:
    """Without what no TOML comment may hold: what a server answered, or a file's name, may."""
    return "".join(char if char.isprintable() else " " for char in comment)


def _value(value: Any) -> str:
    if isinstance(value, str | bool):
        # Written alike in JSON and TOML, but for surrogate pairs, and DEL as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
