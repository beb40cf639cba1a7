"""Which blocks a region holds, and the life of its slots: find, allocate (evicting), insert, forget, discard.

Brings the index, the eviction policy, pins, TTLs and the slot table together; knows nothing of peers. A slot is
free, or belongs to exactly one of: a block of the index, a store under way, a discard under way.
Owned by the region engine; the store and load paths call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from common.status import BlockState
from common.wire import Entries, StatId
from doca_shims.api import Clock, FlashCaps, FlashOp
from dpu_app.regions.eviction import Scan
from dpu_app.regions.flash_queue import FlashJob, FlashQueue, Priority
from dpu_app.regions.index import USED
from dpu_app.regions.memory_list import KEY_HI, KEY_LO, NAMESPACE, Row
from dpu_app.regions.pins import Pins
from dpu_app.regions.recovery import OpenRegion
from dpu_app.regions.slot_table import encode_page
from dpu_app.regions.stamps import Stamps
from dpu_app.regions.stats import Stats
from dpu_app.regions.superblock import ENTRIES_PER_PAGE
from dpu_app.regions.table_writer import TableWriter, Waiter
from dpu_app.regions.window import Window

Slots = npt.NDArray[np.int64]

DISCARD_BATCH = 64
FEW_USES = 16
"""Up to so many are counted one by one: numpy's fixed cost is about theirs."""
SWEEP_SLOTS = 1 << 18
"""Slots looked at for expiry per tick, in a tenth or two of a millisecond."""
EXPIRE_MAX = 128
"""Expired blocks cleared away per tick, each in some ten microseconds: nobody sees them, so they can wait."""
ORDER_STEP = 4096
"""Slots that leave the eviction order in one call of `order_restored`, in two milliseconds."""
NS_PER_S = 1_000_000_000


class Unflushed:
    """A block that is whole in its frame but not durably on flash yet. `abandoned` holds who waits for it to be
    cleared away instead."""

    __slots__ = ("abandoned", "entry_due", "frame", "slot", "waiters")

    def __init__(self, slot: int, frame: int) -> None:
        self.slot = slot
        self.frame = frame
        self.entry_due = False  # the data is on flash, the entry on its way
        self.abandoned: list[Waiter] | None = None
        self.waiters: list[Callable[[bool], None]] = []


