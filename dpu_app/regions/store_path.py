"""STORE: client memory -> frame (RDMA READ) -> visible, `staged` -> flash (data, then entry) -> `flash`.

A block becomes visible when it is whole in its frame. Stores of a key that is already on its way join the first
and are answered EXISTS when it commits, or take their own turn when it fails. A store whose requester was
answered meanwhile (deadline, cancel, gone) is discarded: its source may already hold other bytes.
"""

from __future__ import annotations

from collections import deque

from xxhash import xxh3_64_intdigest as _xxh3

from common.status import BlockState, Status
from common.wire import EntryFlags, StatId
from doca_shims.api import RDMA_REQUEST, FlashOp, Opcode
from dpu_app.regions import memory_list
from dpu_app.regions.batch import Batch
from dpu_app.regions.catalogue import NS_PER_S, Unflushed
from dpu_app.regions.context import Context
from dpu_app.regions.flash_queue import FlashJob, Priority
from dpu_app.regions.memory_list import CHECKSUM, FLAGS, KEY_HI, KEY_LO, LENGTH, NAMESPACE, TTL_S
from dpu_app.regions.presence import find
from dpu_app.regions.sessions import TRANSFER_BYTES_MAX, TRANSFER_MOVED_MAX, Transfer
from dpu_app.regions.window import FrameState, aligned_length

Key = tuple[int, int, int]
"""Namespace id, key_lo, key_hi."""


BEGUN_MAX = 64
"""Blocks of one batch that are given a slot and a frame in one turn, in a millisecond if others must go."""
_HAS_CHECKSUM = int(EntryFlags.HAS_CHECKSUM)


class Incoming:
    """A value on its way into a frame."""

    __slots__ = ("batch", "entry", "fingerprint", "frame", "joined", "key", "length", "reserves", "slot", "ttl_s")

    def __init__(
        self, batch: Batch, entry: int, key: Key, fingerprint: int, length: int, ttl_s: int, slot: int, frame: int
    ) -> None:
        self.batch = batch
        self.entry = entry
        self.key = key
        self.fingerprint = fingerprint
        self.length = length
        self.ttl_s = ttl_s
        self.slot = slot
        self.frame = frame
        self.reserves = False  # its bytes count against its tenant's quota already
        self.joined: list[tuple[Batch, int]] = []


