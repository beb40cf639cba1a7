"""Small multiples for a report: panels that share their axes, lines of medians with their spread, limits dashed.

Needs matplotlib (the extra `bench`); `available` says whether it is there. Knows nothing of what is drawn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.errors import UserError

_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Told apart by the colour-blind too (Okabe and Ito)."""
_PANEL_INCHES: Final = (3.4, 2.7)
_MARKERS: Final = "os^Dv<>"


@dataclass(frozen=True)
class Line:
    """Points by x: a value, or value, lowest and highest. `colour` numbers what belongs together; `dashed`: a limit."""

    label: str
    points: Mapping[float, float | tuple[float, float, float]]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Axes:
    """Both axes of every panel, logarithmic. `x_ticks` are labels by x; `y_shared`: one scale for all panels."""

    x_label: str
    y_label: str
    x_ticks: Mapping[float, str]
    y_shared: bool = True


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, title: str, panels: Sequence[Panel], axes: Axes, columns: int = 2) -> None:
    """Write the picture; its kind is that of `path`'s suffix (.svg, .png).

    Raises UserError where matplotlib is not installed or the file cannot be written.
    """
    if not available():
        raise UserError("plots need matplotlib: install entresol[bench]")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(
        {"svg.hashsalt": "entresol", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 9}
    ):
        figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, sharex=True, sharey=axes.y_shared, squeeze=False)
        labels: dict[str, Any] = {}
        for place, panel in enumerate(panels):
            _draw_panel(grid[place // columns][place % columns], panel, axes, labels)
        for place in range(len(panels), rows * columns):
            grid[place // columns][place % columns].set_visible(False)
        for place in range(max(0, len(panels) - columns), len(panels)):
            bottom = grid[place // columns][place % columns]
            bottom.set_xlabel(axes.x_label)
            bottom.tick_params(labelbottom=True)
        for row in grid:
            row[0].set_ylabel(axes.y_label)
        figure.suptitle(title, fontsize=9)
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False)
        try:
            figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def _draw_panel(place: Any, panel: Panel, axes: Axes, labels: dict[str, Any]) -> None:
    """One set of axes; each label that is new joins the legend."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    place.set_title(panel.title)
    place.set_xscale("log", base=2)
    place.set_yscale("log")
    for line in panel.lines:
        xs = sorted(line.points)
        values = [line.points[x] for x in xs]
        triples = [value if isinstance(value, tuple) else (value, value, value) for value in values]
        colour = _COLOURS[line.colour % len(_COLOURS)]
        style = {"linestyle": "--", "linewidth": 1.0, "alpha": 0.8} if line.dashed else {"linewidth": 1.5}
        if not line.dashed:
            style |= {"marker": _MARKERS[line.colour % len(_MARKERS)], "markersize": 3.5}
        (drawn,) = place.plot(xs, [middle for middle, _, _ in triples], color=colour, **style)
        if not line.dashed:
            place.fill_between(
                xs, [low for _, low, _ in triples], [high for *_, high in triples], color=colour, alpha=0.15
            )
        labels.setdefault(line.label, drawn)
    place.set_xticks(list(axes.x_ticks), list(axes.x_ticks.values()))
    place.xaxis.set_minor_locator(NullLocator())
    place.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    place.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    place.yaxis.set_minor_locator(NullLocator())
    place.grid(True, which="major", alpha=0.3, linewidth=0.5)
