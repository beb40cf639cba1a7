"""What one run of the benchmark measures: sizes, batches, rounds and which operations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.errors import UserError

OPERATIONS: Final = (
    "store_staged",
    "store_flash",
    "retrieve_staged",
    "lease_read",
    "retrieve_cold",
    "lookup",
    "retrieve_small",
    "mixed",
)
"""In the order in which a report shows them."""
CALL_TIMEOUT_S: Final = 60.0
"""Of every call that is made here: far from what any takes, so that a busy machine is slow and not an error."""

_CALLS_MIN: Final = 8
_PASSES_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class BenchSettings:
    """Raises UserError for values that nothing can be measured with."""

    block_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    batches: tuple[int, ...] = (1, 16, 128)
    lookup_batches: tuple[int, ...] = (1, 16, 128, 512)
    rounds: int = 5
    limit_s: float = 540.0
    """Parts have fewer rounds, three at least, where all would take longer; 0: all rounds, however long."""
    blocks: int = 128
    """Of one round: a batch of 16 means 8 calls."""
    operations: tuple[str, ...] = OPERATIONS
    small_calls: int = 256
    """Of one round, of LOOKUP at each batch and of RETRIEVE of one small block."""
    mixed_block_bytes: int = 256 << 10
    mixed_batch: int = 16
    mixed_calls: int = 48
    """Of one round."""
    memory_bytes: int = 128 << 20
    """Of each buffer, at least: rounds of small blocks go round in it, past the processor's caches."""
    fio_s: float = 0.5
    """How long each reading of the disk lasts."""
    verify: bool = True
    """Whether the client compares checksums within the timed calls. All bytes are compared outside them anyway."""
    flash_dir: Path | None = None
    """A directory on the disk that holds the pod's flash, where this machine has it: for the limits of the disk."""
    may_evict: bool = False
    """Whether blocks of others may be pushed out of the pod: `mixed` fills it beyond what it holds."""

    def passes(self, block_bytes: int, batch: int) -> int:
        """How often a round goes over fresh blocks: so that it has 8 calls, as far as 64 MiB go."""
        for_calls = -(-_CALLS_MIN * batch // self.blocks)
        return max(1, min(for_calls, _PASSES_BYTES // (block_bytes * self.blocks)))

    @classmethod
    def quick(cls) -> BenchSettings:
        """In seconds, for tests and to see that it works; too little for figures."""
        return cls(
            block_bytes=(64 << 10, 1 << 20),
            batches=(1, 16),
            lookup_batches=(1, 16),
            rounds=2,
            blocks=16,
            small_calls=16,
            mixed_block_bytes=64 << 10,
            mixed_calls=8,
            memory_bytes=16 << 20,
            fio_s=0.1,
        )

    def __post_init__(self) -> None:
        sizes = (*self.block_bytes, self.mixed_block_bytes)
        if not self.block_bytes or min(sizes) < 4096 or any(size % 4096 for size in sizes):
            raise UserError("block sizes are multiples of 4 KiB")
        if not self.batches or any(not 1 <= batch <= self.blocks for batch in self.batches):
            raise UserError(f"a batch is 1 to {self.blocks} blocks")
        if self.rounds < 1:
            raise UserError("at least one round is needed")
        unknown = [name for name in self.operations if name not in OPERATIONS]
        if unknown or not self.operations:
            raise UserError(f"unknown operation {', '.join(unknown)!r}; there are {', '.join(OPERATIONS)}")
