"""What one seed's world is like: sizes, policies, faults and how much happens. All of it follows from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from emulator.sim_flash import NO_FAULTS, FaultPlan

TOLD = FaultPlan(
    eio_read=0.01,
    eio_write=0.02,
    enospc=0.01,
    short_read=0.02,
    short_write=0.02,
    duplicate_completion=0.02,
    stale_completion=0.02,
    delay_polls_max=8,
)
"""Faults that the device admits to."""
SILENT = FaultPlan(lost_write=0.03, bit_flip=0.03, delay_polls_max=4)
"""Faults that it does not."""


@dataclass(frozen=True)
class Scenario:
    seed: int
    slots: int
    """The slot table has a page for every 64."""
    slot_bytes: int
    frames: int
    keys: int
    """Per namespace, of which there are three, of two tenants."""
    eviction: str
    queue_depth: int
    max_io_bytes: int
    send_wrs_max: int
    dirty_fraction: float
    faults: FaultPlan
    fabric_failures: float
    lives: int
    """Times the region is opened; each life but the last ends in a crash or, now and then, a clean stop."""
    steps: int
    """Per life."""
    clean_stops: float
    reconnects: float
    """Chance per step."""
    quota_bytes: int
    prefill: float
    """Part of all blocks that is stored before anything else happens."""
    native: bool
    """With the engine's native hot path, where it was built; else its Python alone."""

    @property
    def recovery_faults(self) -> FaultPlan:
        """While the region is opened: of the faults of its life, those that can be got over by trying again."""
        return replace(self.faults, eio_write=0.0, enospc=0.0, short_write=0.0, lost_write=0.0, bit_flip=0.0)

    @property
    def evicts(self) -> bool:
        return 3 * self.keys > self.slots

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """Every third world thrashes: full from the start, busy, and its flash slow."""
        source = random.Random(f"scenario {seed}")
        scenario = cls._any(seed, source)
        if seed % 3:
            return scenario
        return replace(
            scenario,
            keys=scenario.slots // 2,
            frames=24,
            dirty_fraction=1.0,
            queue_depth=64,
            quota_bytes=0,
            prefill=1.0,
            lives=2,
            steps=200,
            faults=replace(scenario.faults, delay_polls_max=12),
        )

    @classmethod
    def _any(cls, seed: int, source: random.Random) -> Scenario:
        slot_bytes = source.choice((4096, 4096, 8192))
        slots = source.choice((64, 128))
        return cls(
            seed=seed,
            slots=slots,
            slot_bytes=slot_bytes,
            frames=source.choice((4, 6, 10, 24)),
            keys=source.choice((4, 12, slots // 3, slots // 2)),
            eviction=source.choice(("s3fifo", "lru", "fifo", "sieve")),
            queue_depth=source.choice((1, 2, 8, 64)),
            max_io_bytes=source.choice((4096, 1 << 20)),
            send_wrs_max=source.choice((256, 1024)),
            dirty_fraction=source.choice((0.3, 0.75, 1.0)),
            faults=source.choice((NO_FAULTS, FaultPlan(delay_polls_max=6), TOLD, SILENT)),
            fabric_failures=source.choice((0.0, 0.0, 0.005)),
            lives=source.choice((2, 2, 3, 4)),
            steps=source.choice((40, 80, 80, 200)),
            clean_stops=0.2,
            reconnects=source.choice((0.0, 0.004, 0.03)),
            quota_bytes=source.choice((0, 0, 0, 10 * slot_bytes)),
            prefill=source.choice((0.0, 0.5, 1.0)),
            native=source.random() < 0.5,
        )
