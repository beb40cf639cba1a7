"""The processes of an emulated pod: started detached and marked, found again by their mark, ended all or none.

The mark is a random word in the environment that every process of a pod inherits, workers included. So a pid that
was given to someone else is never mistaken for ours, and a worker that outlived its parent is still found.
Knows nothing of DPUs. `emulator.pod` is the caller.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from common.errors import LowerLayerError

MARK_VARIABLE: Final = "ENTRESOL_POD"
_PROC = Path("/proc")
_EXEC_TIMEOUT_S: Final = 5.0


class MarkedProcess(NamedTuple):
    pid: int
    parent_pid: int
    command: str
    """As it was started, arguments separated by spaces."""


def start_detached(arguments: Sequence[str], mark: str, log_path: Path, environment: Mapping[str, str]) -> int:
    """Start a process in a session of its own, both outputs appended to `log_path` (private to the user).

    Returns its pid. Raises LowerLayerError.
    """
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    marked = {**environment, MARK_VARIABLE: mark}
    try:
        pid = os.posix_spawn(arguments[0], list(arguments), marked, file_actions=actions, setsid=True)
    except OSError as error:
        raise LowerLayerError("posix_spawn", error.errno or 0, arguments[0]) from error
    _wait_for_environment(pid)
    return pid


def _wait_for_environment(pid: int) -> None:
    """posix_spawn returns in the middle of exec, when /proc does not show the new environment yet: without it the
    process would not be known for ours."""
    deadline_s = time.monotonic() + _EXEC_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            if (_PROC / str(pid) / "environ").read_bytes():
                return
        except OSError:
            return
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return  # ended already; the caller reaps it
        time.sleep(0.001)


def marked_processes(mark: str) -> list[MarkedProcess]:
    """The running processes of this user that carry `mark`, this one excepted. Zombies do not count."""
    found: list[MarkedProcess] = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and carries_mark(int(entry.name), mark):
            process = _describe(int(entry.name))
            if process is not None:
                found.append(process)
    return sorted(found)


def carries_mark(pid: int, mark: str) -> bool:
    """Whether `pid` runs and was started with `mark`."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return f"{MARK_VARIABLE}={mark}".encode() in environment.split(b"\0")


def signal_marked(pid: int, mark: str, number: signal.Signals) -> bool:
    """Send a signal to `pid` if it carries `mark`; the process is held by descriptor, so no other can get it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not carries_mark(pid, mark):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def wait_for_end(pids: Sequence[int], timeout_s: float) -> bool:
    """Wait until all of `pids` have ended, at most so long. Children of this process are reaped."""
    deadline_s = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                return False
            reap(pid)
        finally:
            os.close(descriptor)
    return True


def reap(pid: int) -> int | None:
    """The exit status of a child that has ended (as a shell would say it, 128 + n for a signal), else None."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    if ended == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_all(first: Sequence[int], mark: str, patience_s: float) -> list[MarkedProcess]:
    """End every process of the mark: SIGTERM to those of `first`, which end their own children; after
    `patience_s` SIGKILL to whatever is left. Returns what had to be killed.

    Raises LowerLayerError where a process survives even that.
    """
    asked = [pid for pid in first if signal_marked(pid, mark, signal.SIGTERM)]
    started_s = time.monotonic()
    if asked:
        wait_for_end(asked, patience_s)
        left_s = patience_s - (time.monotonic() - started_s)
        wait_for_end([process.pid for process in marked_processes(mark)], max(left_s, 0.5))
    killed: list[MarkedProcess] = []
    for _attempt in range(10):  # a supervisor may start a child between our look and our signal
        left = marked_processes(mark)
        if not left:
            return killed
        for process in left:
            if signal_marked(process.pid, mark, signal.SIGKILL):
                killed.append(process)
        wait_for_end([process.pid for process in left], 5.0)
    raise LowerLayerError("SIGKILL", 0, f"still running: {', '.join(str(process.pid) for process in left)}")


def end_children(pids: Sequence[int], patience_s: float) -> None:
    """End those of `pids` that are children of this process, mark or not: a program that writes its title over its
    environment, as Redis does, wipes the mark out. Until it is reaped a child's pid is nobody else's."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [pid for pid in pids if _is_running_child(pid)]
        for pid in left:
            os.kill(pid, number)
        wait_for_end(left, patience_s)


def _is_running_child(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def _describe(pid: int) -> MarkedProcess | None:
    try:
        command = (
            (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        )
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return MarkedProcess(pid, int(fields[1]), command)
