"""What a peer is to the rest: data, and a function that starts its servers in a turn.

`emulator.peers.entresol`, `.redis`, `.nixl`, `.mooncake` and `.lmcache` say who takes part; what a peer does with
blocks is its adapter's. Entresol takes part like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from emulator.peers.turns import Turn

STORE: Final = "store"
RETRIEVE: Final = "retrieve"
LOOKUP: Final = "lookup"
FLASH_STORE: Final = "flash_store"
FLASH_READ: Final = "flash_read"
OPERATIONS: Final = (RETRIEVE, STORE, LOOKUP, FLASH_READ, FLASH_STORE)
STAGED: Final = frozenset({STORE, RETRIEVE})
ON_FLASH: Final = frozenset({FLASH_STORE, FLASH_READ})
SAME_HOST: Final = "same host"
TCP: Final = "tcp"
ENTRESOL_SHM: Final = "Entresol, emu-shm"
ENTRESOL_HUGE: Final = "Entresol, emu-shm, huge pages"
ENTRESOL_TCP: Final = "Entresol, emu-tcp"
ENTRESOL: Final = (ENTRESOL_SHM, ENTRESOL_HUGE, ENTRESOL_TCP)


@dataclass(frozen=True)
class Family:
    """Peers that share an environment. `no_deps`: requirements installed without what they say they need, because
    it is large and unused here. `debian`: packages besides."""

    name: str
    requirements: tuple[str, ...] = ()
    no_deps: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """What a turn must be ready for: `blocks` of `block_bytes`, the largest there are, stored and not yet forgotten,
    and `small_blocks` of a few KiB."""

    block_bytes: int
    blocks: int
    small_blocks: int = 0


@dataclass(frozen=True)
class Peer:
    """`start` starts the servers and gives the options of the adapter. `reach`: how bytes travel, and so how
    fast it can be. `settings` is for the report."""

    name: str
    family: Family
    reach: str
    adapter: str
    start: Callable[[Turn, Sizes], dict[str, Any]]
    settings: str
    operations: frozenset[str] = STAGED
    environment: Mapping[str, str] = field(default_factory=dict)
    against: tuple[str, ...] = ()
    """Which of Entresol's own it is held against: the first of these names that was measured."""
    turn_per_size: bool = False
    """Whether it is started anew for each block size, with slots of that size."""
