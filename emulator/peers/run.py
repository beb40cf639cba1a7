"""The rounds: every peer gets its turn in each, first to last and last to first by turns, on fresh keys.

A turn starts a peer's servers, warms it up untimed, measures all sizes and batches, and ends its processes, so that
nothing of one peer runs during another's turn. A peer that fails or overruns its time is told with its error and not
tried again; what it gave in whole rounds before stays.
"""

from __future__ import annotations

import dataclasses
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common.errors import DeadlineError, EntresolError
from common.units import format_size
from emulator.peers import install
from emulator.peers.catalogue import FLASH_READ, FLASH_STORE, LOOKUP, RETRIEVE, STORE, Peer, Sizes
from emulator.peers.limits import Limits
from emulator.peers.turns import Driver, PeerError, Turn
from host_agent.bench.cpu_time import OtherWork

_LOOKUP_BLOCK_BYTES: Final = 4096
_LOOKUP_STEP: Final = 8
"""Few enough for the smallest window of a store that refuses what it cannot stage."""
_KEY_HEX_BYTES: Final = 8
_WARM_BATCH: Final = 128
_ROUNDS_MIN: Final = 3
Measured = tuple[tuple[str, int, int], dict[str, Any]]
"""Operation, block bytes, batch; and what the driver answered."""


@dataclass(frozen=True)
class PeersSettings:
    """What to measure."""

    venvs: Path
    flash_dir: Path
    blocks: dict[int, int] = field(default_factory=lambda: {64 << 10: 512, 1 << 20: 128, 4 << 20: 32})
    """How many blocks of each size one timed pass moves: a batch of 16 means 8 calls for 128 blocks."""
    batches: tuple[int, ...] = (1, 16, 128)
    flash_batches: tuple[int, ...] = (16, 128)
    flash_bytes_max: int = 1 << 20
    lookup_keys: int = 512
    lookup_calls: int = 64
    rounds: int = 5
    warm_passes: int = 3
    """So many times all blocks are stored before anything is timed."""
    limit_s: float = 150.0
    """Of one peer, all its turns together."""
    total_s: float = 840.0
    """On a busy machine there are fewer rounds, three at least."""
    install_limit_s: float = 600.0

    def quick(self) -> PeersSettings:
        """To see that everything works; too little for figures."""
        return dataclasses.replace(
            self,
            blocks={64 << 10: 32, 1 << 20: 16},
            batches=(1, 16),
            flash_batches=(16,),
            lookup_calls=8,
            rounds=2,
            limit_s=40.0,
        )


@dataclass
class Cell:
    """One peer, operation, block size and batch: a value a round."""

    gb_per_s: list[float] = field(default_factory=list)
    keys_per_s: list[float] = field(default_factory=list)
    calls_us: list[float] = field(default_factory=list)
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0
    moved_bytes: int = 0
    looked_up: int = 0
    failed: int = 0


@dataclass
class Outcome:
    """What is known of one peer at the end."""

    peer: Peer
    version: str = ""
    commands: list[str] = field(default_factory=list)
    error: str = ""
    retried: str = ""
    """Why a turn was begun again: once in a run."""
    used_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    cells: dict[tuple[str, int, int], Cell] = field(default_factory=dict)


