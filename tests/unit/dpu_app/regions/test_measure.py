"""The measurement of a region's index is itself right: a full table, all of it recovered, exactly so many slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from doca_shims.api import ShimError
from dpu_app.regions.measure import capacity_of, main, measure
from dpu_app.regions.superblock import Geometry


@pytest.mark.parametrize("slots", [64, 65, 10_000, 1_000_001])
@pytest.mark.parametrize("slot_bytes", [4096, 1 << 20])
def test_capacity_is_for_exactly_so_many_slots(slots: int, slot_bytes: int) -> None:
    assert Geometry.fit(capacity_of(slots, slot_bytes), slot_bytes).slots == slots


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_small_region_is_measured(tmp_path: Path, shuffled: bool) -> None:
    try:
        report = measure(str(tmp_path / "flash"), 20_000, 4096, "s3fifo", "thread_pool", shuffled)
    except ShimError as error:
        if "O_DIRECT" in error.detail:
            pytest.skip(str(error))
        raise
    assert report.slots == 20_000
    assert report.table_bytes == 20_032 * 64
    assert report.read_s > 0
    assert report.ratio > 0
    assert any("bytes a slot" in line for line in report.lines())


def test_the_file_is_removed_and_errors_are_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flash"
    path.write_bytes(b"x")
    assert main(["--slots", "1000", "--path", str(path), "--keep"]) == 2
    assert "measure:" in capsys.readouterr().err
    assert path.read_bytes() == b"x"
