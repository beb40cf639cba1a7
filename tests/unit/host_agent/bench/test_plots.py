"""Pictures are written where matplotlib is, and refused with a word where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from host_agent.bench import plots
from host_agent.bench.plots import Axes, Line, Panel

AXES = Axes("block", "GB/s", {1024: "1KiB", 4096: "4KiB"})
PANELS = [
    Panel("RETRIEVE", [Line("batch 1", {1024: (1, 0.5, 2), 4096: 2.0}), Line("limit", {1024: 3.0}, dashed=True)]),
    Panel("STORE", [Line("batch 1", {1024: 1.0})]),
    Panel("LOOKUP", []),
]


def test_a_picture_names_its_panels_and_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    plots.draw(path, "Throughput", PANELS, AXES)
    text = path.read_text()
    for word in ("Throughput", "RETRIEVE", "STORE", "batch 1", "limit", "1KiB"):
        assert f">{word}</text>" in text
    with pytest.raises(UserError, match="cannot be written"):
        plots.draw(tmp_path / "absent" / "plot.svg", "Throughput", PANELS, AXES)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    with pytest.raises(UserError, match=r"entresol\[bench\]"):
        plots.draw(tmp_path / "plot.svg", "Throughput", PANELS, AXES)