class Catalogue:
    def __init__(
        self,
        region: OpenRegion,
        window: Window,
        queue: FlashQueue,
        caps: FlashCaps,
        stats: Stats,
        clock: Clock,
        pins_max: int,
    ) -> None:
        self.index = region.index
        self._policy = region.policy
        self.ordered = region.restore_order is None
        """False while the eviction order of a large region is being restored: nothing is allocated then."""
        self._left_unordered: list[int] = []
        self.geometry = region.superblock.geometry
        self.generation = region.superblock.generation
        self.unflushed: dict[int, Unflushed] = {}
        self.loading: set[int] = set()
        self.pins = Pins(pins_max, clock.monotonic_ns())
        self.table = TableWriter(self.geometry, window, queue, stats, self._encode_page)
        self._salt = region.superblock.salt
        for page in region.dirty_pages:
            self.table.mark_stale(page * ENTRIES_PER_PAGE)
        self._window = window
        self._queue = queue
        self._discard = caps.discard
        self._stats = stats
        self._clock = clock
        self._stamps = Stamps()
        self._scan = Scan()
        self._discards: list[int] = []
        self._discarding = 0
        self._clearing = 0
        self._abandoned = 0
        """Of `unflushed`."""
        self._has_ttl = bool(self.index.expires_s.any())
        self._sweep_at = 0

    # ---------------------------------------------------------------- looking

    def find_each(self, rows: Sequence[Row], handles: Mapping[int, int]) -> list[int]:
        """`find` for a few entries, where one look-up after the other beats numpy's fixed cost."""
        slots = []
        for row in rows:
            namespace = handles.get(row[NAMESPACE], -1)
            slot = self.index.find_one(row[KEY_LO], row[KEY_HI], namespace) if namespace >= 0 else -1
            if slot >= 0 and self._has_ttl and len(self._expired_of(np.array([slot]))):
                self._expire(slot)
                slot = -1
            slots.append(slot)
        return slots

    def find(self, entries: Entries, namespaces: Slots) -> Slots:
        """Slots of a batch of keys, -1 where absent or expired."""
        slots = self.index.find(entries["key_lo"], entries["key_hi"], namespaces)
        if self._has_ttl:
            for slot in np.unique(self._expired_of(slots[slots >= 0])).tolist():  # a batch may name it twice
                self._expire(slot)
                slots[slots == slot] = -1
        return slots

    def without_expired(self, slots: list[int]) -> list[int]:
        """`slots` of a look-up, with -1 for those whose blocks have expired."""
        if not self._has_ttl:
            return slots
        found = np.array(slots, np.int64)
        gone = set(self._expired_of(found[found >= 0]).tolist())
        for slot in sorted(gone):
            self._expire(slot)
        return [-1 if slot in gone else slot for slot in slots]

    def lingers(self, key_lo: int, key_hi: int, namespace: int) -> bool:
        """A block of this key has expired, so `find` does not see it, but something still reads it."""
        return self._has_ttl and self.index.find_one(key_lo, key_hi, namespace) >= 0

    def state_of(self, slot: int) -> BlockState:
        return BlockState(self._window.block_state(slot))

    def states_of(self, slots: Slots) -> npt.NDArray[np.uint8]:
        """BlockState of each slot; ABSENT for -1."""
        states = self._window.block_states(slots.tolist())
        states[slots < 0] = BlockState.ABSENT
        return states

    def leased_or_moving(self, slot: int) -> bool:
        """Something references the block's frame, or flash is filling it."""
        frame = self._window.frame_of.get(slot, -1)
        return slot in self.loading or (frame >= 0 and self._window.references[frame] > 0)

    def blocked(self, slot: int) -> bool:
        """May not be evicted now."""
        return slot in self.unflushed or self.leased_or_moving(slot) or self._pinned(slot)

    @property
    def in_motion(self) -> bool:
        """Slots may become evictable by themselves: flushes, loads, or recovery are under way."""
        return bool(self.unflushed or self.loading) or not self.ordered

    # ---------------------------------------------------------------- slots

    def count_use(self, slots: Sequence[int] | Slots) -> None:
        """For eviction. While the order of a large region is being restored, uses are not counted."""
        if not self.ordered:
            return
        if len(slots) > FEW_USES:
            self._policy.on_hit(np.asarray(slots))
        else:
            for slot in slots:
                self._policy.on_hit_one(int(slot))

    @property
    def hit_counters(self) -> tuple[memoryview, bytes] | None:
        """`EvictionPolicy.hit_counters`, to be written while `ordered`."""
        return self._policy.hit_counters

    def count_one(self, slot: int) -> None:
        """`count_use` of one slot, while `ordered`."""
        self._policy.on_hit_one(slot)

    def order_restored(self) -> None:
        """`OpenRegion.restore_order` is through. What has left meanwhile leaves the order now: a part at a time, call
        after call, until `ordered`."""
        left = self._left_unordered
        for _ in range(min(ORDER_STEP, len(left))):
            self._policy.on_remove(left.pop())
        self.ordered = not left

    def begin_batch(self) -> None:
        """The calls of `allocate` from here on are those of one turn: their search for victims is bounded together."""
        self._scan.refill()

    def allocate(self) -> int:
        """A slot for a new block, evicting one if need be; -1 when every block is blocked, or not `ordered`."""
        if not self.ordered:
            return -1
        slot = self.index.allocate()
        if slot >= 0:
            return slot
        if self._discards:
            return self._discards.pop()
        victim = self._policy.victim(self.blocked, self._scan)
        if victim < 0:
            return -1
        self._stats.add(StatId.EVICTIONS)
        self._leave(victim)
        self.table.mark_stale(victim)
        return victim

    def give_back(self, slot: int) -> None:
        """A slot from `allocate` that no block took."""
        self._retire(slot)

    def insert(
        self,
        slot: int,
        key: tuple[int, int, int],
        fingerprint: int,
        length: int,
        checksum: int,
        ttl_s: int,
        frame: int,
    ) -> Unflushed:
        """The block is whole in `frame`: make it visible. `key`: namespace id, key_lo, key_hi; `fingerprint` is the
        index's of it. Returns the record by which its flush is followed."""
        namespace, key_lo, key_hi = key
        now_s = self._clock.wall_ns() // NS_PER_S
        expires_s = 0
        if ttl_s:
            self._has_ttl = True
            expires_s = min(now_s + ttl_s, 0xFFFFFFFF)
        stored_s = self._stamps.next(now_s, (key_lo, key_hi, namespace))
        self.index.insert(slot, key_lo, key_hi, namespace, length, checksum, self.generation, stored_s, expires_s)
        self._policy.on_insert(slot, fingerprint)
        record = Unflushed(slot, frame)
        self.unflushed[slot] = record
        return record

    def forget(self, slot: int, waiter: Waiter | None = None) -> None:
        """Drop a block: invisible at once. With a `waiter`, its entry on flash is cleared and the waiter called
        with the outcome; without, the entry stays behind as a claim that verification or reuse disposes of.
        The slot is reused when nothing is under way on it."""
        self._leave(slot)
        record = self.unflushed.get(slot)
        if record is not None:
            record.abandoned = [] if waiter is None else [waiter]
            self._abandoned += 1
            for flush_waiter in record.waiters:
                flush_waiter(False)
            record.waiters.clear()
        else:
            self._clear(slot, [] if waiter is None else [waiter])

    def flushed(self, record: Unflushed) -> None:
        """Data and entry are on flash."""
        del self.unflushed[record.slot]
        self._window.settle(record.frame)
        for waiter in record.waiters:
            waiter(True)
        record.waiters.clear()

    def cleared(self, record: Unflushed) -> None:
        """An abandoned block's I/O is through: its frame and slot are free again."""
        del self.unflushed[record.slot]
        self._abandoned -= 1
        self._window.drop(record.frame)
        waiters = record.abandoned or []
        if record.entry_due:
            self._clear(record.slot, waiters)
        else:
            self._retire(record.slot)
            for waiter in waiters:
                waiter(0)

    def _leave(self, slot: int) -> None:
        """Out of the index, the policy and the pins; and out of a clean frame."""
        if slot == self._scan.at:
            self._scan.at = -1
        if self.ordered:
            self._policy.on_remove(slot)
        else:
            self._left_unordered.append(slot)
        index = self.index
        key = int(index.key_lo[slot]), int(index.key_hi[slot]), int(index.namespace[slot])
        self._stamps.left(key, int(index.stored_s[slot]))
        index.remove(slot)
        self.pins.unpin(slot)
        frame = self._window.frame_of.get(slot, -1)
        if frame >= 0 and slot not in self.unflushed:
            self._window.drop(frame)

    def _clear(self, slot: int, waiters: list[Waiter]) -> None:
        if not waiters:
            self.table.mark_stale(slot)
            self._retire(slot)
            return

        def written(error: int) -> None:
            self._clearing -= 1
            self._retire(slot)
            for waiter in waiters:
                waiter(error)

        self._clearing += 1
        self.table.mark(slot, written)

    def _retire(self, slot: int) -> None:
        if self._discard:
            self._discards.append(slot)
        else:
            self.index.release(slot)

    def _encode_page(self, page: int) -> bytes:
        """The page as it belongs on flash now: without the blocks whose data is not there yet."""
        first = page * ENTRIES_PER_PAGE
        hidden = [
            slot
            for slot in range(first, first + ENTRIES_PER_PAGE)
            if slot in self.unflushed and not self.unflushed[slot].entry_due
        ]
        encoded = encode_page(self.index, page, self._salt)
        if not hidden:
            return encoded
        out = bytearray(encoded)
        size = len(out) // ENTRIES_PER_PAGE
        for slot in hidden:
            out[(slot - first) * size : (slot - first + 1) * size] = bytes(size)
        return bytes(out)

    # ---------------------------------------------------------------- discard

    @property
    def slots_in_transit(self) -> int:
        """Slots that are neither free in the index nor hold one of its blocks: forgotten while they were being
        flushed, having their entry cleared, or being discarded."""
        return self._abandoned + self._clearing + len(self._discards) + self._discarding

    def start_discards(self, everything: bool = False) -> None:
        """Hand freed slots to the device in batches of neighbours; they are free again afterwards."""
        if not self._discards or (len(self._discards) < DISCARD_BATCH and not everything):
            return
        slots = sorted(self._discards)
        self._discards = []
        start = 0
        for i in range(1, len(slots) + 1):
            if i == len(slots) or slots[i] != slots[i - 1] + 1:
                self._discard_run(slots[start:i])
                start = i

    def _discard_run(self, run: list[int]) -> None:
        length = len(run) * self.geometry.slot_bytes
        self._discarding += len(run)

        def done(error: int) -> None:
            self._discarding -= len(run)
            if not error:
                self._stats.add(StatId.DISCARDED_BYTES, length)
            for slot in run:
                self.index.release(slot)

        offset = self.geometry.slot_offset(run[0])
        self._queue.add(FlashJob(FlashOp.DISCARD, Priority.DISCARD, offset, 0, length, done))

    # ---------------------------------------------------------------- pins and expiry

    def pin(self, slot: int, ttl_s: int) -> bool:
        """False when as many blocks are pinned as may be."""
        return self.pins.pin(slot, self._clock.monotonic_ns(), ttl_s)

    def unpin(self, slot: int) -> None:
        self.pins.unpin(slot)

    def _pinned(self, slot: int) -> bool:
        return slot in self.pins and self.pins.holds(slot, self._clock.monotonic_ns())

    def _expired_of(self, slots: Slots) -> Slots:
        expires = self.index.expires_s[slots]
        now_s = self._clock.wall_ns() // NS_PER_S
        expired: Slots = slots[(expires != 0) & (expires <= now_s)]
        return expired

    def _expire(self, slot: int) -> None:
        """An expired block is invisible at once; it stays in place while something still reads it."""
        if not self.leased_or_moving(slot):
            self._stats.add(StatId.EXPIRED)
            self.forget(slot)

    def tick(self) -> None:
        """Housekeeping, bounded: expired pins, a stretch of expired blocks, leftover discards."""
        if self.pins:
            self.pins.expire(self._clock.monotonic_ns())
        if self._has_ttl:
            self._sweep()
        self.start_discards(everything=True)

    def _sweep(self) -> None:
        """Clear away what has expired in the next stretch of slots."""
        start = self._sweep_at
        stop = min(start + SWEEP_SLOTS, self.geometry.slots)
        expires = self.index.expires_s[start:stop]
        expired = expires != 0
        expired &= expires <= self._clock.wall_ns() // NS_PER_S
        expired &= self.index.flags[start:stop] == USED
        slots = np.flatnonzero(expired)
        if len(slots) > EXPIRE_MAX:
            stop = start + int(slots[EXPIRE_MAX])
        for slot in slots[:EXPIRE_MAX].tolist():
            self._expire(start + slot)
        self._sweep_at = 0 if stop == self.geometry.slots else stop
