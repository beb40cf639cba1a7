"""The agent processes of the scale benchmark, as the process that measures sees them: started, told, heard, ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from emulator.json_process import JsonProcess
from emulator.scale.agent import plan
from emulator.scale.settings import Load

_READY_TIMEOUT_S: Final = 120.0
_ANSWER_TIMEOUT_S: Final = 60.0
LEAD_NS: Final = 50_000_000
"""From telling the agents to the common start: all of them have heard by then."""


class Fleet:
    """`count` agents, each connected to all `pods` (configuration file by name). A context manager: when it exits
    every process has ended."""

    def __init__(self, count: int, pods: Mapping[str, Path], loads: Sequence[Load], mark: str) -> None:
        self._agents: list[JsonProcess] = []
        text = plan(pods, tuple(loads))
        try:
            for number in range(count):
                self._agents.append(_agent(number, text, mark))
            for agent in self._agents:
                agent.hear(_READY_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run(self, pod: str, loads: Sequence[str], seconds: float) -> tuple[int, int]:
        """Tell the first agents to run one load each, once the blocks of all are staged. Returns start and end on the
        monotonic clock."""
        for agent, load in zip(self._agents, loads):
            agent.tell({"pod": pod, "load": load})
        for agent in self._agents[: len(loads)]:
            agent.hear(_READY_TIMEOUT_S)
        start_ns = time.monotonic_ns() + LEAD_NS
        end_ns = start_ns + int(seconds * 1e9)
        for agent, load in zip(self._agents, loads):
            agent.tell({"pod": pod, "load": load, "start_ns": start_ns, "end_ns": end_ns})
        return start_ns, end_ns

    def results(self, count: int) -> list[dict[str, Any]]:
        """What the first `count` agents did, in order. Raises UnavailableError where one has ended."""
        return [agent.hear(_ANSWER_TIMEOUT_S) for agent in self._agents[:count]]

    def close(self) -> None:
        """Idempotent."""
        for agent in self._agents:
            agent.ask_to_end()
        for agent in self._agents:
            agent.close()
        self._agents.clear()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _agent(number: int, plan_text: str, mark: str) -> JsonProcess:
    name = f"agent-{number}"
    arguments = ["--name", name, "--number", str(number), "--plan", plan_text]
    return JsonProcess(name, "emulator.scale.agent", arguments, mark)
