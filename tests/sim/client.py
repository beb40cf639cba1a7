"""A simulated agent: sends random requests, owns memory that the region reaches, and judges every answer.

It knows what each answer may say (`tests.sim.truth`), that each request is answered once, and that its memory is
touched only for requests that are open. Driven by `tests.sim.world`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from common import wire
from common.status import BlockState, Status
from common.wire import EntryFlags, Flags, Op
from doca_shims.api import Access, Opcode
from tests.sim.truth import NEVER, Block, Truth, Violation, require

NS_PER_S = 1_000_000_000
BUFFERS = 40
JUNK = bytes(range(64, 128))
PAD = 16
"""Bytes between buffers, which nobody may write."""
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


class Client:
    """One session and its connection. `now_ns` and `wall_ns` are the clocks, `now_step` the world's step."""

    def __init__(
        self,
        session_id: int,
        tenant: str,
        handles: dict[int, bytes],
        truth: Truth,
        slot_bytes: int,
        source: random.Random,
        now_ns: Callable[[], int],
        wall_ns: Callable[[], int],
        now_step: Callable[[], int],
    ) -> None:
        self.session_id = session_id
        self.tenant = tenant
        self.handles = handles
        self.truth = truth
        self.slot_bytes = slot_bytes
        self.random = source
        self.now_ns = now_ns
        self.wall_ns = wall_ns
        self.now_step = now_step
        self.connection_id = 0
        self.base = session_id << 32
        self.stride = slot_bytes + PAD
        self.memory = bytearray(BUFFERS * self.stride)
        self.view = memoryview(self.memory)
        self.rkey = 0
        self.read_only_rkey = 0
        self.free = list(range(BUFFERS))
        self.requests: dict[int, Request] = {}
        self.unsent: list[Request] = []
        self.leases: list[Lease] = []
        self.next_id = 1
        self.flash_loses = False
        """Flash may drop blocks (read faults), so that a block may vanish at any time."""
        self.evicts = False
        self.answered = 0
        self.last_status = Status.OK

    # ---------------------------------------------------------------- memory

    def regions(self) -> list[tuple[int, memoryview, Access]]:
        return [
            (self.base, self.view, Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ),
            (self.base, self.view, Access.REMOTE_READ),
        ]

    def _start(self, buffer: int) -> int:
        return buffer * self.stride

    def on_access(self, opcode: Opcode, address: int, length: int) -> None:
        """The region reads or writes this client's memory: it must lie in a buffer of an open request."""
        offset = address - self.base
        buffer, inside = divmod(offset, self.stride)
        require(inside + length <= self.slot_bytes, f"{opcode.name} across buffers at {offset}")
        if opcode is Opcode.RDMA_WRITE:
            owners = [r for r in self.requests.values() if any(buffer in item.buffers for item in r.items)]
            require(bool(owners), f"RDMA_WRITE into buffer {buffer}, which belongs to no open request")
            require(owners[0].op in (Op.RETRIEVE, Op.PREFETCH), f"RDMA_WRITE for a {owners[0].op.name}")

    def _take(self, count: int) -> list[int]:
        if count > len(self.free):
            return []
        return [self.free.pop(self.random.randrange(len(self.free))) for _ in range(count)]

    def _fill(self, buffer: int, data: bytes) -> None:
        start = self._start(buffer)
        self.view[start : start + len(data)] = data

    def _give_back(self, item: Item) -> None:
        """Use the memory for something else at once: whatever still reads it gets junk."""
        for buffer in item.buffers:
            self._fill(buffer, JUNK)
            self.free.append(buffer)

    # ---------------------------------------------------------------- connection

    def connected(self, connection_id: int, rkey: int, read_only_rkey: int) -> None:
        self.connection_id = connection_id
        self.rkey = rkey
        self.read_only_rkey = read_only_rkey

    def disconnected(self) -> None:
        """Nothing that is open will be answered; what it did is unknown."""
        for request in [*self.requests.values(), *self.unsent]:
            for item in request.items:
                self._closed(request, item)
                self._give_back(item)
        self.requests.clear()
        self.unsent.clear()
        self.leases.clear()
        self.connection_id = 0

    def _closed(self, request: Request, item: Item) -> None:
        block = item.block
        if block is None:
            return
        if request.op is Op.STORE:
            block.stores_open -= 1
        elif request.op is Op.DELETE:
            block.deletes_open -= 1
            block.deleted_at = self.now_step()
        elif request.op is Op.UNPIN:
            block.unpins_open -= 1
            block.deleted_at = self.now_step()

    # ---------------------------------------------------------------- requests

    def request(self, op: Op) -> None:
        """Make a random request of this kind, to be sent when the world says so."""
        makers = {
            Op.STORE: self._store,
            Op.RETRIEVE: self._retrieve,
            Op.PREFETCH: self._prefetch,
            Op.RELEASE: self._release,
            Op.CANCEL: self._cancel,
        }
        maker = makers.get(op)
        if maker is not None:
            maker()
        else:
            self._by_key(op)

    def _count(self) -> int:
        return self.random.choice((0, 1, 1, 1, 2, 3, 5, 8))

    def _pick(self, alike: bool = False) -> tuple[int, Block | None]:
        """A handle and a block; now and then a handle that this session has not opened."""
        if self.random.random() < 0.03:
            return self.random.choice((0, 99, 1 << 31)), None
        handle = self.random.choice(sorted(self.handles))
        blocks = self.truth.of[self.handles[handle]]
        if alike:
            return handle, self.random.choice(blocks)
        # Some blocks are wanted far more often than others.
        return handle, blocks[min(int(self.random.expovariate(4.0 / len(blocks))), len(blocks) - 1)]

    def _entries(self, count: int, layout: np.dtype[np.void], alike: bool = False) -> tuple[wire.Entries, list[Item]]:
        """So many entries for random blocks, `alike`: for each with the same chance."""
        picks = [self._pick(alike) for _ in range(count)]
        keys = [self.truth.of[next(iter(self.handles.values()))][0].key if b is None else b.key for _, b in picks]
        entries = wire.keys_array(keys, layout)
        entries["namespace"] = [handle for handle, _ in picks]
        items = [Item(block, expected={Status.DENIED} if block is None else None) for _, block in picks]
        return entries, items

    def _queue(
        self,
        op: Op,
        entries: wire.Entries,
        items: list[Item],
        *,
        sges: wire.Entries | None = None,
        flags: Flags = Flags.NONE,
    ) -> None:
        budget_us = self.random.choice((0, 300, 3_000, 30_000, 300_000, 3_000_000))
        capsule = wire.encode(op, self.next_id, entries, sges=sges, flags=flags, deadline_us=budget_us)
        self.unsent.append(Request(op, self.next_id, capsule, flags, items, budget_us))
        self.next_id += 1

    def _store(self) -> None:
        count = min(self._count(), len(self.free) // 2)
        entries, items = self._entries(count, wire.BLOCK_ENTRY)
        flags = Flags.UNTIL_FLASH if self.random.random() < 0.4 else Flags.NONE
        self._queue_store(entries, items, flags, spoil=True)

    def store_now(self, blocks: list[Block]) -> None:
        """Queue a STORE of these blocks."""
        handle_of = {digest: handle for handle, digest in self.handles.items()}
        entries = wire.keys_array([block.key for block in blocks], wire.BLOCK_ENTRY)
        entries["namespace"] = [handle_of[block.digest] for block in blocks]
        self._queue_store(entries, [Item(block) for block in blocks], Flags.NONE, spoil=False)

    def _queue_store(self, entries: wire.Entries, items: list[Item], flags: Flags, *, spoil: bool) -> None:
        sges: list[tuple[int, int, int]] = []
        for row, item in zip(entries, items):
            value = item.block.value if item.block is not None else b"x"
            self._place(row, item, value, sges)
            row["length"] = len(value)
            if self.random.random() < 0.3:
                row["flags"] = EntryFlags.HAS_CHECKSUM
                row["checksum"] = xxhash.xxh3_64_intdigest(value)
            if spoil and self.random.random() < 0.1:
                item.ttl_s = self.random.choice((1, 5, 60))
                row["ttl_s"] = item.ttl_s
            if spoil:
                self._spoil_store(row, item)
            if item.block is not None:
                item.block.stores_open += 1
                item.block.stores_sent += 1
                item.block.gone_at = NEVER
                item.block.mortal |= item.ttl_s > 0
        self._queue(Op.STORE, entries, items, sges=self._sge_array(sges), flags=flags)

    def _spoil_store(self, row: np.void, item: Item) -> None:
        """Now and then make a request that must be refused."""
        if item.block is None or self.random.random() > 0.06:
            return
        spoiled = self.random.randrange(4)
        if spoiled == 0:
            row["length"] = 0
            item.expected = {Status.BAD_LENGTH}
        elif spoiled == 1 and row["sge_count"] == 1:
            row["length"] = self.slot_bytes + 1
            item.expected = {Status.TOO_LARGE}
        elif spoiled == 2:
            row["flags"] = EntryFlags.HAS_CHECKSUM
            row["checksum"] = item.block.checksum ^ 1
            item.expected = ALLOWED[Op.STORE] - {Status.OK, Status.DENIED}
        elif spoiled == 3 and row["sge_count"] > 1:
            row["address"] = 1 << 40
            item.expected = {Status.BAD_REQUEST}

    def _place(self, row: np.void, item: Item, value: bytes, sges: list[tuple[int, int, int]]) -> None:
        """Put `value` into one buffer, or in pieces into two."""
        parts = [value]
        if len(value) > 1 and self.random.random() < 0.3:
            cut = self.random.randrange(1, len(value))
            parts = [value[:cut], value[cut:]]
        item.buffers = self._take(len(parts))
        if not item.buffers:
            item.buffers = self._take(1)
            parts = [value]
        for buffer, part in zip(item.buffers, parts):
            self._fill(buffer, part)
        self._address(row, [(self.base + self._start(b), len(p), self.rkey) for b, p in zip(item.buffers, parts)], sges)

    def _address(self, row: np.void, pieces: list[tuple[int, int, int]], sges: list[tuple[int, int, int]]) -> None:
        row["sge_count"] = len(pieces)
        if len(pieces) == 1:
            row["address"], _, row["rkey"] = pieces[0]
        else:
            row["address"] = len(sges)
            sges.extend(pieces)

    @staticmethod
    def _sge_array(sges: list[tuple[int, int, int]]) -> wire.Entries | None:
        return np.array(sges, wire.SGE) if sges else None

    def _retrieve(self) -> None:
        if self.random.random() < 0.25:
            self._retrieve_in_order()
        else:
            self._load(Op.RETRIEVE, Flags.NONE)

    def _retrieve_in_order(self) -> None:
        """Many whole blocks, the most wanted ones, into buffers one after the other: what an engine mostly asks for."""
        count = min(self.random.choice((4, 16, 24)), len(self.free))
        handle = self.random.choice(sorted(self.handles))
        blocks = self.truth.of[self.handles[handle]]
        if self.random.random() < 0.7:
            blocks = [block for block in blocks if block.last_hit_by == self.session_id] or blocks
        chosen = [self.random.choice(blocks) for _ in range(count)]
        entries = wire.keys_array([block.key for block in chosen], wire.BLOCK_ENTRY)
        items = [Item(block, buffers=[buffer]) for block, buffer in zip(chosen, sorted(self._take(count)))]
        for row, item, block in zip(entries, items, chosen):
            item.pieces = [(self._start(item.buffers[0]), len(block.value))]
            row["namespace"], row["sge_count"], row["rkey"] = handle, 1, self.rkey
            row["address"] = self.base + item.pieces[0][0]
            row["length"] = item.wanted = self.random.choice((0, len(block.value)))
        self._queue(Op.RETRIEVE, entries, items)

    def read_now(self, block: Block) -> None:
        """Queue a RETRIEVE of this one block, with time enough."""
        handle = next(handle for handle, digest in self.handles.items() if digest == block.digest)
        entries = wire.keys_array([block.key], wire.BLOCK_ENTRY)
        item = Item(block, buffers=self._take(1))
        item.pieces = [(self._start(item.buffers[0]), len(block.value))]
        entries["namespace"], entries["length"], entries["sge_count"] = handle, len(block.value), 1
        entries["address"], entries["rkey"] = self.base + item.pieces[0][0], self.rkey
        item.wanted = len(block.value)
        self._queue(Op.RETRIEVE, entries, [item])

    def _prefetch(self) -> None:
        if self.random.random() < 0.5:
            self._load(Op.PREFETCH, Flags.TO_HOST)
        else:
            entries, items = self._entries(self._count(), wire.BLOCK_ENTRY)
            self._queue(Op.PREFETCH, entries, items)

    def _load(self, op: Op, flags: Flags) -> None:
        entries, items = self._entries(min(self._count(), len(self.free) // 2), wire.BLOCK_ENTRY)
        sges: list[tuple[int, int, int]] = []
        for row, item in zip(entries, items):
            block = item.block
            size = len(block.value) if block is not None else 1
            if self.random.random() < 0.3:
                item.offset = self.random.randrange(size)
                item.wanted = self.random.randint(1, size - item.offset)
            if self.random.random() < 0.04 and block is not None:
                item.offset, item.wanted = size, 1
                item.expected = {Status.BAD_RANGE, Status.MISS, Status.DEADLINE, Status.CANCELLED}
            row["offset"] = item.offset
            row["length"] = item.wanted
            row["flags"] = EntryFlags.WANT_CHECKSUM if self.random.random() < 0.5 else 0
            count = item.wanted or size - item.offset
            if self.random.random() < 0.25 and count > 1:
                cut = self.random.randrange(1, count)
                item.buffers = self._take(2)
                lengths = [cut, count - cut]
            else:
                item.buffers = self._take(1)
                lengths = [count]
            item.pieces = [(self._start(buffer), n) for buffer, n in zip(item.buffers, lengths)]
            self._address(row, [(self.base + start, n, self.rkey) for start, n in item.pieces], sges)
            if len(item.buffers) == 1 and item.wanted == 0 and self.random.random() < 0.02:
                row["sge_count"] = 0
                item.expected = {Status.BAD_REQUEST, Status.MISS, Status.DENIED}
        self._overlap(op, entries, items)
        self._queue(op, entries, items, sges=self._sge_array(sges), flags=flags)

    def _overlap(self, op: Op, entries: wire.Entries, items: list[Item]) -> None:
        """Now and then two entries name the same destination."""
        if len(items) < 2 or self.random.random() > 0.05:
            return
        first, second = items[0], items[1]
        if any(item.block is None or item.expected or len(item.buffers) != 1 for item in (first, second)):
            return
        entries[1]["address"] = entries[0]["address"]
        second.expected = ALLOWED[op]
        self._give_back(second)
        second.buffers = []

    def _by_key(self, op: Op) -> None:
        entries, items = self._entries(self._count(), wire.KEY_ENTRY, alike=op is Op.PIN)
        if op is Op.LEASE:
            entries["argument"] = self.random.choice((0, 1, 20, 500))
        elif op is Op.PIN:
            entries["argument"] = self.random.choice((1, 2, 10))
            for row, item in zip(entries, items):
                item.ttl_s = int(row["argument"])
        for item in items:
            block = item.block
            if block is not None and op is Op.DELETE:
                block.may_vanish()
                block.deletes_open += 1
                item.deletes_alone = block.stores_open == 0
                item.stores_sent = block.stores_sent
            elif block is not None and op is Op.UNPIN:
                block.unpins_open += 1
                block.pinned_at = NEVER
        self._queue(op, entries, items)

    def _release(self) -> None:
        if not self.leases:
            return
        lease = self.leases.pop(self.random.randrange(len(self.leases)))
        entries = np.zeros(1, wire.RELEASE_ENTRY)
        entries["lease_id"], entries["generation"] = lease.lease_id, lease.generation
        self._queue(Op.RELEASE, entries, [Item(lease.block)])

    def _cancel(self) -> None:
        if not self.requests:
            return
        entries = np.zeros(1, wire.CANCEL_ENTRY)
        entries["request_id"] = self.random.choice(sorted(self.requests))
        self._queue(Op.CANCEL, entries, [Item(None)])

    # ---------------------------------------------------------------- answers

    def receive(self, capsule: bytes) -> None:
        """Judge an answer. Raises Violation."""
        response = wire.decode_response(capsule)
        request = self.requests.pop(response.request_id, None)
        if request is None:
            raise Violation(f"{response.op.name} {response.request_id}: an answer to nothing, or a second one")
        require(response.op is request.op, f"a {response.op.name} answers a {request.op.name}")
        require(response.status is Status.OK, f"{request.op.name} was refused as a whole: {response.status.name}")
        require(len(response.entries) == len(request.items), f"{request.op.name}: entries lost")
        self.answered += 1
        for row, item in zip(response.entries, request.items):
            status = self.last_status = Status(int(row["status"]))
            allowed = ALLOWED[request.op] if item.expected is None else item.expected
            if status not in allowed:
                names = sorted(one.name for one in allowed)
                raise Violation(f"{request.op.name} answered {status.name}, not one of {names}")
            if item.block is not None:
                self._judge(request, item, item.block, status, row)
        for item in request.items:
            self._closed(request, item)
            self._give_back(item)

    def _judge(self, request: Request, item: Item, block: Block, status: Status, row: np.void) -> None:
        op = request.op
        if status is Status.OK and op in (Op.RETRIEVE, Op.PREFETCH, Op.LOOKUP, Op.LEASE, Op.PIN, Op.TOUCH):
            self._hit(request, block)
        elif status is Status.MISS and op in (Op.RETRIEVE, Op.PREFETCH, Op.LOOKUP, Op.LEASE, Op.PIN, Op.TOUCH):
            self._miss(request, block)
        if op is Op.STORE:
            self._judge_store(request, item, block, status, row)
        elif op in (Op.RETRIEVE, Op.PREFETCH) and status is Status.OK:
            self._judge_load(request, item, block, row)
        elif op is Op.LEASE and status is Status.OK:
            self._judge_lease(block, row)
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

    def _judge_store(self, request: Request, item: Item, block: Block, status: Status, row: np.void) -> None:
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

    def _judge_load(self, request: Request, item: Item, block: Block, row: np.void) -> None:
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

    def _judge_lease(self, block: Block, row: np.void) -> None:
        require(int(row["length"]) == len(block.value), "LEASE: wrong length")
        require(int(row["checksum"]) == block.checksum, "LEASE: wrong checksum")
        self.leases.append(
            Lease(block, *(int(row[name]) for name in ("lease_id", "generation", "address", "rkey", "length")))
        )

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
