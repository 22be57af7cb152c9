"""Results are written whole or not at all, whoever else fetches them and whatever comes between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from echo_sgl.cli.batch.client import BatchClient

WHOLE = b"first\nlast\n"


@pytest.fixture
def client() -> BatchClient:
    return BatchClient("http://127.0.0.1:9", None)


def test_two_that_fetch_the_same_results_at_once_both_write_them_whole(
    client: BatchClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"

    def copy(file_id: str, write: Callable[[bytes], object]) -> None:
        write(b"first\n")
        if file_id == "file-slow":
            client.download("file-quick", path)
            assert path.read_bytes() == WHOLE
        write(b"last\n")

    monkeypatch.setattr(client, "_copy_content", copy)
    client.download("file-slow", path)
    assert path.read_bytes() == WHOLE
    assert list(tmp_path.iterdir()) == [path]


def test_results_that_were_interrupted_leave_what_was_there(
    client: BatchClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"before\n")

    def interrupt(file_id: str, write: Callable[[bytes], object]) -> None:
        write(b"first\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_copy_content", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.download("file-quick", path)
    assert path.read_bytes() == b"before\n"
    assert list(tmp_path.iterdir()) == [path]
