"""The state directory: what the DPU application itself keeps between runs, private to its user.

`id` (this DPU's identity), `regions/NAME.yaml` (regions made by RPC), `run.json` (where a running application is
reached; gone after a clean exit) and `lock` (one application at a time). Never holds a block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from common import config
from common.errors import LowerLayerError, PreconditionError, UnavailableError, UserError
from dpu_app.config import RegionSettings

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


@dataclass(frozen=True)
class RunFile:
    """`run.json`: a running DPU application."""

    pid: int
    address: str
    """For gRPC."""
    dpu_id: str
    name: str
    incarnation: str
    version: str


@dataclass(frozen=True)
class DynamicRegion:
    """A region made by RPC."""

    settings: RegionSettings
    made_file: bool
    """Whether Entresol made the file, and so may remove it."""


class StateDir:
    """Holds the lock from `__init__` to `close`. Raises PreconditionError where another application holds it,
    LowerLayerError where the directory cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._regions = path / "regions"
        self._lock_fd = -1
        try:
            _make_private(path)
            _make_private(self._regions)
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno == errno.EWOULDBLOCK:
                raise PreconditionError(f"a DPU application with the state directory {path} runs already") from error
            raise LowerLayerError("use the state directory", error.errno or 0, str(path)) from error

    def __enter__(self) -> StateDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def dpu_id(self) -> str:
        """32 hex digits, made at the first call and the same ever after."""
        file = self.path / "id"
        with contextlib.suppress(FileNotFoundError):
            text = file.read_text(encoding="ascii").strip()
            if text:
                return text
        text = uuid.uuid4().hex
        _write(file, text + "\n")
        return text

    def write_run_file(self, run: RunFile) -> None:
        _write(self.path / "run.json", json.dumps(vars(run)) + "\n")

    def remove_run_file(self) -> None:
        """Idempotent."""
        (self.path / "run.json").unlink(missing_ok=True)

    def dynamic_regions(self) -> list[DynamicRegion]:
        """In order of name. Raises ConfigError for a file that someone damaged."""
        return [config.load_file(file, DynamicRegion) for file in sorted(self._regions.glob("*.yaml"))]

    def remember_region(self, region: DynamicRegion) -> None:
        _write(self._region_file(region.settings.name), config.to_yaml(region))

    def forget_region(self, name: str) -> None:
        """Idempotent."""
        self._region_file(name).unlink(missing_ok=True)

    def _region_file(self, name: str) -> Path:
        return self._regions / f"{name}.yaml"


def _make_private(directory: Path) -> None:
    """Make the directory, or take one that is there: an empty one or ours is closed to other users, but one that
    holds other things is not touched."""
    directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    if stat.S_IMODE(directory.stat().st_mode) == DIRECTORY_MODE:
        return
    names = os.listdir(directory)
    if names and "lock" not in names:
        raise PreconditionError(
            f"the state directory {directory} holds other things and is open to other users: name another, or make it "
            f"private (chmod 700)"
        )
    directory.chmod(DIRECTORY_MODE)


def read_run_file(state_dir: Path) -> RunFile:
    """Where the DPU application with this state directory is reached. Raises UnavailableError where none runs,
    UserError where the file is of no use."""
    file = state_dir / "run.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        run = RunFile(**values)
    except FileNotFoundError:
        raise UnavailableError(f"no DPU application runs with the state directory {state_dir}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged: remove it, and start the DPU application again") from error
    if not _is_running(run.pid):
        raise UnavailableError(f"the DPU application with the state directory {state_dir} (pid {run.pid}) was killed")
    return run


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write(file: Path, text: str) -> None:
    """All of it or nothing, also after a crash."""
    temporary = file.with_name(f".{file.name}.new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, file)
    except OSError as error:
        raise LowerLayerError("write the state directory", error.errno or 0, str(file)) from error
