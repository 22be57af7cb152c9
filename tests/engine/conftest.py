"""The servers that engine tests share."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tests.engine.tight import TIGHT, UNTRIED
from tests.servers import COMMON_ARGS, NAMED, STRICT


@pytest.fixture(scope="session")
def write_config(tmp_path_factory):
    """Writes `[offline]` keys, or whole sections, to a file; equal settings, equal file."""
    folder = tmp_path_factory.mktemp("configs")

    def write(**given: object) -> Path:
        sections: dict[str, dict[str, object]] = {"offline": {}}
        for key, value in sorted(given.items()):
            if isinstance(value, dict):
                sections[key] = value
            else:
                sections["offline"][key] = value
        lines = []
        for name, values in sections.items():
            lines += [
                f"[{name}]",
                *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
            ]
        text = "\n".join([*lines, ""])
        path = folder / f"{sha256(text.encode()).hexdigest()}.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def tight_server(server_for, write_config, request):
    """With the arguments that a test is parametrized with, if it is."""
    args = (*COMMON_ARGS, *NAMED, *UNTRIED, *getattr(request, "param", ()))
    return server_for(args, config=str(write_config(**TIGHT)), env=STRICT)
