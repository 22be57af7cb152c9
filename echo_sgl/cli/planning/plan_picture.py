"""The picture of `echo-sgl plan`: promises kept and offline work against the online load."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo_sgl.errors import ConfigError

if TYPE_CHECKING:
    from echo_sgl.sim.load_sweep import LoadPoint

FORMATS = (".svg", ".png", ".pdf")
WIDTH_IN, HEIGHT_IN = 6.4, 4.8
# Its own type names every setting there is.
STYLE: Any = {
    "svg.hashsalt": "echo-sgl",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def check_picture(path: Path) -> None:
    """Errors: `ConfigError` when no such picture could be drawn; said before anything runs."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--picture is {str(path)!r}; the name must end in {', '.join(FORMATS)}")
    if path.is_dir():
        raise ConfigError(f"--picture is {str(path)!r}, which is a folder; name a file in it")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"--picture is {str(path)!r}; its folder does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"--picture is {str(path)!r}, which may not be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--picture needs matplotlib: pip install matplotlib")


def draw_picture(path: Path, points: Sequence[LoadPoint]) -> None:
    """Two plots with one axis: how many promises are kept, and what is left to sell."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    loads = [one.load for one in points]
    with rc_context(STYLE):
        figure = Figure((WIDTH_IN, HEIGHT_IN), layout="constrained")
        kept, sold = figure.subplots(2, sharex=True)
        kept.plot(loads, [one.attainment for one in points], marker="o")
        kept.yaxis.set_major_formatter(PercentFormatter(1.0))
        kept.set_ylim(0.0, 1.02)
        kept.set_ylabel("promises kept")
        sold.plot(loads, [one.offline_tokens_per_s * 3600 for one in points], marker="o")
        sold.set_ylim(bottom=0.0)
        sold.set_ylabel("offline tokens an hour")
        sold.set_xlabel("online load, as a multiple of the trace's")
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"--picture {path} was not written: {error.strerror}") from error
