"""`entresol-emu bench-profile`: where the time of each operation goes, on a pod of its own.

For every path: the call's time, the processor time that each side takes for it, the system calls it makes (strace -c)
and the functions it is spent in (py-spy). The three are measured in separate passes, because the tools slow down what
they look at; a tool that is missing leaves its column empty and is named. Figures are per call of the client.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.units import format_size
from host_agent.bench.bulk_cases import FreshBlocks, retrieve_staged, store_staged
from host_agent.bench.cpu_time import AGENT, DPU
from host_agent.bench.measurements import Sample
from host_agent.bench.round_trips import SmallBlocks
from host_agent.bench.tables import Column, Table
from host_agent.bench.target import Target

_ATTACH_S: Final = 0.7
"""strace has attached to a dozen threads by then."""
_END_S: Final = 10.0
_TRACED_CALLS_MIN: Final = 64
_SAMPLE_S: Final = 4
_SAMPLES_PER_S: Final = 400
_FUNCTIONS: Final = 12
_CALLS: Final = re.compile(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)\s*$")
_FRAME: Final = re.compile(r"^(.*) \((.*?)(?::\d+)?\)$")


@dataclass(frozen=True)
class PathSettings:
    """What to look at. `bulk` are (block bytes, batch)."""

    lookups: tuple[int, ...] = (1, 512)
    bulk: tuple[tuple[int, int], ...] = ((64 << 10, 128), (1 << 20, 16))
    rounds: int = 5
    small_calls: int = 400
    blocks: int = 128
    verify: bool = True

    @classmethod
    def quick(cls) -> PathSettings:
        """To see that it works."""
        return cls(lookups=(16,), bulk=((64 << 10, 16),), rounds=1, small_calls=16, blocks=16)

    @property
    def block_bytes_max(self) -> int:
        return max(size for size, _ in self.bulk)


Round = Callable[[], Sample]


def profile_paths(
    target: Target, settings: PathSettings, dpu_pids: Sequence[int], told: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row for each path, for JSON. `dpu_pids`: all processes of the pod; this process is the agent."""
    sides = {AGENT: [os.getpid()], DPU: list(dpu_pids)}
    rows: list[dict[str, Any]] = []
    with target.memory(settings.block_bytes_max * settings.blocks):
        for name, one_round in _paths(target, settings):
            told(f"{target.name}: {name}")
            one_round()
            row = _timed([one_round() for _ in range(settings.rounds)])
            row |= {"path": name, "target": target.name}
            row["system_calls"] = _system_calls(one_round, sides)
            row["functions"] = _functions(one_round, sides)
            rows.append(row)
    return rows


def missing_tools() -> list[str]:
    """Which of the tools are not installed, in words."""
    hints = {"strace": "Debian package strace", "py-spy": "pip install py-spy"}
    return [f"{tool} ({hint})" for tool, hint in hints.items() if _tool(tool) is None]


def profile_tables(paths: Sequence[dict[str, Any]]) -> list[Table]:
    """What `profile_paths` gave, for people."""
    path = Column("path", words=True)
    times = Table("Time of a call", [path, *map(Column, ("p50 us", "agent us", "DPU us", "system calls"))])
    times.notes.append("agent, DPU: processor time, user and system. system calls: of both sides. All of one call.")
    calls = Table("System calls of a call", [path, Column("agent", words=True), Column("DPU", words=True)])
    functions = Table("Where the interpreter is", [path, Column("side", words=True), Column("function", words=True)])
    functions.notes.append(
        "Share of the samples in which the process held the interpreter's lock: waits, and copies of large blocks, "
        "which are made without it, are not in there."
    )
    for row in paths:
        name = f"{row['path']}, {row['target']}"
        total = sum(sum(side.values()) for side in row["system_calls"].values())
        cpu = row["cpu_us"]
        times.add(
            name, *(f"{value:.0f}" for value in (row["p50_us"], cpu[AGENT], cpu[DPU])), f"{total:.1f}" if total else "-"
        )
        if total:
            calls.add(name, *(_calls_text(row["system_calls"][side]) for side in (AGENT, DPU)))
        for side, shares in row["functions"].items():
            functions.add(name, side, ", ".join(f"{where} {share:.0%}" for where, share in shares.items()))
    return [table for table in (times, calls, functions) if table.rows]


def _calls_text(counts: dict[str, float]) -> str:
    return ", ".join(f"{name} {count:.1f}" for name, count in counts.items()) or "none"


