"""A process of this project's own that is told and tells things in lines of JSON: started, told, heard, ended.

It ends at the end of its input, or is killed. Its errors go where those of this process go. Used by whatever needs
agents in processes of their own: the demo, the benchmarks of scale and of latency.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from common.errors import InternalError, UnavailableError
from emulator.processes import MARK_VARIABLE

_END_TIMEOUT_S: Final = 20.0
_READ_BYTES: Final = 1 << 20


class JsonProcess:
    """`python -m MODULE ARGUMENTS`, marked with `mark` as the pod is that it belongs to. Close it."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], mark: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for whoever started it, who ends it
            env={**os.environ, MARK_VARIABLE: mark},
        )
        self._buffer = b""
        self._unheard: list[Any] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """For a selector: readable when `heard` has something to say."""
        return _pipe(self._process.stdout)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Raises UnavailableError when it has ended."""
        try:
            os.write(_pipe(self._process.stdin).fileno(), (json.dumps(message) + "\n").encode())
        except BrokenPipeError as error:
            raise UnavailableError(f"{self.name} has ended (its errors are above)") from error

    def heard(self) -> list[Any]:
        """What it has said since, none of it perhaps; to be called when `output` is readable. Raises UnavailableError
        at its end."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if not data:
            code = self._process.wait(_END_TIMEOUT_S)
            raise UnavailableError(f"{self.name} ended with exit code {code} (its errors are above)")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def hear(self, timeout_s: float) -> Any:
        """The next thing that it says. Raises UnavailableError when it has ended or says
        nothing for so long."""
        deadline_s = time.monotonic() + timeout_s
        while not self._unheard:
            if not select.select([self.output], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise UnavailableError(f"no answer from {self.name} for {timeout_s:g} s")
            self._unheard += self.heard()
        return self._unheard.pop(0)

    def ask_to_end(self, now: bool = False) -> None:
        """It ends at the end of its input; with `now`, whatever it does. Returns at once; idempotent."""
        if now:
            self._process.terminate()
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()

    def close(self) -> None:
        """Wait for its end; it is killed where it does not end by itself. Idempotent."""
        self.ask_to_end()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise InternalError("the process was started without this pipe")
    return pipe
