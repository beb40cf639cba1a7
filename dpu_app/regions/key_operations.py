"""LOOKUP, TOUCH, PIN, UNPIN, DELETE and LIST: operations on keys that move no block.

All but DELETE are answered at once. DELETE is answered when no entry on flash names the block, neither its own nor
that of a slot it left earlier, so that a deleted block does not come back after a crash.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from common.status import Status
from common.wire import LIST_RESULT, Capsule, Flags, Op, StatId, encode
from dpu_app.regions.batch import Batch
from dpu_app.regions.catalogue import NS_PER_S, Slots
from dpu_app.regions.context import Context
from dpu_app.regions.presence import find, find_slots
from dpu_app.regions.sessions import Session

LIST_MAX = 512
PIN_DEFAULT_S = 300
"""A pin always ends by itself: what is never unpinned would be lost to eviction for good."""
_ARGUMENT = 3


class KeyOperations:
    def __init__(self, context: Context) -> None:
        self._context = context

    def lookup(self, batch: Batch) -> None:
        context = self._context
        slots, found = self._find(batch)
        present = slots[found]
        batch.results["state"] = context.catalogue.states_of(slots)
        batch.results["length"][found] = context.catalogue.index.length[present]
        count = len(slots)
        batch.aux = count if len(present) == count else int(np.argmin(found))
        context.stats.add(StatId.LOOKUPS, count)
        context.stats.add(StatId.LOOKUP_HITS, len(present))

    def touch(self, batch: Batch) -> None:
        slots, found = self._find(batch)
        if found.any():
            self._context.catalogue.count_use(slots[found])

    def pin(self, batch: Batch) -> None:
        slots, found = self._find(batch)
        for entry in np.flatnonzero(found).tolist():
            ttl_s = batch.rows[entry][_ARGUMENT] or PIN_DEFAULT_S
            if not self._context.catalogue.pin(int(slots[entry]), ttl_s):
                batch.results["status"][entry] = Status.NO_SPACE

    def unpin(self, batch: Batch) -> None:
        slots, found = self._find(batch)
        for slot in slots[found].tolist():
            self._context.catalogue.unpin(slot)

    def _find(self, batch: Batch) -> tuple[Slots, npt.NDArray[np.bool_]]:
        """Slots of the batch's keys and which are present; every entry is answered OK, MISS or DENIED."""
        slots = np.asarray(find_slots(self._context, batch), np.int64)
        found = slots >= 0
        if batch.remaining == len(slots):
            batch.resolve_vector(np.where(found, np.uint8(Status.OK), np.uint8(Status.MISS)))
        else:
            for entry in batch.open_entries():
                batch.resolve_all([entry], Status.OK if found[entry] else Status.MISS)
        return slots, found

    def delete(self, batch: Batch) -> None:
        context = self._context
        slots = find(context, batch)
        gone: set[int] = set()
        deletion = _Deletion(batch)
        for entry in batch.open_entries():
            slot = slots[entry]
            if slot < 0 or slot in gone:
                deletion.cleared(entry, Status.MISS)
            elif context.catalogue.leased_or_moving(slot):
                batch.resolve(entry, Status.IN_USE)
            else:
                gone.add(slot)
                context.stats.add(StatId.DELETES)
                context.catalogue.forget(slot, partial(deletion.written, entry))
        context.catalogue.table.settle(deletion.settled)

    def list_blocks(self, session: Session, request: Capsule) -> bytes:
        """A page of the blocks in the namespaces that this session has opened."""
        if len(request.entries) != 1:
            return self._refused(request, Status.BAD_REQUEST)
        cursor, handle, limit = request.entries[0].tolist()
        if request.flags & Flags.ALL_NAMESPACES:
            namespaces = set(session.handles.values()) - {-1}
        elif session.handles.get(handle, -1) >= 0:
            namespaces = {session.handles[handle]}
        else:
            return self._refused(request, Status.DENIED)
        context = self._context
        index = context.catalogue.index
        slots, following = index.scan(cursor, max(1, min(limit or LIST_MAX, LIST_MAX)), namespaces)
        results = np.zeros(len(slots), LIST_RESULT)
        handle_of = session.handle_of()
        now_s = context.clock.wall_ns() // NS_PER_S
        results["key_lo"] = index.key_lo[slots]
        results["key_hi"] = index.key_hi[slots]
        results["namespace"] = [handle_of[namespace] for namespace in index.namespace[slots].tolist()]
        results["length"] = index.length[slots]
        results["state"] = context.catalogue.states_of(slots)
        results["pinned"] = [slot in context.catalogue.pins for slot in slots.tolist()]
        results["age_s"] = np.maximum(now_s - index.stored_s[slots].astype(np.int64), 0)
        expires = index.expires_s[slots].astype(np.int64)
        results["ttl_s"] = np.where(expires == 0, 0, np.maximum(expires - now_s, 1))
        return encode(Op.LIST, request.request_id, results, flags=Flags.RESPONSE, aux=following)

    @staticmethod
    def _refused(request: Capsule, status: Status) -> bytes:
        results = np.zeros(0, LIST_RESULT)
        return encode(Op.LIST, request.request_id, results, flags=Flags.RESPONSE, status=status)


class _Deletion:
    """The entries of one DELETE, answered when their own slots are cleared and the slot table is settled."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._held: list[tuple[int, Status]] | None = []
        """Cleared entries that wait for the table; None once it is settled."""
        self._failed = False

    def written(self, entry: int, error: int) -> None:
        self.cleared(entry, Status.FLASH_ERROR if error else Status.OK)

    def cleared(self, entry: int, status: Status) -> None:
        if self._held is not None:
            self._held.append((entry, status))
        else:
            self._batch.resolve(entry, Status.FLASH_ERROR if self._failed else status)

    def settled(self, error: int) -> None:
        held, self._held, self._failed = self._held or [], None, error != 0
        for entry, status in held:
            self.cleared(entry, status)
