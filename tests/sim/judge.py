"""Whether an answer may be what it is, given what is known to be true; and what it adds to that.

Knows what one session asked and what every session did to a block (`tests.sim.truth`). Used by `tests.sim.client`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from common import wire
from common.status import Status
from common.wire import Flags, Op
from tests.sim.requests import NS_PER_S, ON_FLASH, Item, Lease, Request
from tests.sim.truth import NEVER, Block, Truth, Violation, require


class Judge:
    """Of one session's answers; `view` is its memory, `leases` what it was granted."""

    def __init__(
        self,
        session_id: int,
        handles: dict[int, bytes],
        truth: Truth,
        view: memoryview,
        now_ns: Callable[[], int],
        wall_ns: Callable[[], int],
        now_step: Callable[[], int],
    ) -> None:
        self.session_id = session_id
        self.handles = handles
        self.truth = truth
        self.view = view
        self.now_ns = now_ns
        self.wall_ns = wall_ns
        self.now_step = now_step
        self.leases: list[Lease] = []
        self.flash_loses = False
        """Flash may drop blocks (read faults), so that a block may vanish at any time."""
        self.evicts = False

    def entry(self, request: Request, item: Item, block: Block, status: Status, row: np.void) -> None:
        op = request.op
        if status is Status.OK and op in (Op.RETRIEVE, Op.PREFETCH, Op.LOOKUP, Op.LEASE, Op.PIN, Op.TOUCH):
            self._hit(request, block)
        elif status is Status.MISS and op in (Op.RETRIEVE, Op.PREFETCH, Op.LOOKUP, Op.LEASE, Op.PIN, Op.TOUCH):
            self._miss(request, block)
        if op is Op.STORE:
            self._store(request, item, block, status, row)
        elif op in (Op.RETRIEVE, Op.PREFETCH) and status is Status.OK:
            self._load(request, item, block, row)
        elif op is Op.LEASE and status is Status.OK:
            self._lease(request, block, row)
        elif op is Op.PIN and status is Status.OK:
            if block.deletes_open or block.unpins_open or request.arrived <= block.deleted_at:
                return
            block.pinned_at = self.now_step() if block.sure else NEVER
            block.pinned_until_ns = request.arrived_ns + item.ttl_s * NS_PER_S
        elif op is Op.LOOKUP and status is Status.OK:
            require(int(row["length"]) == len(block.value), "LOOKUP: wrong length")
            settled = request.arrived > block.on_flash_at and not (block.excused or self.evicts or self.flash_loses)
            require(not settled or int(row["state"]) in ON_FLASH, "LOOKUP: acknowledged on flash, now only staged")
        elif op is Op.DELETE and status is Status.OK and item.deletes_alone and block.stores_sent == item.stores_sent:
            block.gone_at = self.now_step()

    def listing(self, request: Request, rows: wire.Entries) -> None:
        """Only blocks of the session's own namespaces, as they were stored."""
        for row in rows:
            block = self.truth.find(self.handles[int(row["namespace"])], wire.key_bytes(row))
            if block is None:
                raise Violation("LIST: a block that nobody knows")
            self._hit(request, block)
            require(int(row["length"]) == len(block.value), "LIST: wrong length")

    def _store(self, request: Request, item: Item, block: Block, status: Status, row: np.void) -> None:
        if not status.success:
            return
        require(item.expected is None or status in item.expected, "a spoiled STORE was taken")
        if status is Status.OK:
            require(int(row["length"]) == len(block.value), "STORE: wrong length")
            require(int(row["checksum"]) == block.checksum, "STORE: wrong checksum")
            block.sure = True
            alone = block.stores_open == 1
            latest_ns = max(self.wall_ns(), request.arrived_wall_ns) + self.now_ns() - request.arrived_ns
            block.expires_wall_ns = latest_ns + item.ttl_s * NS_PER_S if item.ttl_s and alone else 0
            block.expires_sent = block.stores_sent
            if request.arrived > block.excused_at:
                block.excused = False
        undeleted = not block.deletes_open and request.arrived > block.deleted_at
        if request.flags & Flags.UNTIL_FLASH and undeleted and not (block.mortal or block.excused):
            block.on_flash_at = self.now_step()

    def _load(self, request: Request, item: Item, block: Block, row: np.void) -> None:
        if not item.buffers:
            return
        block.sure = True
        block.last_hit_by = self.session_id
        wanted = item.wanted or len(block.value) - item.offset
        expected = block.value[item.offset : item.offset + wanted]
        require(int(row["length"]) == wanted, f"{request.op.name}: length {int(row['length'])}, not {wanted}")
        got = bytearray()
        for start, length in item.pieces:
            got += self.view[start : start + length]
        require(got == expected, f"WRONG BYTES: {request.op.name} of block {block.number}")
        checksum = int(row["checksum"])
        right = checksum in (0, xxhash.xxh3_64_intdigest(expected))
        require(right, f"{request.op.name}: the checksum is not that of what was delivered")

    def _lease(self, request: Request, block: Block, row: np.void) -> None:
        require(int(row["length"]) == len(block.value), "LEASE: wrong length")
        require(int(row["checksum"]) == block.checksum, "LEASE: wrong checksum")
        lease_id, generation, address, rkey, length, duration_ms = (
            int(row[name]) for name in ("lease_id", "generation", "address", "rkey", "length", "duration_ms")
        )
        until_ns = request.arrived_ns + duration_ms * 1_000_000
        self.leases.append(Lease(block, lease_id, generation, address, rkey, length, until_ns))

    def _hit(self, request: Request, block: Block) -> None:
        what = f"{request.op.name} hit block {block.number}, which was"
        require(block.stores_sent > 0, f"{what} never stored")
        require(request.arrived <= block.gone_at, f"{what} deleted")
        only = block.expires_wall_ns and block.stores_sent == block.expires_sent
        require(not (only and request.arrived_wall_ns >= block.expires_wall_ns), f"{what} to expire before")

    def _miss(self, request: Request, block: Block) -> None:
        """Whether the block may be absent."""
        pinned = request.arrived > block.pinned_at and request.arrived_ns < block.pinned_until_ns
        if self.flash_loses or block.mortal or block.excused:
            block.may_vanish()
        elif pinned:
            raise Violation(f"{request.op.name} missed block {block.number}, which is pinned")
        elif self.evicts:
            block.may_vanish()
        else:
            settled = request.arrived > block.on_flash_at
            require(not settled, f"{request.op.name} missed block {block.number}, acknowledged on flash")
