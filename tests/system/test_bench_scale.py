"""The scale benchmark on real pods, quick: every cell is there, no byte is wrong, nothing is left; and the cost model
takes what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emulator.scale.settings import ScaleSettings

if TYPE_CHECKING:
    from tests.system.conftest import Place


@pytest.mark.parametrize("fabric", ["emu-shm", "emu-tcp"])
def test_a_quick_run_measures_everything_and_leaves_nothing(place: Place, tmp_path: Path, fabric: str) -> None:
    report = tmp_path / "report"
    options = ["--quick", "--json", "--fabric", fabric, "--out", str(report), "--phase", "0.2"]
    done = place.emu("bench-scale", *options, *place.options)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["wrong"] == []
    assert document["fabric"] == fabric
    cells = {(cell["workers"], cell["agents"]): cell for cell in document["cells"]}
    assert set(cells) == {(1, 1), (1, 2), (2, 1), (2, 2)}
    for cell in cells.values():
        assert cell["gb_per_s"]["median"] > 0
        assert cell["latency_us"]["retrieve"]["calls"] > 0
        assert cell["cpu_s_per_gb"]["dpu"]["median"] > 0
    assert [row["workers"] for row in document["neighbours"]] == [1, 2]
    operations = {row["operation"] for row in document["samples"]["rows"]}
    assert operations == {"store", "retrieve", "retrieve_cold", "lookup"}
    assert json.loads((report / "scale.json").read_text()) == document
    text = (report / "scale.md").read_text()
    for word in ("- commit:", "worst share", "not the product's performance", "Load: small"):
        assert word in text
    assert place.left() == []
    model = place.emu("cost-model", "--report", str(report / "scale.json"), "--block", "64KiB", "--core-ratio", "0.5")
    assert model.returncode == 0, model.stderr
    assert "To carry 800 Gb/s" in model.stdout


def test_mistakes_are_for_people_and_leave_nothing(place: Place) -> None:
    done = place.emu("bench-scale", "--quick", "--workers", "2,1", *place.options)
    assert done.returncode == 2
    assert "rising numbers" in done.stderr
    done = place.emu("cost-model", "--report", str(place.run_dir / "absent.json"))
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    assert place.left() == []


def test_a_large_region_quickly(place: Place, tmp_path: Path) -> None:
    place.flash_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "emulator.cli", "bench-large", "--quick", "--slots", "40000", "--json"]
    command += ["--compared-slots", "10000", "--dir", str(place.flash_dir), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [state["slots"] for state in document["states"]] == [10_000, 10_000, 40_000, 40_000]
    assert "restart to reading the slot table" in (tmp_path / "large.md").read_text()
    assert list(place.flash_dir.iterdir()) == []


def test_quick_is_a_part_of_the_whole() -> None:
    assert set(ScaleSettings.quick().workers) <= set(ScaleSettings().workers)
    assert ScaleSettings.quick().agent_processes <= ScaleSettings().agent_processes == 8
