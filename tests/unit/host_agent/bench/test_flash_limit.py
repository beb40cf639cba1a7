"""The disk's limit is measured on a file that leaves no trace."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from common.errors import LowerLayerError
from host_agent.bench.flash_limit import FlashLimit


def test_it_reads_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # on a disk, where /tmp may not be
        with FlashLimit(Path(directory), 8 << 20) as limit:
            assert limit.read_s(64 << 10, 4, 3) > 0
            assert limit.read_s(4 << 20, 1, 2) > 0
            assert list(Path(directory).iterdir()) == []
        limit.close()


def test_a_directory_that_is_absent_is_said(tmp_path: Path) -> None:
    with pytest.raises(LowerLayerError, match="absent"):
        FlashLimit(tmp_path / "absent", 4 << 20)
