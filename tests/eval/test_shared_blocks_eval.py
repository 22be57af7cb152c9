"""The shared-block experiment: a small run of every layout, and wrong options."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from eval import shared_blocks


def test_a_small_run_of_shared_blocks_has_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blocks, "RESULTS_DIR", tmp_path)
    trace = tmp_path / "trace.csv"
    lines = [f"{n / 2},{200 + n % 7},{5 + n % 11}" for n in range(20)]
    lines.append("9.6,4000,97")
    trace.write_text("\n".join(["t_s,context_tokens,generated_tokens", *lines]), encoding="utf-8")
    options = shared_blocks.BlockOptions(
        trace=str(trace), duration_s=10.0, kv_tokens=8192, online_scale=1.0
    )
    folder = shared_blocks.run(options, command="python -m eval.shared_blocks")
    rows = orjson.loads((folder / "summary.json").read_bytes())["rows"]
    assert len(rows) == 2 * (3 + 4 + 4)
    assert all(one["offline_tokens_per_s"] > 0 for one in rows)
    text = (folder / "summary.md").read_text(encoding="utf-8")
    assert "pages of 64: shared has offline tokens/s" in text
    assert "- 1 online requests need more than half of the pool and are left out" in text


def test_wrong_options_are_told_by_name() -> None:
    with pytest.raises(ValueError, match="--kv-tokens is 1; it must be 64 or more"):
        shared_blocks.BlockOptions(kv_tokens=1)
