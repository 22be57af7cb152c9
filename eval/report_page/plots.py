"""Plots of the report as SVG text: bars, lines and points, and nothing of their meaning."""

from __future__ import annotations

import html
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

Series = tuple[Sequence[float], Sequence[float]]

WIDTH_IN, HEIGHT_IN = 6.4, 3.2
CUT_AT = 30.0
# Equal figures give equal bytes, and text stays text.
STYLE: Any = {
    "svg.hashsalt": "echo-sgl",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def bars(
    title: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str,
    target: float | None = None,
) -> str:
    """One group of bars a name, one bar a series in it; None leaves a gap.

    `unit` "%" shows shares as percent; `target` is a line across. A bar of more than
    `CUT_AT` times the median is cut there, hatched, with its true figure on it: it would
    flatten all others.
    """
    cut = CUT_AT * _median([v for values in series.values() for v in values if v is not None])
    with rc_context(STYLE):
        figure, axes = _figure(title, unit)
        too_high: list[Patch] = []
        width = 0.8 / len(series)
        for number, (label, values) in enumerate(series.items()):
            known = [(place, value) for place, value in enumerate(values) if value is not None]
            left = [place - 0.4 + width * (number + 0.5) for place, _ in known]
            heights = [min(value, cut) for _, value in known]
            drawn = axes.bar(left, heights, width * 0.95, label=label)
            pairs = zip(drawn, known, strict=True)
            too_high += [patch for patch, (_, value) in pairs if value > cut]
            shown = [_figure_of(value, unit) for _, value in known]
            axes.bar_label(drawn, shown, fontsize=7, padding=1)
        axes.set_xticks(range(len(names)), names, rotation=20 if len(names) > 4 else 0)
        axes.margins(y=0.15)
        if target is not None:
            axes.axhline(target, color="0.3", linestyle="--", linewidth=1)
        _legend(axes, len(series))
        for patch in too_high:
            patch.set_hatch("//")
        return _svg(figure, title)


def lines(title: str, series: Mapping[str, Series], *, x: str, unit: str) -> str:
    """One line a series, from its first to its second coordinates."""
    with rc_context(STYLE):
        figure, axes = _figure(title, unit)
        for label, (places, values) in series.items():
            axes.plot(places, values, label=label, linewidth=1.3)
        axes.set_xlabel(x)
        axes.set_ylim(bottom=0)
        _legend(axes, len(series))
        return _svg(figure, title)


def points(title: str, places: Mapping[str, tuple[float, float]], *, x: str, unit: str) -> str:
    """One named point each."""
    with rc_context(STYLE):
        figure, axes = _figure(title, unit)
        for label, (right, up) in places.items():
            axes.scatter([right], [up], s=28)
            axes.annotate(label, (right, up), (4, 4), textcoords="offset points", fontsize=8)
        axes.set_xlabel(x)
        if x.endswith("%"):
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.margins(0.15)
        axes.set_ylim(bottom=0)
        return _svg(figure, title)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) or math.inf if values else math.inf


def _figure(title: str, unit: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=10)
    if unit == "%":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.set_ylabel(unit)
    return figure, axes


def _figure_of(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _legend(axes: Axes, num_series: int) -> None:
    if num_series > 1:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _svg(figure: Figure, title: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    body = text[text.index("<svg") :]
    return body.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