class StorePath:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._incoming: dict[Key, Incoming] = {}
        self._reserved: dict[str, int] = {}  # tenant that has a quota -> bytes of its incoming values
        self._used: dict[str, int] = {}  # tenant -> bytes of its blocks, while one event is handled
        self._out_of_frames = False
        self._left: deque[tuple[Batch, list[int]]] = deque()
        """Entries of batches that are not begun yet."""
        self._dirty_max = max(1, int(context.settings.dirty_fraction * context.window.layout.frames))

    @property
    def idle(self) -> bool:
        return not self._incoming and not self._left

    @property
    def incoming(self) -> int:
        """Slots held by values on their way in."""
        return len(self._incoming)

    # ---------------------------------------------------------------- request

    def start(self, batch: Batch) -> None:
        self._begin_event()
        context = self._context
        rows = batch.rows
        context.stats.add(StatId.STORES, len(rows))
        slots = find(context, batch)
        slot_bytes = context.catalogue.geometry.slot_bytes
        batch.memory = [[]] * len(rows)
        started: list[Incoming] = []
        absent: list[int] = []
        handles = batch.connection.session.handles
        for entry in batch.open_entries():
            row = rows[entry]
            length = row[LENGTH]
            if not 0 < length <= slot_bytes:
                batch.resolve(entry, Status.TOO_LARGE if length else Status.BAD_LENGTH)
                continue
            pieces = memory_list.pieces_of(batch.capsule, row, length)
            if isinstance(pieces, Status):
                batch.resolve(entry, pieces)
            elif slots[entry] >= 0:
                self._exists(batch, entry, slots[entry])
            else:
                batch.memory[entry] = pieces
                absent.append(entry)
        # Last: a slot for one of these may be had by evicting a block that an entry above named.
        for entry in absent[:BEGUN_MAX]:
            row = rows[entry]
            self._begin(batch, entry, (handles[row[NAMESPACE]], row[KEY_LO], row[KEY_HI]), started)
        if len(absent) > BEGUN_MAX:
            self._left.append((batch, absent[BEGUN_MAX:]))
        self._read(batch, started)
        batch.close_if_done()

    @property
    def behind(self) -> bool:
        """There are stores to `go_on` with."""
        return bool(self._left)

    def go_on(self) -> None:
        """Begin some more of a large batch; of several, each in its turn. What has become of its keys meanwhile is
        looked up again."""
        batch, entries = self._left.popleft()
        if batch.closed:
            return
        self._begin_event()
        if len(entries) > BEGUN_MAX:
            self._left.append((batch, entries[BEGUN_MAX:]))
        rows = [batch.rows[entry] for entry in entries[:BEGUN_MAX]]
        handles = batch.connection.session.handles
        started: list[Incoming] = []
        for entry, row, slot in zip(entries, rows, self._context.catalogue.find_each(rows, handles)):
            if slot >= 0:
                self._exists(batch, entry, slot)
            else:
                self._begin(batch, entry, (handles[row[NAMESPACE]], row[KEY_LO], row[KEY_HI]), started)
        self._read(batch, started)
        batch.close_if_done()

    def _begin_event(self) -> None:
        """What is found out while one event is handled holds for the rest of it."""
        self._used.clear()
        self._out_of_frames = False
        self._context.catalogue.begin_batch()

    def _exists(self, batch: Batch, entry: int, slot: int) -> None:
        context = self._context
        context.stats.add(StatId.STORE_EXISTS)
        context.catalogue.count_use([slot])
        record = context.catalogue.unflushed.get(slot)
        if batch.until_flash and record is not None:
            record.waiters.append(lambda ok: self._on_flash(batch, entry, Status.EXISTS, ok))
        else:
            batch.resolve(entry, Status.EXISTS, context.catalogue.state_of(slot), self._length(batch, entry))

    def _begin(self, batch: Batch, entry: int, key: Key, started: list[Incoming]) -> None:
        """Give the value a slot and a frame, or answer why not."""
        first = self._incoming.get(key)
        if first is not None:
            first.joined.append((batch, entry))
            return
        row = batch.rows[entry]
        length = row[LENGTH]
        namespace, key_lo, key_hi = key
        context = self._context
        fingerprint = context.catalogue.index.fingerprint(key_lo, key_hi, namespace)
        tenant = batch.connection.session.tenant
        limit_bytes = context.quota.limit_bytes(tenant)
        refusal = self._refusal(tenant, limit_bytes, key, fingerprint, length)
        if refusal is not None:
            self._refuse(batch, entry, refusal)
            return
        # First a frame: a slot may cost another block its place.
        frame = -1 if self._out_of_frames else context.window.take(-1, FrameState.FILLING)
        if frame < 0:
            self._out_of_frames = True
            self._refuse(batch, entry, Status.BUSY)
            return
        slot = context.catalogue.allocate()
        if slot < 0:
            context.window.drop(frame)
            self._refuse(
                batch, entry, Status.BUSY if context.catalogue.in_motion or self._incoming else Status.NO_SPACE
            )
            return
        context.window.slot[frame] = slot
        ttl_s = row[TTL_S] or context.settings.ttl_default_s
        incoming = Incoming(batch, entry, key, fingerprint, length, ttl_s, slot, frame)
        self._incoming[key] = incoming
        if limit_bytes:
            incoming.reserves = True
            self._reserved[tenant] = self._reserved.get(tenant, 0) + length
        started.append(incoming)

    def _refusal(self, tenant: str, limit_bytes: int, key: Key, fingerprint: int, length: int) -> Status | None:
        context = self._context
        if context.draining:
            return Status.DRAINING
        if context.window.unsettled >= self._dirty_max:
            return Status.BUSY
        if context.catalogue.lingers(key[1], key[2], key[0]):
            return Status.BUSY
        if limit_bytes and self._used_bytes(tenant) + self._reserved.get(tenant, 0) + length > limit_bytes:
            return Status.QUOTA_EXCEEDED
        if not context.admission.admit(fingerprint, context.clock.monotonic_ns() // NS_PER_S):
            context.stats.add(StatId.NOT_ADMITTED)
            return Status.NOT_ADMITTED
        return None

    def _used_bytes(self, tenant: str) -> int:
        """What the tenant's blocks take; summed up once for all entries of a capsule."""
        if tenant not in self._used:
            self._used[tenant] = self._context.tenant_bytes(tenant)
        return self._used[tenant]

    def _refuse(self, batch: Batch, entry: int, status: Status) -> None:
        self._context.stats.add(StatId.STORE_REFUSED)
        batch.resolve(entry, status)

    @staticmethod
    def _length(batch: Batch, entry: int) -> int:
        return int(batch.rows[entry][LENGTH])

    # ---------------------------------------------------------------- client memory -> frames

    def _read(self, batch: Batch, started: list[Incoming]) -> None:
        """RDMA READs for `started`, in transfers of a bounded number of work requests."""
        group: list[Incoming] = []
        requests = bytearray()
        moved = 0
        lkey = batch.connection.window_lkey
        for incoming in started:
            pieces = batch.memory[incoming.entry]
            if requests and (
                moved + incoming.length > TRANSFER_MOVED_MAX
                or len(requests) + len(pieces) * RDMA_REQUEST.size > TRANSFER_BYTES_MAX
            ):
                self._post(batch, requests, group)
                requests, group, moved = bytearray(), [], 0
            moved += incoming.length
            address = self._context.window.address(incoming.frame)
            for remote, length, rkey in pieces:
                requests += RDMA_REQUEST.pack(address, remote, length, lkey, rkey, 0)
                address += length
            group.append(incoming)
        if requests:
            self._post(batch, requests, group)

    def _post(self, batch: Batch, requests: bytearray, group: list[Incoming]) -> None:
        batch.connection.add(Transfer(batch, Opcode.RDMA_READ, requests, lambda ok: self._arrived(group, ok)))
        self._context.ready.add(batch.connection.connection_id)

    def _arrived(self, group: list[Incoming], ok: bool) -> None:
        self._begin_event()
        stored_bytes = 0
        for incoming in group:
            if not ok or incoming.batch.closed:
                self._fail(incoming, Status.TRANSFER_ERROR)
            elif self._commit(incoming):
                stored_bytes += incoming.length
        self._context.stats.add(StatId.STORE_BYTES, stored_bytes)

    def _commit(self, incoming: Incoming) -> bool:
        """The value is in its frame: make it a block. False where it is not what the agent said it would be."""
        context = self._context
        batch, entry, length, frame = incoming.batch, incoming.entry, incoming.length, incoming.frame
        row = batch.rows[entry]
        checksum = _xxh3(context.window.bytes_of(frame, length))
        if row[FLAGS] & _HAS_CHECKSUM and checksum != row[CHECKSUM]:
            self._fail(incoming, Status.CHECKSUM)
            return False
        context.window.fill(frame)
        record = context.catalogue.insert(
            incoming.slot, incoming.key, incoming.fingerprint, length, checksum, incoming.ttl_s, frame
        )
        self._release(incoming)
        self._flush(record, length)
        if batch.until_flash:
            record.waiters.append(lambda done: self._on_flash(batch, entry, Status.OK, done, checksum))
        else:
            batch.resolve(entry, Status.OK, BlockState.STAGED, length, checksum)
        for other, other_entry in incoming.joined:
            if not other.closed:
                self._exists(other, other_entry, incoming.slot)
        return True

    def _on_flash(self, batch: Batch, entry: int, status: Status, ok: bool, checksum: int = 0) -> None:
        if ok:
            batch.resolve(entry, status, BlockState.STAGED_AND_FLASH, self._length(batch, entry), checksum)
        else:
            batch.resolve(entry, Status.FLASH_ERROR)

    def _release(self, incoming: Incoming) -> None:
        del self._incoming[incoming.key]
        if not incoming.reserves:
            return
        tenant = incoming.batch.connection.session.tenant
        self._reserved[tenant] -= incoming.length
        if self._reserved[tenant] == 0:
            del self._reserved[tenant]

    def _fail(self, incoming: Incoming, status: Status) -> None:
        """Nothing of it stays; whoever joined takes its own turn, from its own memory."""
        context = self._context
        self._release(incoming)
        context.window.drop(incoming.frame)
        context.catalogue.give_back(incoming.slot)
        if status is Status.TRANSFER_ERROR:
            context.stats.add(StatId.TRANSFER_ERRORS)
        incoming.batch.resolve(incoming.entry, status)
        for batch, entry in incoming.joined:
            if not batch.closed:
                started: list[Incoming] = []
                self._begin(batch, entry, incoming.key, started)
                self._read(batch, started)

    # ---------------------------------------------------------------- frames -> flash

    def _flush(self, record: Unflushed, length: int) -> None:
        context = self._context
        aligned = aligned_length(length)
        context.window.zero_tail(record.frame, length, aligned)
        context.queue.add(
            FlashJob(
                FlashOp.WRITE,
                Priority.DATA,
                context.catalogue.geometry.slot_offset(record.slot),
                context.window.address(record.frame),
                aligned,
                lambda error: self._data_written(record, aligned, error),
            )
        )

    def _data_written(self, record: Unflushed, aligned: int, error: int) -> None:
        context = self._context
        if not error:
            context.stats.add(StatId.FLASH_WRITE_BYTES, aligned)
        if record.abandoned is not None:
            context.catalogue.cleared(record)
        elif error:
            context.stats.add(StatId.FLASH_ERRORS)
            self._lose(record)
        else:
            record.entry_due = True
            context.catalogue.table.mark(record.slot, lambda error: self._entry_written(record, error))

    def _entry_written(self, record: Unflushed, error: int) -> None:
        context = self._context
        if record.abandoned is not None:
            context.catalogue.cleared(record)
        elif error:
            self._lose(record)
        else:
            context.catalogue.flushed(record)

    def _lose(self, record: Unflushed) -> None:
        """Flash would not take the block: it is a miss from now on, and those who wait are told."""
        self._context.catalogue.forget(record.slot)
        self._context.catalogue.cleared(record)
