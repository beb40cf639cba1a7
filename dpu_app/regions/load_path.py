"""RETRIEVE and PREFETCH: flash -> frame, checked, -> client memory (RDMA WRITE); and LEASE's staging.

A block that is staged already is written out at once; the answer follows its WRITEs on the same connection, so
it arrives after them. A block that is wanted twice is read from flash once. What flash gives back wrong, short or
not at all is a miss that frees the slot. A load nobody waits for any more is withdrawn if it has not started.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import xxhash

from common.status import BlockState, Status
from common.wire import EntryFlags, Flags, Op, StatId
from doca_shims.api import RDMA_REQUEST, FlashOp, Opcode
from dpu_app.regions import memory_list, staged_batches
from dpu_app.regions.batch import Batch
from dpu_app.regions.catalogue import Slots
from dpu_app.regions.context import Context
from dpu_app.regions.flash_queue import FlashJob, Priority
from dpu_app.regions.memory_list import FLAGS, LENGTH, OFFSET
from dpu_app.regions.presence import find_slots
from dpu_app.regions.sessions import TRANSFER_BYTES_MAX, TRANSFER_MOVED_MAX, Transfer
from dpu_app.regions.window import FrameState, aligned_length

Staged = Callable[[Batch, int, int], None]
"""Called with (batch, entry, frame) when the entry's block is whole in that frame."""


_TO_HOST = int(Flags.TO_HOST)
_WANT_CHECKSUM = int(EntryFlags.WANT_CHECKSUM)


class Load:
    """One block on its way from flash into a frame, and who waits for it. `job` is None while it waits for a
    frame."""

    __slots__ = ("frame", "job", "length", "priority", "slot", "waiters")

    def __init__(self, slot: int, length: int, priority: Priority) -> None:
        self.slot = slot
        self.length = length
        self.priority = priority
        self.frame = -1
        self.job: FlashJob | None = None
        self.waiters: list[tuple[Batch, int, Staged]] = []


