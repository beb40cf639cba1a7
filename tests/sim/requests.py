"""What a simulated agent asks, and which statuses may answer it: made by its client, judged by its judge."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.status import BlockState, Status
from common.wire import Flags, Op
from tests.sim.truth import Block

NS_PER_S = 1_000_000_000
ON_FLASH = (BlockState.FLASH, BlockState.STAGED_AND_FLASH)
REFUSALS = {Status.BUSY, Status.NO_SPACE, Status.DEADLINE, Status.CANCELLED, Status.QUOTA_EXCEEDED, Status.DRAINING}
ALLOWED: dict[Op, set[Status]] = {
    Op.STORE: REFUSALS
    | {Status.OK, Status.EXISTS, Status.TOO_LARGE, Status.BAD_LENGTH, Status.DENIED, Status.CHECKSUM}
    | {Status.TRANSFER_ERROR, Status.FLASH_ERROR, Status.BAD_RANGE, Status.NOT_ADMITTED},
    Op.RETRIEVE: {Status.OK, Status.MISS, Status.DENIED, Status.BAD_RANGE, Status.OVERLAP}
    | {Status.DEADLINE, Status.CANCELLED, Status.BUSY},
    Op.PREFETCH: {Status.OK, Status.MISS, Status.DENIED, Status.BAD_RANGE, Status.OVERLAP}
    | {Status.DEADLINE, Status.CANCELLED, Status.DROPPED, Status.LATE},
    Op.LOOKUP: {Status.OK, Status.MISS, Status.DENIED},
    Op.LEASE: {Status.OK, Status.MISS, Status.DENIED, Status.DEADLINE, Status.CANCELLED, Status.BUSY},
    Op.RELEASE: {Status.OK, Status.MISS},
    Op.PIN: {Status.OK, Status.MISS, Status.DENIED, Status.NO_SPACE},
    Op.UNPIN: {Status.OK, Status.MISS, Status.DENIED},
    Op.TOUCH: {Status.OK, Status.MISS, Status.DENIED},
    Op.DELETE: {Status.OK, Status.MISS, Status.DENIED, Status.IN_USE, Status.FLASH_ERROR}
    | {Status.DEADLINE, Status.CANCELLED},
    Op.CANCEL: {Status.OK, Status.MISS},
}


@dataclass
class Item:
    """One entry of a request."""

    block: Block | None
    """None: a handle this session has not opened."""
    buffers: list[int] = field(default_factory=list)
    offset: int = 0
    wanted: int = 0
    expected: set[Status] | None = None
    """What the answer must be one of, where the request itself decides that."""
    ttl_s: int = 0
    """STORE: of the block; PIN: of the pin."""
    deletes_alone: bool = False
    """DELETE: no STORE of the block was open when it was sent; and how many had been sent."""
    stores_sent: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """RETRIEVE and PREFETCH: where the bytes go, as (start in the client's memory, length)."""


@dataclass
class Request:
    op: Op
    request_id: int
    capsule: bytes
    flags: Flags
    items: list[Item]
    budget_us: int
    arrived: int = 0
    """The world's step at which it reached the region, and the times then."""
    arrived_ns: int = 0
    arrived_wall_ns: int = 0
    deadline_ns: int = 0


@dataclass
class Lease:
    block: Block
    lease_id: int
    generation: int
    address: int
    rkey: int
    length: int
    until_ns: int
    """It lasts at least so long, unless it is released or the connection is lost."""
