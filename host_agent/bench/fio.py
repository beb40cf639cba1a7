"""Runs fio, where it is installed, on a file that is open here: random reads and writes with O_DIRECT by io_uring.

Figures are those of fio's own clock over its transfers, without its start. Debian and Ubuntu have it as `fio`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

from common.errors import LowerLayerError

FIRST_WRITE: Final = "first_write"
_TIMEOUT_S: Final = 60.0


def version() -> str:
    """Such as "fio-3.33"; empty where it is not installed."""
    path = shutil.which("fio")
    if path is None:
        return ""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def command(way: str, file: Path, length_bytes: int, block_bytes: int, depth: int, seconds: float) -> list[str]:
    """`way`: "read"; "write" over what is there already; "first_write", at most once to each place."""
    first = way == FIRST_WRITE
    return [
        "fio",
        "--output-format=json",
        f"--name={way}",
        f"--rw=rand{_counted(way)}",
        f"--filename={file}",
        f"--size={length_bytes}",
        f"--bs={block_bytes}",
        f"--iodepth={depth}",
        "--ioengine=io_uring",
        "--direct=1",
        "--allow_file_create=0",
        "--randrepeat=0",
        f"--runtime={int(seconds * 1000)}ms",
        *(("--overwrite=0", "--fallocate=none") if first else ("--overwrite=1", "--time_based")),
    ]


def rate(way: str, file: Path, length_bytes: int, block_bytes: int, depth: int, seconds: float) -> float:
    """Bytes a second that were moved in `seconds`, with `depth` transfers under way at any time. `way` as `command`
    has it. Raises LowerLayerError, with fio's words."""
    arguments = command(way, file, length_bytes, block_bytes, depth, seconds)
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise LowerLayerError("fio", error.errno or 0, str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise LowerLayerError("fio", 0, f"not done after {_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise LowerLayerError("fio", 0, (done.stderr or done.stdout).strip().replace("\n", "; ")[:500])
    return parse(done.stdout, way)


def parse(output: str, way: str) -> float:
    """Bytes a second, from fio's JSON. Raises LowerLayerError for anything else, or where nothing was moved."""
    try:
        found = float(json.loads(output[output.index("{") :])["jobs"][0][_counted(way)]["bw_bytes"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise LowerLayerError("fio", 0, f"its output is not understood: {error!r}") from error
    if found <= 0:
        raise LowerLayerError("fio", 0, "it moved nothing")
    return found


def _counted(way: str) -> str:
    """As fio calls it."""
    return "write" if way == FIRST_WRITE else way
