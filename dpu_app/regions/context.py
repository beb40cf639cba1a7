"""What the parts of one region's engine share: settings, counters, and the work they hand to the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from doca_shims.api import Clock, FlashRequest, Opcode, SendFlags
from dpu_app.regions.admission import AdmissionFilter
from dpu_app.regions.catalogue import Catalogue
from dpu_app.regions.flash_queue import FlashQueue
from dpu_app.regions.hot_path import HotPath
from dpu_app.regions.quota import QuotaPolicy
from dpu_app.regions.sessions import IN_FLIGHT_MOVED_MAX, Connection
from dpu_app.regions.stats import Stats
from dpu_app.regions.window import Window


@dataclass(frozen=True)
class EngineSettings:
    """Limits of one region; times in ms or s as named, fractions of the window or of all slots."""

    dirty_fraction: float = 0.75
    """Of the frames: with more than this not yet on flash, stores are refused as BUSY, so loads find frames."""
    deadline_default_ms: int = 5_000
    deadline_max_ms: int = 60_000
    lease_default_ms: int = 2_000
    lease_max_ms: int = 30_000
    leases_fraction: float = 0.5
    """Of the frames: no more are leased at a time, so that no agent can keep the whole window from the others."""
    pins_fraction: float = 0.5
    ttl_default_s: int = 0
    """For stores that name none; 0: no expiry."""
    send_wrs_max: int = 1024
    """Work requests the engine may have posted on one connection."""


class LeasePort(Protocol):
    """Makes window memory readable for one connection and unreadable again; the driver implements it on the
    fabric's registrations, one per lease, so that a lease's rkey reaches that frame alone."""

    def grant(self, connection_id: int, address: int, length_bytes: int) -> int:
        """The rkey. Raises OSError."""
        ...

    def revoke(self, connection_id: int, rkey: int) -> None:
        """When it returns the peer can no longer read the frame. Unknown rkeys are ignored."""
        ...


class Posting(NamedTuple):
    """A call of `doca_shims.api.Connection.post_rdma`, with the connection to call it on."""

    connection_id: int
    wr_id: int
    opcode: Opcode
    requests: bytes | bytearray
    flags: SendFlags
    moved: int
    """Bytes that it moves."""


TURN_MOVED_MAX = IN_FLIGHT_MOVED_MAX


class ReadyConnections:
    """Connections with transfers to pump, each once, in the order in which they came."""

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, connection_id: int) -> None:
        self._ids[connection_id] = None

    def discard(self, connection_id: int) -> None:
        self._ids.pop(connection_id, None)

    def pop(self) -> int:
        """The one that has waited longest."""
        connection_id = next(iter(self._ids))
        del self._ids[connection_id]
        return connection_id


@dataclass
class Outbox:
    """Work for the driver, in order. It empties the lists as it carries them out: per connection first
    `fabric`, then `responses`; and it says which of these are sent (`RegionEngine.on_sent`)."""

    flash: list[FlashRequest] = field(default_factory=list)
    fabric: list[Posting] = field(default_factory=list)
    responses: list[tuple[int, bytes]] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    """Connections to close: a transfer failed."""

    @property
    def full(self) -> bool:
        """As much is to be moved as in one turn: what else there is to do waits for the next."""
        return sum(posting.moved for posting in self.fabric) >= TURN_MOVED_MAX

    @property
    def empty(self) -> bool:
        return not (self.flash or self.fabric or self.responses or self.broken)


@dataclass
class Context:
    """Shared by the store path, the load path, the leases and the engine that owns them."""

    settings: EngineSettings
    clock: Clock
    stats: Stats
    window: Window
    queue: FlashQueue
    catalogue: Catalogue
    admission: AdmissionFilter
    quota: QuotaPolicy
    tenant_bytes: Callable[[str], int]
    """Bytes a tenant's blocks take in this region now."""
    connections: dict[int, Connection] = field(default_factory=dict)
    ready: ReadyConnections = field(default_factory=ReadyConnections)
    hot_path: HotPath | None = None
    draining: bool = False
