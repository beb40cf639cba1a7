"""LOOKUP, TOUCH, PIN, UNPIN, DELETE and LIST: operations on keys that move no block.

All but DELETE are answered at once. DELETE is answered when the block's entry on flash is cleared, so that a
deleted block does not come back after a crash.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.status import Status
from common.wire import LIST_RESULT, Capsule, Flags, Op, StatId, encode
from dpu_app.regions.batch import Batch
from dpu_app.regions.catalogue import NS_PER_S, Slots
from dpu_app.regions.context import Context
from dpu_app.regions.sessions import Session

LIST_MAX = 512
PIN_DEFAULT_S = 300


class KeyOperations:
    def __init__(self, context: Context) -> None:
        self._context = context

    def lookup(self, batch: Batch) -> None:
        context = self._context
        slots, present = self._find(batch)
        found = batch.status == Status.OK
        batch.results["state"] = context.catalogue.states_of(slots)
        batch.results["length"][present] = context.catalogue.index.length[slots[present]]
        count = len(found)
        batch.aux = count if found.all() else int(np.argmin(found))
        context.stats.add(StatId.LOOKUPS, count)
        context.stats.add(StatId.LOOKUP_HITS, int(np.count_nonzero(found)))
        batch.close_if_done()

    def touch(self, batch: Batch) -> None:
        slots, present = self._find(batch)
        if present.any():
            self._context.catalogue.policy.on_hit(slots[present])
        batch.close_if_done()

    def pin(self, batch: Batch) -> None:
        slots, present = self._find(batch)
        for entry in np.flatnonzero(present).tolist():
            ttl_s = int(batch.capsule.entries["argument"][entry]) or PIN_DEFAULT_S
            if not self._context.catalogue.pin(int(slots[entry]), ttl_s):
                batch.status[entry] = Status.NO_SPACE
        batch.close_if_done()

    def unpin(self, batch: Batch) -> None:
        slots, present = self._find(batch)
        for slot in slots[present].tolist():
            self._context.catalogue.unpin(slot)
        batch.close_if_done()

    def _find(self, batch: Batch) -> tuple[Slots, npt.NDArray[np.bool_]]:
        """Slots of the batch's keys and which are present; every entry is answered OK, MISS or DENIED."""
        context = self._context
        entries = batch.capsule.entries
        namespaces = batch.connection.session.namespace_ids(entries["namespace"])
        slots = context.catalogue.find(entries["key_lo"], entries["key_hi"], namespaces)
        present = slots >= 0
        batch.status[:] = np.where(present, np.uint8(Status.OK), np.uint8(Status.MISS))
        denied = namespaces < 0
        if denied.any():
            context.stats.add(StatId.DENIED, int(np.count_nonzero(denied)))
            batch.status[denied] = Status.DENIED
        batch.remaining = 0
        return slots, present

    def delete(self, batch: Batch) -> None:
        context = self._context
        entries = batch.capsule.entries
        namespaces = batch.connection.session.namespace_ids(entries["namespace"])
        batch.resolve_where(namespaces < 0, Status.DENIED)
        slots = context.catalogue.find(entries["key_lo"], entries["key_hi"], namespaces).tolist()
        gone: set[int] = set()
        for entry in batch.open_entries():
            slot = slots[entry]
            if slot < 0 or slot in gone:
                batch.resolve(entry, Status.MISS)
            elif context.catalogue.leased_or_moving(slot):
                batch.resolve(entry, Status.IN_USE)
            else:
                gone.add(slot)
                context.stats.add(StatId.DELETES)
                context.catalogue.forget(slot, lambda error, entry=entry: self._deleted(batch, entry, error))  # type: ignore[misc]
        batch.close_if_done()

    @staticmethod
    def _deleted(batch: Batch, entry: int, error: int) -> None:
        batch.resolve(entry, Status.FLASH_ERROR if error else Status.OK)

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
