"""Processes of a pod are found by their mark and only they are ended, stubborn ones and orphans included."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import LowerLayerError
from emulator import processes

WAIT = "import signal; signal.pause()"
READY = "import os, signal; {}; os.write(1, b'ready'); [signal.pause() for _ in range(9)]"


@pytest.fixture
def mark() -> Iterator[str]:
    word = secrets.token_hex(16)
    yield word
    processes.end_all([], word, 0.0)


def _start(mark: str, tmp_path: Path, code: str = WAIT) -> int:
    return processes.start_detached([sys.executable, "-c", code], mark, tmp_path / "log", os.environ)


def _await_ready(log: Path, count: int = 1) -> None:
    """The processes say so when their handlers are in place; a pipe would do but for their being detached."""
    deadline = 2000
    while (log.read_bytes().count(b"ready") if log.exists() else 0) < count:
        deadline -= 1
        assert deadline, f"not ready: {log.read_text()}"
        processes.wait_for_end([os.getpid()], 0.01)


def test_a_marked_process_is_found_and_ended(mark: str, tmp_path: Path) -> None:
    pid = _start(mark, tmp_path)
    (found,) = processes.marked_processes(mark)
    assert found.pid == pid
    assert found.parent_pid == os.getpid()
    assert "signal.pause" in found.command
    assert os.getsid(pid) == pid
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    assert processes.end_all([pid], mark, 5.0) == []
    assert processes.marked_processes(mark) == []


def test_one_that_ignores_sigterm_is_killed(mark: str, tmp_path: Path) -> None:
    pid = _start(mark, tmp_path, READY.format("signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    _await_ready(tmp_path / "log")
    killed = processes.end_all([pid], mark, 0.05)
    assert [process.pid for process in killed] == [pid]
    assert processes.reap(pid) is None, "it was reaped"


def test_an_orphan_is_found(mark: str, tmp_path: Path) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}]); import os; os._exit(0)"
    parent = _start(mark, tmp_path, code)
    assert processes.wait_for_end([parent], 10.0)
    (orphan,) = processes.marked_processes(mark)
    assert orphan.pid != parent
    assert processes.end_all([parent], mark, 0.05) == [orphan]


def test_a_pid_without_the_mark_gets_no_signal(mark: str, tmp_path: Path) -> None:
    other = secrets.token_hex(16)
    pid = _start(other, tmp_path)
    try:
        assert not processes.carries_mark(pid, mark)
        assert not processes.signal_marked(pid, mark, signal.SIGKILL)
        assert processes.end_all([pid], mark, 0.05) == []
        assert processes.carries_mark(pid, other)
    finally:
        processes.end_all([], other, 0.0)
    assert not processes.signal_marked(pid, other, signal.SIGKILL)


def test_this_process_is_never_one_of_them(mark: str) -> None:
    assert not processes.carries_mark(os.getpid(), mark)
    assert processes.marked_processes(mark) == []


def test_the_exit_status_of_a_child(mark: str, tmp_path: Path) -> None:
    pid = _start(mark, tmp_path, "raise SystemExit(7)")
    descriptor = os.pidfd_open(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.close(descriptor)
    assert processes.reap(pid) == 7
    assert processes.reap(pid) is None


def test_what_cannot_be_started_is_said(mark: str, tmp_path: Path) -> None:
    with pytest.raises(LowerLayerError, match="posix_spawn"):
        processes.start_detached([str(tmp_path / "absent")], mark, tmp_path / "log", os.environ)
