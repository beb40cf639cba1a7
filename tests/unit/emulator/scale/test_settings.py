"""What bench-scale can be told to measure, and that windows hold what it calls staged."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from dpu_app.config import RegionSettings
from emulator.pod_settings import PodSettings
from emulator.scale.run import list_cells
from emulator.scale.settings import LARGE, Load, SampleGrid, ScaleSettings

BASE = PodSettings(run_dir=Path("/run/x"), flash_dir=Path("/var/tmp/x"))


@pytest.mark.parametrize("settings", [ScaleSettings(), ScaleSettings.quick()])
def test_windows_hold_all_working_sets_and_stores_leave_room(settings: ScaleSettings) -> None:
    blocks = sum(load.working_blocks for load in settings.all_loads) * settings.agent_processes
    for workers in settings.workers:
        pod = settings.pod(BASE, workers, Path("/run/x/w"))
        frames = pod.window_bytes // pod.slot_bytes
        assert (pod.dpus, pod.regions) == (1, workers)
        assert frames * RegionSettings.dirty_fraction * workers > blocks
        assert pod.capacity_bytes > pod.window_bytes
        assert all(load.block_bytes <= pod.slot_bytes for load in settings.all_loads)


def test_the_sampled_pod_has_one_worker_that_sleeps_and_a_window_smaller_than_the_cold_blocks() -> None:
    grid = ScaleSettings().samples
    pod = grid.pod(BASE, Path("/run/x/c"))
    assert (pod.regions, pod.busy_poll_s) == (1, 0.0)
    assert pod.window_bytes // pod.slot_bytes < grid.cold_blocks < pod.capacity_bytes // pod.slot_bytes


def test_every_cell_once() -> None:
    cells = list_cells(ScaleSettings())
    assert len(cells) == len(set(cells)) == 2 * 4 * 4 + 4 * 2
    assert (8, ("large",) * 8) in cells
    assert (2, ("one-block", "large", "large", "large")) in cells
    assert len(list_cells(dataclasses.replace(ScaleSettings(), neighbours=0))) == 32


@pytest.mark.parametrize(
    "changes",
    [{"workers": ()}, {"workers": (2, 1)}, {"agents": (0, 1)}, {"agents": (1, 17)}, {"rounds": 0}, {"phase_s": 0.0}],
)
def test_settings_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        dataclasses.replace(ScaleSettings(), **changes)


@pytest.mark.parametrize(
    "changes", [{"block_bytes": 1000}, {"batch": 0}, {"batch": 513}, {"weights": (0, 1, 0)}, {"working_batches": 0}]
)
def test_loads_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        dataclasses.replace(LARGE, **changes)
    assert Load("x", 4096, 1).batch_bytes == 4096


def test_a_grid_must_fit_its_window() -> None:
    with pytest.raises(UserError):
        SampleGrid(frames=128)
    with pytest.raises(UserError):
        SampleGrid(cold_blocks=300)
