"""One turn of one peer: its servers and its driver, started, spoken to with deadlines, ended by their mark.

Owns the turn's directory, processes and ports. Knows nothing of what is measured (`emulator.peers.run`) nor of any
peer (`emulator.peers.catalogue`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from common.errors import DeadlineError, UnavailableError, UserError
from emulator import processes

_HERE: Final = Path(__file__).resolve().parent
_DRIVER: Final = _HERE / "driver.py"
_END_PATIENCE_S: Final = 5.0
_POLL_S: Final = 0.02
_LOG_TAIL_LINES: Final = 6
_LOG_LINE_CHARACTERS: Final = 300
_READ_BYTES: Final = 1 << 16


class PeerError(UnavailableError):
    """A peer did not do what it was asked; the text is its own where it gave one."""


class Turn:
    """What a peer's processes live in. `python` is the interpreter of its environment; `until_s` of `time.monotonic`
    is when it must have ended, `flash_dir` a directory on a disk for what it keeps there. A context manager.

    Raises UserError where nothing can be kept there."""

    def __init__(self, python: Path, flash_dir: Path, until_s: float) -> None:
        self.python = python
        self.until_s = until_s
        self.stack = contextlib.ExitStack()
        self.dir = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="entresol-peer-")))
        self.flash_dir = flash_dir / f"peer-{secrets.token_hex(4)}"
        self.server_pids: list[int] = []
        self.commands: list[str] = []
        self._mark = secrets.token_hex(16)
        self._started: list[int] = []
        self._ports: set[int] = set()
        self._logs: dict[int, Path] = {}
        try:
            self.flash_dir.mkdir(parents=True)
        except OSError as error:
            self.stack.close()
            raise UserError(f"{flash_dir} cannot be used: {error.strerror}") from error
        self.stack.callback(shutil.rmtree, self.flash_dir, ignore_errors=True)

    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def server(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Start a program that serves the peer. Raises LowerLayerError. Returns its pid."""
        program = shutil.which(command[0]) or command[0]
        log = self.dir / f"server{len(self._logs)}.log"
        pid = processes.start_detached([program, *command[1:]], self._mark, log, {**os.environ, **(environment or {})})
        self._logs[pid] = log
        self._remember(pid, command)
        return pid

    def serve(self, adapter: str, options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Any:
        """Start the server that an adapter has in Python, and return what it says once it serves. Raises PeerError."""
        line = self._spawn("serve", adapter, options, environment)
        self._remember(line.pid, [self.python.name, adapter, "serve"])
        return line.read(self.until_s)

    def client(self, adapter: str, options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Driver:
        """Start the driver. Raises PeerError. It is not open yet: the first thing to `ask` is "open"."""
        settings = {**options, "server_pids": [*self.server_pids]}
        return Driver(self, self._spawn("client", adapter, settings, environment))

    def wait_for(self, where: int | Path, pid: int) -> None:
        """Until something listens on a TCP port of this machine or a Unix socket. Raises PeerError with the log's end
        where process `pid` ends first, DeadlineError where it takes too long."""
        while not _listens(where):
            code = processes.reap(pid)  # its mark does not tell: one that starts by exec has none for a moment
            if code is not None:
                raise PeerError(f"the server ended with {code} before it served: {self.log_tail(pid)}")
            if self.left_s() < 0:
                raise DeadlineError(f"timed out: nothing listened on {where}: {self.log_tail(pid)}")
            time.sleep(_POLL_S)

    def log_tail(self, pid: int) -> str:
        """The last lines that a process of the turn wrote, for an error's text."""
        lines = self._logs[pid].read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return " / ".join(line.strip()[:_LOG_LINE_CHARACTERS] for line in lines if line.strip())

    def free_port(self) -> int:
        """One that nothing listens on now, and not given before."""
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            if port not in self._ports:
                self._ports.add(port)
                return port

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            processes.end_all(self._started, self._mark, _END_PATIENCE_S)
            processes.end_children(self._started, _END_PATIENCE_S)
        finally:
            self.stack.close()

    def _spawn(
        self, role: str, adapter: str, options: Mapping[str, Any], environment: Mapping[str, str] | None
    ) -> _Lines:
        log = self.dir / f"{role}{len(self._logs)}.log"
        command = [
            str(self.python), "-I", str(_DRIVER), role, str(_HERE / "adapters" / f"{adapter}.py"), json.dumps(options)
        ]  # fmt: skip
        with open(log, "ab") as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, **(environment or {}), processes.MARK_VARIABLE: self._mark},
                    cwd=self.dir,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerError(f"{self.python}: {error}") from error
        self._logs[process.pid] = log
        self._started.append(process.pid)
        self.stack.callback(_close_pipes, process)
        return _Lines(process, self)

    def _remember(self, pid: int, command: Sequence[str]) -> None:
        self.server_pids.append(pid)
        if pid not in self._started:
            self._started.append(pid)
        self.commands.append(" ".join(word.replace(str(self.dir), "DIR") for word in command))


class _Lines:
    """JSON lines to and from one process."""

    def __init__(self, process: subprocess.Popen[bytes], turn: Turn) -> None:
        self.pid = process.pid
        self._process = process
        self._turn = turn
        self._pending = b""

    def write(self, request: Mapping[str, Any]) -> None:
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(json.dumps(request).encode() + b"\n")
                pipe.flush()
        except BrokenPipeError:
            raise PeerError(f"the driver has ended: {self._turn.log_tail(self.pid)}") from None

    def read(self, until_s: float) -> Any:
        """The "ok" of the next line. Raises PeerError with the text of its "error", or where the process ends;
        DeadlineError."""
        pipe = self._process.stdout
        if pipe is None:
            raise PeerError("no output")
        while b"\n" not in self._pending:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                raise DeadlineError("timed out")
            data = os.read(pipe.fileno(), _READ_BYTES)
            if not data:
                code = self._process.wait(_END_PATIENCE_S)
                raise PeerError(f"the process ended with {code}: {self._turn.log_tail(self.pid)}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise PeerError(f"not an answer: {line[:_LOG_LINE_CHARACTERS]!r}") from error
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer["ok"]


class Driver:
    """The client process of a turn."""

    def __init__(self, turn: Turn, lines: _Lines) -> None:
        self._turn = turn
        self._lines = lines
        self.pid = lines.pid

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Raises PeerError; DeadlineError once the turn is over."""
        self._lines.write({"op": operation, **arguments})
        try:
            answer: dict[str, Any] = self._lines.read(self._turn.until_s)
        except DeadlineError:
            raise DeadlineError(f"timed out in {operation}: {self._turn.log_tail(self.pid)}") from None
        return answer


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait(_END_PATIENCE_S)  # it was ended before


def _listens(where: int | Path) -> bool:
    if isinstance(where, int):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", where)) == 0
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(where))
        except OSError:
            return False
        return True
