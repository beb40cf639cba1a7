"""What `bench-scale` measures: loads, how many workers and agents, how long. Values only; nothing is started here."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.errors import UserError
from dpu_app.config import FRAMES_MIN, RegionSettings
from emulator.pod_settings import PodSettings

OPERATIONS: Final = ("retrieve", "store", "lookup")
_FRAMES_FACTOR: Final = 1.6
"""Frames of a pod, to one frame for each block that agents work with: what a STORE brings pushes out what nobody asks
for any more, not what they do."""
_SLOTS_PER_FRAME: Final = 3
_SLOTS_PER_COLD_BLOCK: Final = 8
"""Freed slots are being discarded for a while: there are others."""
_SPREAD: Final = 4
"""Hashing gives a region its share of the blocks give or take a square root of it; so many of those fit."""


@dataclass(frozen=True)
class Load:
    """What one agent does in a closed loop: one call after another, each a batch, in random order by `weights`.

    RETRIEVE takes one of `working_batches` batches that the agent stored, STORE puts a fresh batch in the place of the
    oldest of them, LOOKUP asks for `lookup_batch` of their keys.
    """

    name: str
    block_bytes: int
    batch: int
    lookup_batch: int = 128
    working_batches: int = 4
    weights: tuple[int, int, int] = (80, 8, 12)
    """Of `OPERATIONS`: how many calls of their sum, exactly."""

    def __post_init__(self) -> None:
        if self.block_bytes < 4096 or self.block_bytes % 4096:
            raise UserError("block sizes are multiples of 4 KiB")
        if not 1 <= self.batch <= 512 or not 1 <= self.lookup_batch <= 512:
            raise UserError("a batch is 1 to 512 blocks")
        if self.working_batches < 1 or min(self.weights) < 0 or self.weights[0] + self.weights[2] <= 0:
            raise UserError("a load needs at least one batch to work with, and calls that are not all STORE")

    @property
    def working_blocks(self) -> int:
        return self.working_batches * self.batch

    @property
    def batch_bytes(self) -> int:
        return self.batch * self.block_bytes


LARGE: Final = Load("large", 256 << 10, 32)
"""256 KiB: a 16-token page of Llama-3-8B in bf16 on one of 8 tensor-parallel ranks; a batch is 512 tokens."""
SMALL: Final = Load("small", 64 << 10, 16)
ONE_BLOCK: Final = Load("one-block", 4096, 1, lookup_batch=1, working_batches=16, weights=(100, 0, 0))
"""Who feels a neighbour most."""


@dataclass(frozen=True)
class SampleGrid:
    """What the cost of the worker's work is measured at, one agent on one worker: each size with each batch, up to
    `bytes_max` a call."""

    block_bytes: tuple[int, ...] = (4 << 10, 64 << 10, 256 << 10)
    batches: tuple[int, ...] = (1, 4, 16, 64, 128)
    lookup_batches: tuple[int, ...] = (1, 16, 128, 512)
    bytes_max: int = 32 << 20
    frames: int = 256
    """Of the window. `cold_blocks` of each size are stored and asked for in turn, so that none of them is staged."""
    cold_blocks: int = 1024
    cold_batch_max: int = 64
    rounds: int = 3
    sample_s: float = 0.15
    """Calls of one sample go on for so long; at least two."""

    def __post_init__(self) -> None:
        if max(self.batches) > RegionSettings.dirty_fraction * self.frames or self.cold_blocks < 2 * self.frames:
            raise UserError("the window takes the largest batch, and half the cold blocks at most")

    def pod(self, base: PodSettings, run_dir: Path) -> PodSettings:
        """`base` with one region, whose worker sleeps whenever it has nothing to do, so that what it uses is work."""
        slot_bytes = max(self.block_bytes)
        return dataclasses.replace(
            base,
            dpus=1,
            regions=1,
            slot_bytes=slot_bytes,
            window_bytes=self.frames * slot_bytes,
            capacity_bytes=_SLOTS_PER_COLD_BLOCK * self.cold_blocks * slot_bytes,
            busy_poll_s=0.0,
            run_dir=run_dir,
        )


@dataclass(frozen=True)
class ScaleSettings:
    """`workers`: a pod of one DPU for each; all of them are up at once, so that rounds can go from one to another."""

    workers: tuple[int, ...] = (1, 2, 4, 8)
    agents: tuple[int, ...] = (1, 2, 4, 8)
    loads: tuple[Load, ...] = (LARGE, SMALL)
    rounds: int = 3
    phase_s: float = 1.2
    """How long one load runs at a time."""
    neighbours: int = 3
    """Agents of the first load beside one that asks for single blocks; 0: not measured."""
    samples: SampleGrid = SampleGrid()

    @classmethod
    def quick(cls) -> ScaleSettings:
        """In seconds, for tests and to see that it works; too little for figures."""
        grid = SampleGrid(
            block_bytes=(4 << 10, 64 << 10),
            batches=(1, 8, 32),
            lookup_batches=(1, 16, 64, 256),
            frames=64,
            cold_blocks=128,
            cold_batch_max=8,
            rounds=2,
            sample_s=0.05,
        )
        load = Load("small", 64 << 10, 8, lookup_batch=32, working_batches=3)
        return cls((1, 2), (1, 2), (load,), rounds=1, phase_s=0.3, neighbours=1, samples=grid)

    def __post_init__(self) -> None:
        for name, counts in (("workers", self.workers), ("agents", self.agents)):
            if not counts or min(counts) < 1 or max(counts) > 16 or sorted(set(counts)) != list(counts):
                raise UserError(f"{name}: rising numbers from 1 to 16, such as 1,2,4,8")
        if not self.loads or self.rounds < 1 or self.phase_s <= 0 or self.neighbours < 0:
            raise UserError("at least one load, one round, and a time above zero are needed")

    @property
    def agent_processes(self) -> int:
        return max(*self.agents, self.neighbours + 1 if self.neighbours else 1)

    @property
    def all_loads(self) -> tuple[Load, ...]:
        return (*self.loads, ONE_BLOCK) if self.neighbours else self.loads

    def pod(self, base: PodSettings, workers: int, run_dir: Path) -> PodSettings:
        """`base` with so many regions, and windows that hold all agents' working sets staged."""
        slot_bytes = max(load.block_bytes for load in self.all_loads)
        blocks = sum(load.working_blocks for load in self.all_loads) * self.agent_processes
        share = _FRAMES_FACTOR * blocks / workers
        frames = math.ceil((share + _SPREAD * math.sqrt(share)) / RegionSettings.dirty_fraction) + FRAMES_MIN
        return dataclasses.replace(
            base,
            dpus=1,
            regions=workers,
            slot_bytes=slot_bytes,
            window_bytes=frames * slot_bytes,
            capacity_bytes=_SLOTS_PER_FRAME * frames * slot_bytes,
            run_dir=run_dir,
        )
