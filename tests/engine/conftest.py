"""The servers that engine tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eval.server import Server

# SGLang checks after every step that free, cached and locked tokens add up to the pool.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
COMMON_ARGS = (
    "--enable-metrics",
    "--enable-cache-report",
    "--chunked-prefill-size",
    "256",
    "--max-total-tokens",
    "8000",
)


@pytest.fixture
def echo_server(server_for) -> Server:
    return server_for((*COMMON_ARGS, "--max-running-requests", "16"), config="echo", env=STRICT)


@pytest.fixture
def stock_server(server_for) -> Server:
    return server_for((*COMMON_ARGS, "--max-running-requests", "16"))


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
            lines += [f"[{name}]", *(f"{key} = {value!r}" for key, value in values.items())]
        path = folder / f"{'-'.join(lines).replace(' ', '').replace(os.sep, '')}.toml"
        path.write_text("\n".join([*lines, ""]))
        return path

    return write