class LoadPath:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._loads: dict[int, Load] = {}
        self._frameless: dict[Priority, OrderedDict[Load, None]] = {
            priority: OrderedDict() for priority in (Priority.DEMAND, Priority.PREFETCH)
        }
        """First come, first served; any one can be taken out at once."""
        self._deliveries: dict[Batch, list[tuple[int, int]]] = {}  # batch -> (entry, frame), to be posted together

    @property
    def loads(self) -> int:
        """Blocks on their way from flash, or waiting for a frame."""
        return len(self._loads)

    @property
    def starved(self) -> bool:
        """Loads wait for frames."""
        return any(self._frameless.values())

    # ---------------------------------------------------------------- request

    def start(self, batch: Batch) -> None:
        """RETRIEVE and PREFETCH."""
        prefetch = batch.op is Op.PREFETCH
        found = find_slots(self._context, batch)
        if not prefetch and not isinstance(found, list) and staged_batches.deliver(self._context, batch, found):
            return
        self._context.stats.add(StatId.PREFETCHES if prefetch else StatId.RETRIEVES, len(batch.rows))
        slots = self.use(batch, found)
        priority = Priority.PREFETCH if prefetch else Priority.DEMAND
        if prefetch and not batch.capsule.flags & _TO_HOST:
            self.stage(batch, slots, priority, self._staged_on_dpu)
        else:
            self._place(batch, slots)
            self.stage(batch, slots, priority, self._deliver)

    def use(self, batch: Batch, found: list[int] | Slots) -> list[int]:
        """Count the blocks found as used and answer MISS for the others, whose slot is -1."""
        context = self._context
        slots = found if isinstance(found, list) else found.tolist()
        if min(slots, default=0) < 0:
            missing = [entry for entry in batch.open_entries() if slots[entry] < 0]
            context.stats.add(StatId.RETRIEVE_MISSES, len(missing))
            batch.resolve_all(missing, Status.MISS)
        context.catalogue.count_use([slot for slot in slots if slot >= 0])
        return slots

    def stage(self, batch: Batch, slots: Sequence[int], priority: Priority, staged: Staged) -> None:
        """See to it that the block of every open entry is in a frame, and call `staged` for each. Closes the batch
        if none is open."""
        window = self._context.window
        frame_of = window.frame_of
        cold = []
        entries = batch.open_entries()
        for entry in entries:
            frame = frame_of.get(slots[entry], -1)
            if frame < 0:
                cold.append(entry)
            else:
                window.touch(frame)
                staged(batch, entry, frame)
        if batch.op is Op.RETRIEVE:
            self._context.stats.add(StatId.RETRIEVE_COLD, len(cold))
            self._context.stats.add(StatId.RETRIEVE_STAGED, len(entries) - len(cold))
        for entry in cold:
            self._load(batch, entry, slots[entry], priority, staged)
        self.post_deliveries()
        batch.close_if_done()

    # ---------------------------------------------------------------- flash -> frame

    def _load(self, batch: Batch, entry: int, slot: int, priority: Priority, staged: Staged) -> None:
        load = self._loads.get(slot)
        if load is None:
            length = self._context.catalogue.index.length_of[slot]
            load = Load(slot, length, priority)
            self._loads[slot] = load
            self._context.catalogue.loading.add(slot)
            self._frameless[priority][load] = None
        elif priority < load.priority:
            if load.job is None:
                del self._frameless[load.priority][load]
                self._frameless[priority][load] = None
            else:
                self._context.queue.promote(load.job)
            load.priority = priority
        load.waiters.append((batch, entry, staged))
        batch.loads[load] = None

    def pump(self) -> None:
        """Start loads for which there are frames; demand before prefetch."""
        for priority in (Priority.DEMAND, Priority.PREFETCH):
            waiting = self._frameless[priority]
            while waiting:
                load = next(iter(waiting))
                load.frame = self._context.window.take(load.slot, FrameState.LOADING)
                if load.frame < 0:
                    return
                del waiting[load]
                self._read(load)

    def _read(self, load: Load) -> None:
        context = self._context
        load.job = FlashJob(
            FlashOp.READ,
            load.priority,
            context.catalogue.geometry.slot_offset(load.slot),
            context.window.address(load.frame),
            aligned_length(load.length),
            lambda error: self._loaded(load, error),
        )
        context.queue.add(load.job)

    def _loaded(self, load: Load, error: int) -> None:
        context = self._context
        self._end(load)
        if error:
            context.stats.add(StatId.FLASH_ERRORS)
            self._lost(load)
            return
        context.stats.add(StatId.FLASH_READ_BYTES, aligned_length(load.length))
        checksum = xxhash.xxh3_64_intdigest(context.window.bytes_of(load.frame, load.length))
        if checksum != context.catalogue.index.checksum_of[load.slot]:
            context.stats.add(StatId.CHECKSUM_MISMATCHES)
            self._lost(load)
            return
        context.window.settle(load.frame)
        for batch, entry, staged in load.waiters:
            batch.loads.pop(load, None)
            if not batch.closed:
                staged(batch, entry, load.frame)

    def _lost(self, load: Load) -> None:
        """Never wrong bytes: the block is a miss and its slot free."""
        context = self._context
        context.window.drop(load.frame)
        context.catalogue.forget(load.slot, lambda _: None)
        for batch, entry, _ in load.waiters:
            batch.loads.pop(load, None)
            context.stats.add(StatId.RETRIEVE_MISSES)
            batch.resolve(entry, Status.MISS)

    def _end(self, load: Load) -> None:
        del self._loads[load.slot]
        self._context.catalogue.loading.discard(load.slot)

    def leave(self, batch: Batch) -> None:
        """A batch was answered or is gone: what only it waited for is withdrawn."""
        for load in batch.loads:
            load.waiters = [waiter for waiter in load.waiters if waiter[0] is not batch]
            if load.waiters:
                continue
            if load.job is None:
                del self._frameless[load.priority][load]
                self._end(load)
            elif self._context.queue.withdraw(load.job):
                self._end(load)
                self._context.window.drop(load.frame)
        batch.loads.clear()

    def started(self, batch: Batch) -> set[int]:
        """Entries whose block flash is reading already, so that a late prefetch still ends up staged."""
        reading = [load for load in batch.loads if load.job is not None and load.job.in_flight]
        return {entry for load in reading for waiter, entry, _ in load.waiters if waiter is batch}

    # ---------------------------------------------------------------- frame -> client memory

    def _place(self, batch: Batch, slots: Sequence[int]) -> None:
        """Work out where each open entry's bytes go; answers those that do not fit or overlap others."""
        lengths = self._context.catalogue.index.length_of
        batch.memory = [[]] * len(batch.rows)
        placed = []
        for entry in batch.open_entries():
            row = batch.rows[entry]
            length = lengths[slots[entry]]
            offset = row[OFFSET]
            count = row[LENGTH] or length - offset
            if count <= 0 or offset + count > length:
                batch.resolve(entry, Status.BAD_RANGE, length=length)
                continue
            pieces = memory_list.pieces_of(batch.capsule, row, count)
            if isinstance(pieces, Status):
                batch.resolve(entry, pieces, length=length)
            else:
                batch.memory[entry] = pieces
                placed.append(entry)
        for entry in memory_list.overlapping(batch.memory, placed):
            batch.resolve(entry, Status.OVERLAP)

    def _deliver(self, batch: Batch, entry: int, frame: int) -> None:
        self._context.window.hold(frame)
        self._deliveries.setdefault(batch, []).append((entry, frame))

    def _staged_on_dpu(self, batch: Batch, entry: int, frame: int) -> None:
        slot = self._context.window.slot[frame]
        batch.resolve(entry, Status.OK, self._context.catalogue.state_of(slot))

    def post_deliveries(self) -> None:
        """Post the WRITEs of what became staged, each batch's together."""
        if not self._deliveries:
            return
        deliveries, self._deliveries = self._deliveries, {}
        for batch, blocks in deliveries.items():
            self._write(batch, blocks)

    def _write(self, batch: Batch, blocks: list[tuple[int, int]]) -> None:
        if batch.closed:
            self._written(batch, blocks, ok=False)
            return
        window = self._context.window
        connection = batch.connection
        lkey = connection.window_lkey
        requests = bytearray()
        group: list[tuple[int, int]] = []
        moved = 0
        for block in blocks:
            entry, frame = block
            pieces = batch.memory[entry]
            count = sum([length for _, length, _ in pieces])
            if requests and (
                moved + count > TRANSFER_MOVED_MAX
                or len(requests) + len(pieces) * RDMA_REQUEST.size > TRANSFER_BYTES_MAX
            ):
                self._post(batch, requests, group)
                requests, group, moved = bytearray(), [], 0
            moved += count
            address = window.address(frame) + batch.rows[entry][OFFSET]
            for remote, length, rkey in pieces:
                requests += RDMA_REQUEST.pack(address, remote, length, lkey, rkey, 0)
                address += length
            group.append(block)
        self._post(batch, requests, group)

    def _post(self, batch: Batch, requests: bytearray, group: list[tuple[int, int]]) -> None:
        transfer = Transfer(
            batch,
            Opcode.RDMA_WRITE,
            requests,
            done=lambda ok: self._written(batch, group, ok),
            posted=lambda: self._answer(batch, group),
        )
        batch.connection.add(transfer)
        self._context.ready.add(batch.connection.connection_id)

    def _answer(self, batch: Batch, group: list[tuple[int, int]]) -> None:
        """The WRITEs are posted and the answer will follow them in order."""
        context = self._context
        index, window = context.catalogue.index, context.window
        lengths, checksums, slots = index.length_of, index.checksum_of, window.slot
        memory, rows = batch.memory, batch.rows
        moved = 0
        for entry, frame in group:
            slot = slots[frame]  # -1: forgotten meanwhile, the frame still holds it
            pieces = memory[entry]
            count = pieces[0][1] if len(pieces) == 1 else sum([piece[1] for piece in pieces])
            moved += count
            state = window.block_state(slot) if slot >= 0 else BlockState.ABSENT
            if slot >= 0 and count == lengths[slot]:
                checksum = checksums[slot]
            elif slot < 0 or rows[entry][FLAGS] & _WANT_CHECKSUM:
                checksum = xxhash.xxh3_64_intdigest(window.bytes_of(frame, count, rows[entry][OFFSET]))
            else:
                checksum = 0
            batch.resolve(entry, Status.OK, state, count, checksum)
        context.stats.add(StatId.RETRIEVE_BYTES, moved)

    def _written(self, batch: Batch, group: list[tuple[int, int]], ok: bool) -> None:
        for _, frame in group:
            self._context.window.unhold(frame)
        if not ok and not batch.closed:
            self._context.stats.add(StatId.TRANSFER_ERRORS)
