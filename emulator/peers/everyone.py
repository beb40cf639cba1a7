"""Everyone who takes part, in the order of the report, and the choice among them by `--only`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from common.errors import UserError
from emulator.peers import entresol, lmcache, mooncake, nixl, redis
from emulator.peers.catalogue import Peer

PEERS: Final[tuple[Peer, ...]] = (*entresol.PEERS, *nixl.PEERS, *mooncake.PEERS, *lmcache.PEERS, *redis.PEERS)
FAMILIES: Final = tuple(dict.fromkeys(peer.family.name for peer in PEERS if peer.family != entresol.FAMILY))


def choose(only: Sequence[str]) -> list[Peer]:
    """Entresol and the peers of the families named; all of them where none is. Raises UserError."""
    unknown = [name for name in only if name not in FAMILIES]
    if unknown:
        raise UserError(f"no peer {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    return [peer for peer in PEERS if peer.family == entresol.FAMILY or not only or peer.family.name in only]