class Peers:
    """One run. `told` hears what is going on, for people."""

    def __init__(self, peers: Sequence[Peer], settings: PeersSettings, told: Callable[[str], None]) -> None:
        self.outcomes = [Outcome(peer) for peer in peers]
        self.limits = Limits(settings.flash_dir)
        self.limits_error = ""
        self.rounds = 0
        """How many there were."""
        self.other_work_share = 0.0
        """Of the processors, by what is not this run."""
        self._settings = settings
        self._told = told

    def install(self) -> None:
        """The environments that are needed. A family that cannot be installed is an error of its peers."""
        for family in dict.fromkeys(outcome.peer.family for outcome in self.outcomes):
            self._told(f"{family.name}: installing")
            try:
                install.install(self._settings.venvs, family, self._settings.install_limit_s)
            except PeerError as error:
                for outcome in self.outcomes:
                    if outcome.peer.family == family:
                        outcome.error = str(error)

    def run(self) -> None:
        """The rounds, fewer than wished where they would take too long. Never raises for what a peer does."""
        other_work = OtherWork(())
        started_s = time.monotonic()
        for number in range(self._settings.rounds):
            used_s = time.monotonic() - started_s
            if number >= _ROUNDS_MIN and used_s * (number + 1) / number > self._settings.total_s:
                break
            turns: list[Outcome | None] = [None, *self.outcomes]
            for outcome in reversed(turns) if number % 2 else turns:
                if outcome is None:
                    self._told(f"round {number + 1}: limits of the machine")
                    self._read_limits()
                elif not outcome.error:
                    self._told(f"round {number + 1}: {outcome.peer.name}")
                    self._turns(outcome)
            self.rounds += 1
        self.other_work_share = other_work.share()

    def _read_limits(self) -> None:
        settings = self._settings
        if not self.limits_error:
            try:
                self.limits.read(settings.blocks, settings.batches, settings.flash_bytes_max)
            except EntresolError as error:
                self.limits_error = str(error)

    def _turns(self, outcome: Outcome) -> None:
        """One peer's part of a round."""
        sizes = tuple(self._settings.blocks)
        groups: list[tuple[int, ...]] = [(size,) for size in sizes] if outcome.peer.turn_per_size else [sizes]
        for group in groups:  # which grows by the one that is tried again
            started_s = time.monotonic()
            try:
                self._turn(outcome, group, LOOKUP in outcome.peer.operations and group[0] == sizes[0])
            except EntresolError as error:
                if outcome.retried or isinstance(error, DeadlineError):
                    outcome.error = str(error)
                    return
                outcome.retried = str(error)
                groups.append(group)
            finally:
                outcome.used_s += time.monotonic() - started_s

    def _turn(self, outcome: Outcome, sizes: Sequence[int], lookup: bool) -> None:
        """Start, measure, end. Raises EntresolError."""
        peer, settings = outcome.peer, self._settings
        left_s = settings.limit_s - outcome.used_s
        python = install.python_of(settings.venvs, peer.family)
        with Turn(python, settings.flash_dir, time.monotonic() + left_s) as turn:
            largest = max(sizes)
            options = peer.start(turn, Sizes(largest, settings.blocks[largest], settings.lookup_keys if lookup else 0))
            driver = turn.client(peer.adapter, {"block_bytes_max": largest, **options}, peer.environment)
            outcome.version = driver.ask("open")["about"]["version"]
            outcome.commands = [*turn.commands]
            measured: list[Measured] = []
            for size in sizes:
                measured += self._size(outcome, driver, size)
            if lookup:
                measured.append(self._lookup(outcome, driver))
            driver.ask("close")
        for key, answer in measured:  # whole turns only
            _record(outcome.cells.setdefault(key, Cell()), key, answer)

    def _size(self, outcome: Outcome, driver: Driver, size: int) -> list[Measured]:
        settings, operations = self._settings, outcome.peer.operations
        count = settings.blocks[size]
        measured: list[Measured] = []
        driver.ask("prepare", block_bytes=size, blocks=count)
        if STORE in operations:
            self._warm_up(outcome, driver, size)
            for batch in settings.batches:
                if batch <= count:
                    measured += self._store_and_read(outcome, driver, (STORE, RETRIEVE), size, batch)
        if FLASH_READ in operations and size <= settings.flash_bytes_max:
            for batch in settings.flash_batches:
                if batch <= count:
                    measured += self._store_and_read(outcome, driver, (FLASH_STORE, FLASH_READ), size, batch)
        return measured

    def _warm_up(self, outcome: Outcome, driver: Driver, size: int) -> None:
        """Memory of both sides touched, connections warm; what was stored is forgotten only at the end."""
        count = self._settings.blocks[size]
        passes = [_fresh_keys(count) for _ in range(self._settings.warm_passes)]
        for keys in passes:
            driver.ask(STORE, keys=keys, batch=min(_WARM_BATCH, count))
        answer = driver.ask(RETRIEVE, keys=passes[-1], batch=min(_WARM_BATCH, count))
        outcome.wrong += [f"retrieve of {format_size(size)}: {text}" for text in answer["wrong"]]
        for keys in passes:
            driver.ask("forget", keys=keys)

    def _store_and_read(
        self, outcome: Outcome, driver: Driver, operations: tuple[str, str], size: int, batch: int
    ) -> list[Measured]:
        """Fresh keys stored, read back, forgotten."""
        count = self._settings.blocks[size]
        keys = _fresh_keys(count)
        measured: list[Measured] = []
        for operation in operations:
            answer = driver.ask(operation, keys=keys, batch=batch)
            outcome.wrong += [f"{operation} of {format_size(size)}: {text}" for text in answer.get("wrong", [])]
            if operation in outcome.peer.operations:
                measured.append(((operation, size, batch), answer))
        driver.ask("forget", keys=keys)
        return measured

    def _lookup(self, outcome: Outcome, driver: Driver) -> Measured:
        settings = self._settings
        keys = _fresh_keys(settings.lookup_keys)
        driver.ask("prepare", block_bytes=_LOOKUP_BLOCK_BYTES, blocks=settings.lookup_keys)
        for start in range(0, len(keys), _LOOKUP_STEP):
            stored = driver.ask(STORE, keys=keys[start : start + _LOOKUP_STEP], batch=_LOOKUP_STEP)
            if stored["failed"]:
                raise PeerError(f"{stored['failed']} of {_LOOKUP_STEP} small blocks were not stored")
        answer = driver.ask(LOOKUP, keys=keys, calls=settings.lookup_calls)
        outcome.wrong += [f"lookup: {text}" for text in answer["wrong"]]
        driver.ask("forget", keys=keys)
        return (LOOKUP, _LOOKUP_BLOCK_BYTES, len(keys)), answer


def _record(cell: Cell, key: tuple[str, int, int], answer: dict[str, Any]) -> None:
    """Add a round's answer."""
    operation, size, batch = key
    if operation == LOOKUP:
        cell.keys_per_s.append(batch / statistics.median(answer["seconds"]))
        cell.looked_up += answer["blocks"]
    else:
        moved = answer["blocks"] * size
        cell.gb_per_s.append(moved / sum(answer["seconds"]) / 1e9)
        cell.moved_bytes += moved
    cell.calls_us += [seconds * 1e6 for seconds in answer["seconds"]]
    cell.client_cpu_s += answer["client_cpu_s"]
    cell.server_cpu_s += answer["server_cpu_s"]
    cell.failed += answer["failed"]


def _fresh_keys(count: int) -> list[str]:
    return [secrets.token_hex(_KEY_HEX_BYTES) for _ in range(count)]
