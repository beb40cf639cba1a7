"""Real pods for the system tests: directories on a disk, and the certainty that nothing is left of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.errors import NotFoundError
from emulator.pod import Pod

COMMAND_TIMEOUT_S = 100


@dataclass(frozen=True)
class Place:
    """Where one test's pod lives."""

    run_dir: Path
    flash_dir: Path

    @property
    def options(self) -> list[str]:
        return ["--run-dir", str(self.run_dir), "--flash-dir", str(self.flash_dir)]

    def emu(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`entresol-emu` as a user runs it."""
        return subprocess.run(
            [sys.executable, "-m", "emulator.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    def left(self) -> list[str]:
        """Files and directories that a pod that is down should not have left."""
        flash = sorted(self.flash_dir.rglob("*")) if self.flash_dir.exists() else []
        return [str(path) for path in [*sorted(self.run_dir.parent.rglob("run*")), *flash]]


@pytest.fixture
def place() -> Iterator[Place]:
    # Short, for the sockets' sake; below /var/tmp, which is on a disk where /tmp may not be: flash needs O_DIRECT.
    root = Path(tempfile.mkdtemp(prefix="entresol-", dir="/var/tmp"))
    place = Place(root / "run", root / "flash")
    try:
        yield place
    finally:
        try:
            Pod.find(place.run_dir).down()
        except NotFoundError:
            pass
        finally:
            shutil.rmtree(root, ignore_errors=True)
