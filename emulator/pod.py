"""A pod on one machine: N DPU processes, each with M region workers on files that stand for flash.

Owns the run directory (private to the user) and the pod's flash files, and removes both when the pod goes down.
Starts `entresol-dpu` as anyone would, and waits until it serves. Used by `emulator.cli`, `emulator.demo` and the
system tests; knows nothing of blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from common import config
from common.errors import AlreadyExistsError, DeadlineError, NotFoundError, UnavailableError, UserError
from common.units import approximate_size
from emulator import processes
from emulator.pod_settings import DpuEntry, PodSettings, PodState, agent_config_text, dpu_config, dpu_entry
from emulator.pod_status import not_serving

_STATE_FILE: Final = "pod.json"
_LOCK_FILE: Final = ".lock"
_READY_POLL_S: Final = 0.05
_LOG_TAIL_LINES: Final = 25


class Pod:
    """A pod that was started, by this process or another. `down` ends it and removes its files."""

    def __init__(self, state: PodState) -> None:
        self.state = state

    @property
    def run_dir(self) -> Path:
        return self.state.settings.run_dir

    @classmethod
    def find(cls, run_dir: Path) -> Pod:
        """The pod whose run directory this is, running or left behind. Raises NotFoundError, UserError."""
        path = run_dir / _STATE_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise NotFoundError(f"no pod in {run_dir}; 'entresol-emu up' starts one") from error
        except (ValueError, OSError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path} is not the record of a pod")
        return cls(config.from_plain(PodState, values, str(path)))

    @classmethod
    def up(cls, settings: PodSettings, started: Callable[[str], None] = lambda _text: None) -> Pod:
        """Start a pod and wait until every region serves. What a pod that died left behind is removed first.
        `started` is told what happens, for people.

        Raises AlreadyExistsError while one runs from the same directory; UserError; UnavailableError with the
        DPU's own last words where one does not come up. Nothing is left running or lying after an error.
        """
        with _locked(settings.run_dir):
            _refuse_or_clean(settings.run_dir, started)
            _check_flash_dir(settings)
            pod = cls(_new_state(settings))
            try:
                pod._write_files()
                pod._start([dpu.name for dpu in pod.state.dpus])
                pod.wait_ready(settings.ready_timeout_s)
            except BaseException:
                pod._end()
                raise
            return pod

    def down(self) -> list[processes.MarkedProcess]:
        """End every process of the pod and remove its files. Idempotent. Returns what had to be killed because
        it did not end within `stop_timeout_s`. Raises LowerLayerError where something cannot be ended."""
        with _locked(self.run_dir):
            return self._end()

    def running(self) -> list[processes.MarkedProcess]:
        """All processes of the pod, region workers included."""
        return processes.marked_processes(self.state.mark)

    def is_alive(self, dpu: DpuEntry) -> bool:
        return processes.carries_mark(dpu.pid, self.state.mark)

    def wait_ready(self, timeout_s: float) -> None:
        """Until every region of every DPU serves. Raises DeadlineError or UnavailableError, with the log's end."""
        deadline_s = time.monotonic() + timeout_s
        for dpu in self.state.dpus:
            while missing := self._missing(dpu):
                if time.monotonic() > deadline_s:
                    raise DeadlineError(
                        f"{dpu.name} was not ready after {timeout_s:g} s ({missing}); its log:\n{_tail(dpu.log)}"
                    )
                time.sleep(_READY_POLL_S)

    def restart(self, name: str) -> None:
        """Start a DPU that has ended again, on the same files, and wait for it. Raises as `up`, and NotFoundError."""
        with _locked(self.run_dir):
            dpu = next((dpu for dpu in self.state.dpus if dpu.name == name), None)
            if dpu is None:
                raise NotFoundError(f"no DPU {name!r}; there are {', '.join(dpu.name for dpu in self.state.dpus)}")
            if self.is_alive(dpu):
                raise AlreadyExistsError(f"{name} is running")
            self._start([name])
            self.wait_ready(self.state.settings.ready_timeout_s)

    def _missing(self, dpu: DpuEntry) -> str:
        """What keeps a DPU from being ready; empty when it is. Raises UnavailableError once it has ended."""
        code = processes.reap(dpu.pid)
        if code is not None or not self.is_alive(dpu):
            how = "ended" if code is None else f"ended with exit code {code}"
            raise UnavailableError(f"{dpu.name} {how} before it was ready; its log:\n{_tail(dpu.log)}")
        missing, hopeless = not_serving(dpu.control, self.state.settings.regions, timeout_s=2.0)
        if hopeless:
            raise UnavailableError(f"{dpu.name} cannot serve: {missing}")
        return missing

    def _write_files(self) -> None:
        """Directories and configuration files; nothing runs yet."""
        state = self.state
        try:
            self.run_dir.chmod(0o700)
            state.flash_dir.mkdir(mode=0o700)
            self._save()
            for dpu in state.dpus:
                dpu.config.parent.mkdir(mode=0o700)
                _write_private(dpu.config, config.to_yaml(dpu_config(state.settings, dpu)))
            _write_private(state.agent_config, agent_config_text(state))
        except OSError as error:
            raise UserError(f"{error.filename or self.run_dir} cannot be written: {error.strerror}") from error

    def _start(self, names: Sequence[str]) -> None:
        for index, dpu in enumerate(self.state.dpus):
            if dpu.name in names:
                command = [sys.executable, "-m", "dpu_app.cli", "run", "--config", str(dpu.config)]
                pid = processes.start_detached(command, self.state.mark, dpu.log, os.environ)
                dpus = list(self.state.dpus)
                dpus[index] = dataclasses.replace(dpu, pid=pid)
                self.state = dataclasses.replace(self.state, dpus=tuple(dpus))
                self._save()

    def _save(self) -> None:
        """Whole or not at all, so that another `entresol-emu` never reads half of it."""
        fresh = self.run_dir / f"{_STATE_FILE}.new"
        _write_private(fresh, json.dumps(config.to_plain(self.state), indent=1) + "\n")
        fresh.replace(self.run_dir / _STATE_FILE)

    def _end(self) -> list[processes.MarkedProcess]:
        state = self.state
        pids = [dpu.pid for dpu in state.dpus if dpu.pid]
        killed = processes.end_all(pids, state.mark, state.settings.stop_timeout_s)
        shutil.rmtree(state.flash_dir, ignore_errors=True)
        for dpu in state.dpus:
            shutil.rmtree(dpu.config.parent, ignore_errors=True)
        for name in (state.agent_config.name, f"{_STATE_FILE}.new", _STATE_FILE):
            (self.run_dir / name).unlink(missing_ok=True)
        return killed