# ---------------------------------------------------------------------------------------------------- the paths


def _paths(target: Target, settings: PathSettings) -> Iterator[tuple[str, Round]]:
    with SmallBlocks(target, max(settings.lookups), settings.small_calls, settings.verify) as small:
        for batch in settings.lookups:
            yield f"LOOKUP of {batch}", lambda batch=batch: small.lookup(batch)  # type: ignore[misc]
        yield "RETRIEVE of 4 KiB", small.retrieve
    for size, batch in settings.bulk:
        what = f"{batch} x {format_size(size)}"
        with FreshBlocks(target, size, settings.blocks, settings.verify) as blocks:
            yield f"RETRIEVE staged, {what}", lambda blocks=blocks, batch=batch: retrieve_staged(blocks, batch)  # type: ignore[misc]
        yield f"STORE staged, {what}", lambda size=size, batch=batch: _store(target, settings, size, batch)  # type: ignore[misc]


def _store(target: Target, settings: PathSettings, size: int, batch: int) -> Sample:
    with FreshBlocks(target, size, settings.blocks, settings.verify) as blocks:
        sample = store_staged(blocks, batch)
        target.settle(blocks.keys)
        return sample


def _timed(samples: Sequence[Sample]) -> dict[str, Any]:
    calls = [seconds for sample in samples for seconds in sample.calls_s]
    cpu = {
        side: statistics.median(sample.cpu_s[side] / len(sample.calls_s) for sample in samples) * 1e6
        for side in (AGENT, DPU)
    }
    return {"p50_us": statistics.median(calls) * 1e6, "calls": len(calls), "cpu_us": cpu}


# ---------------------------------------------------------------------------------------------------- the tools


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _system_calls(one_round: Round, sides: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """Per call, by side and name, most frequent first; what a round does besides its calls (STORE: waiting for flash,
    deleting) is in it. Empty without strace, or where tracing is not allowed."""
    strace = _tool("strace")
    counts: dict[str, dict[str, float]] = {AGENT: {}, DPU: {}}
    if strace is None:
        return counts
    with tempfile.TemporaryDirectory(prefix="entresol-profile-") as directory, contextlib.ExitStack() as stack:
        outputs = {side: Path(directory, side) for side in sides}
        for side, pids in sides.items():
            attach = [argument for pid in pids for argument in ("-p", str(pid))]
            stack.enter_context(_attached([strace, "-f", "-c", "-o", str(outputs[side]), *attach]))
        time.sleep(_ATTACH_S)
        sample = Sample()
        while len(sample.calls_s) < _TRACED_CALLS_MIN:
            sample.add(one_round())
        stack.close()
        for side, path in outputs.items():
            found = Counter({name: int(count) / len(sample.calls_s) for count, name in _strace_lines(path)})
            counts[side] = {name: count for name, count in found.most_common() if count >= 0.05}
    return counts


def _strace_lines(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(found[1], found[2]) for found in map(_CALLS.match, lines) if found and found[2] != "total"]


def _functions(one_round: Round, sides: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """Share of samples by function and side, of the processes that were busiest. Empty without py-spy."""
    spy = _tool("py-spy")
    if spy is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="entresol-profile-") as directory, contextlib.ExitStack() as stack:
        outputs: dict[str, list[Path]] = {side: [Path(directory, str(pid)) for pid in sides[side]] for side in sides}
        for side, pids in sides.items():
            for pid, path in zip(pids, outputs[side]):
                command = [spy, "record", "--pid", str(pid), "--format", "raw", "--output", str(path)]
                command += ["--rate", str(_SAMPLES_PER_S), "--duration", str(_SAMPLE_S), "--gil"]
                stack.enter_context(_attached(command))
        ends_s = time.monotonic() + _SAMPLE_S
        while time.monotonic() < ends_s:
            one_round()
        stack.close()
        return {side: _shares(paths) for side, paths in outputs.items()}


def _shares(paths: Sequence[Path]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            stack, _, count = line.rpartition(" ")
            frame = _FRAME.match(stack.rpartition(";")[2])
            if frame and count.isdigit():
                counts[f"{Path(frame[2]).name}:{frame[1]}"] += int(count)
    total = counts.total() or 1
    return {name: count / total for name, count in counts.most_common(_FUNCTIONS)}


@contextlib.contextmanager
def _attached(command: Sequence[str]) -> Iterator[None]:
    """Run a tool that looks at processes; interrupted in the end, so that it writes what it has."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
