"""The agent processes of the scale benchmark, as the process that measures sees them: started, told, heard, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from common.errors import InternalError, UnavailableError
from emulator.processes import MARK_VARIABLE
from emulator.scale.agent import plan
from emulator.scale.settings import Load

_READY_TIMEOUT_S: Final = 120.0
_ANSWER_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 10.0
LEAD_NS: Final = 50_000_000
"""From telling the agents to the common start: all of them have heard by then."""


class Fleet:
    """`count` agents, each connected to all `pods` (configuration file by name). A context manager: when it exits
    every process has ended."""

    def __init__(self, count: int, pods: Mapping[str, Path], loads: Sequence[Load], mark: str) -> None:
        self._agents: list[_Agent] = []
        text = plan(pods, tuple(loads))
        try:
            for number in range(count):
                self._agents.append(_Agent(number, text, mark))
            for agent in self._agents:
                agent.receive(_READY_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run(self, pod: str, loads: Sequence[str], seconds: float) -> tuple[int, int]:
        """Tell the first agents to run one load each, once the blocks of all are staged. Returns start and end on the
        monotonic clock."""
        for agent, load in zip(self._agents, loads):
            agent.send({"pod": pod, "load": load})
        for agent in self._agents[: len(loads)]:
            agent.receive(_READY_TIMEOUT_S)
        start_ns = time.monotonic_ns() + LEAD_NS
        end_ns = start_ns + int(seconds * 1e9)
        for agent, load in zip(self._agents, loads):
            agent.send({"pod": pod, "load": load, "start_ns": start_ns, "end_ns": end_ns})
        return start_ns, end_ns

    def results(self, count: int) -> list[dict[str, Any]]:
        """What the first `count` agents did, in order. Raises UnavailableError where one has ended."""
        return [agent.receive(_ANSWER_TIMEOUT_S) for agent in self._agents[:count]]

    def close(self) -> None:
        """Idempotent."""
        for agent in self._agents:
            agent.ask_to_end()
        for agent in self._agents:
            agent.wait()
        self._agents.clear()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class _Agent:
    def __init__(self, number: int, plan_text: str, mark: str) -> None:
        self.name = f"agent-{number}"
        command = [sys.executable, "-m", "emulator.scale.agent", "--name", self.name]
        self._process = subprocess.Popen(
            [*command, "--number", str(number), "--plan", plan_text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for whoever measures, who ends its agents
            env={**os.environ, MARK_VARIABLE: mark},
        )
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        try:
            os.write(_pipe(self._process.stdin).fileno(), (json.dumps(message) + "\n").encode())
        except BrokenPipeError as error:
            raise UnavailableError(f"{self.name} has ended (its errors are above)") from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Its next line. Raises UnavailableError when it has ended or says nothing for so long."""
        output = _pipe(self._process.stdout)
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([output], [], [], max(0.0, deadline_s - time.monotonic()))
            if not readable:
                raise UnavailableError(f"no answer from {self.name} for {timeout_s:g} s")
            data = os.read(output.fileno(), 1 << 20)
            if not data:
                code = self._process.wait()
                raise UnavailableError(f"{self.name} ended with exit code {code} (its errors are above)")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask_to_end(self) -> None:
        """It ends at the end of its input."""
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()

    def wait(self) -> None:
        """Killed where it does not end by itself."""
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise InternalError("the process was started without this pipe")
    return pipe
