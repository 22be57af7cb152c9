"""Readers and makers of workloads: arrival traces, prompts of given lengths, offline jobs."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from echo_sgl.errors import EchoError
from echo_sgl.sim.text_files import open_text_file

DATA_ENV = "ECHO_EVAL_DATA"
BESIDE_THE_CLONE = Path(__file__).resolve().parents[3] / "shared" / "data"
DATA_DIR = Path(os.environ.get(DATA_ENV) or BESIDE_THE_CLONE)


class WorkloadError(EchoError, ValueError):
    """A workload file or a request made from it cannot be used; the message says where."""


def read_lines(path: Path, *, max_chars: int = -1) -> Iterator[tuple[int, str]]:
    """Numbered lines (from 1) of a text file, which may be gzip'd; longer ones come in parts.

    Errors: `WorkloadError` when the file cannot be read as UTF-8 text.
    """
    try:
        with open_text_file(path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig")
            yield from enumerate(iter(lambda: text.readline(max_chars), ""), start=1)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error


def find_data(name: str) -> Path:
    """A path as given, or the file of that name among the real workloads in `DATA_DIR`.

    Errors: `WorkloadError` names both places that were looked at.
    """
    for path in (Path(name), DATA_DIR / name):
        if path.is_file():
            return path
    raise WorkloadError(
        f"there is no file {name}, neither here nor in {DATA_DIR}; {DATA_ENV} names another folder"
    )