def _new_state(settings: PodSettings) -> PodState:
    mark = secrets.token_hex(16)
    settings = dataclasses.replace(settings, run_dir=settings.run_dir.absolute())
    flash_dir = settings.flash_dir.absolute() / f"pod-{mark[:8]}"
    return PodState(
        mark=mark,
        started_s=time.time(),
        settings=settings,
        agent_config=settings.run_dir / "agent.yaml",
        flash_dir=flash_dir,
        dpus=tuple(dpu_entry(settings, flash_dir, index) for index in range(settings.dpus)),
    )


def _refuse_or_clean(run_dir: Path, told: Callable[[str], None]) -> None:
    try:
        old = Pod.find(run_dir)
    except NotFoundError:
        strangers = [entry.name for entry in run_dir.iterdir() if entry.name != _LOCK_FILE]
        if strangers:
            raise UserError(f"{run_dir} holds other things ({strangers[0]}); give an empty or absent one") from None
        return
    running = old.running()
    if running:
        raise AlreadyExistsError(
            f"a pod of {len(old.state.dpus)} DPUs is up in {run_dir} ({len(running)} processes); "
            "'entresol-emu status' shows it, 'entresol-emu down' ends it"
        )
    told(f"removing what a pod that no longer runs left in {run_dir}")
    old._end()


def _check_flash_dir(settings: PodSettings) -> None:
    """Room and O_DIRECT, before a DPU fails on it. Raises UserError."""
    directory = settings.flash_dir
    probe = directory / f".probe-{os.getpid()}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600))
        finally:
            with contextlib.suppress(OSError):  # where there is none because it could not be made
                probe.unlink()
    except OSError as error:
        if error.errno == errno.EINVAL:
            text = f"{directory} is on a file system without O_DIRECT (tmpfs?); give a directory on a disk: --flash-dir"
            raise UserError(text) from error
        raise UserError(f"{directory} cannot be used for flash files: {error.strerror}") from error
    needed = settings.dpus * settings.regions * settings.capacity_bytes
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"{settings.dpus * settings.regions} regions of {approximate_size(settings.capacity_bytes)} need "
            f"{approximate_size(needed)}, but {directory} has {approximate_size(free)} free; "
            "give a smaller --capacity or another --flash-dir"
        )


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """One `up`, `down` or `restart` at a time in a run directory, which is made if absent and removed if empty."""
    path = run_dir / _LOCK_FILE
    while True:
        try:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if run_dir.stat().st_uid != os.geteuid():
                raise UserError(f"{run_dir} belongs to another user")
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UserError(f"{run_dir} cannot be used: {error.strerror}") from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            current = path.stat().st_ino == os.fstat(lock).st_ino
        except FileNotFoundError:
            current = False
        if current:
            break
        os.close(lock)  # whoever had it removed the directory: ours is a lock on nothing
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if not (run_dir / _STATE_FILE).exists():
                path.unlink(missing_ok=True)
                run_dir.rmdir()
        os.close(lock)


def _write_private(path: Path, text: str) -> None:
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError as error:
        return f"  ({log}: {error.strerror})"
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"
