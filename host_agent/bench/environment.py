"""What a measurement was made on and of: machine, kernel, commit, command, date, versions. The head of every report.

Reads /proc and asks git; measures nothing. A report's JSON holds `Environment.as_dict` under the key "environment";
`missing` says what a report that was read back lacks.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from common.units import approximate_size

REQUIRED: Final = ("machine", "kernel", "commit", "command", "date")
"""What a report must say of itself."""
PACKAGES: Final = ("entresol", "numpy", "xxhash", "grpcio", "protobuf")
_GIT_TIMEOUT_S: Final = 10.0
_SOURCE: Final = Path(__file__).resolve().parent
NO_COMMIT: Final = "unknown: not run from a git checkout"


@dataclass(frozen=True)
class Environment:
    """Values are text for people. `versions` is by package or program."""

    machine: str
    kernel: str
    commit: str
    command: str
    date: str
    """When it was begun, UTC, ISO 8601."""
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def read_environment(arguments: Sequence[str] | None = None, packages: Sequence[str] = PACKAGES) -> Environment:
    """This process, now. `arguments`: the command line, else `sys.argv`; `packages`: whose versions to name besides
    Python's, those that are installed."""
    program, *rest = sys.argv if arguments is None else arguments
    return Environment(
        machine=machine_text(),
        kernel=f"{platform.system()} {platform.release()}",
        commit=commit_text(),
        command=shlex.join([Path(program).name, *rest]),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **_installed(packages)},
    )


def rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of a report's "environment", as its head shows them."""
    versions = environment.get("versions", {})
    shown = [(name, str(value)) for name, value in environment.items() if name != "versions"]
    return [*shown, ("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]


def missing(report: Mapping[str, Any]) -> list[str]:
    """Which of `REQUIRED` a report's JSON does not say, or says emptily."""
    environment = report.get("environment", {})
    return [name for name in REQUIRED if not isinstance(environment.get(name), str) or not environment[name].strip()]


def machine_text() -> str:
    """Such as "2 x AMD EPYC (family 25, model 17), x86_64, 23.5 GiB, virtual machine"."""
    cpuinfo = _fields(Path("/proc/cpuinfo"))
    name = cpuinfo.get("model name", platform.processor() or "processor of unknown name")
    if "cpu family" in cpuinfo:
        name += f" (family {cpuinfo['cpu family']}, model {cpuinfo.get('model', '?')})"
    parts = [f"{len(os.sched_getaffinity(0))} x {name}", platform.machine()]
    memory = _fields(Path("/proc/meminfo")).get("MemTotal", "").partition(" ")[0]
    if memory.isdigit():
        parts.append(approximate_size(int(memory) << 10))
    if "hypervisor" in cpuinfo.get("flags", "").split():
        parts.append("virtual machine")
    return ", ".join(parts)


def commit_text(directory: Path = _SOURCE) -> str:
    """`git describe` of the checkout that holds `directory`, with "-dirty" where tracked files differ from it."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return NO_COMMIT
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else NO_COMMIT


def file_system_text(path: Path) -> str:
    """File system and device that hold `path`, such as "ext4 on /dev/vda"; empty where that cannot be told."""
    try:
        device = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields = line.split()
        if fields[2] == number:
            kind, source = fields[fields.index("-") + 1 :][:2]
            return f"{kind} on {source}"
    return ""


def _installed(packages: Sequence[str]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _fields(path: Path) -> dict[str, str]:
    """The first value of each "name: value" of a file of /proc; empty where it cannot be read."""
    found: dict[str, str] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found
