"""Puts each family of peers into an environment of its own, bounded in time; what fails is the peer's error.

Knows pip and venv, nothing of what is installed. A stamp in the environment says with what it was made.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from emulator.peers.catalogue import Family
from emulator.peers.turns import PeerError

_STAMP: Final = ".installed"
_TAIL_LINES: Final = 4


def python_of(directory: Path, family: Family) -> Path:
    """The interpreter of a family's environment; this one for a family that needs nothing."""
    if not family.requirements and not family.no_deps:
        return Path(sys.executable)
    return directory / family.name / "bin" / "python"


def install(directory: Path, family: Family, timeout_s: float) -> None:
    """Make the environment, or leave it where it is as wanted. Raises PeerError with the end of what was said."""
    python = python_of(directory, family)
    if python == Path(sys.executable):
        return
    home = directory / family.name
    wanted = "\n".join((sys.version, *family.requirements, *family.no_deps))
    stamp = home / _STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "venv", "--clear", str(home)], timeout_s)
    if family.requirements:
        _run([*pip, *family.requirements], timeout_s)
    if family.no_deps:
        _run([*pip, "--no-deps", *family.no_deps], timeout_s)
    stamp.write_text(wanted)


def _run(command: list[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"not installed: {' '.join(command[1:4])} took more than {timeout_s:.0f} s") from None
    except OSError as error:
        raise PeerError(f"not installed: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING")]
        raise PeerError("not installed: " + " / ".join(lines[-_TAIL_LINES:]))
