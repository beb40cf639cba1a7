"""The region engine: a state machine that is handed requests, completions and the time, and returns work.

Sans-IO: it opens no file and no connection; its driver (the region worker, or a simulation) carries out what it
leaves in `outbox` and reports back. It never blocks, never raises for what a peer sent, and answers every request
once, at the latest at its deadline. One owner, one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from common.status import Status
from common.wire import (
    REQUEST_LAYOUT,
    RESPONSE_LAYOUT,
    STAT_RESULT,
    Capsule,
    Flags,
    Op,
    ReadableBuffer,
    StatId,
    WireError,
    decode_request,
    encode,
)
from doca_shims.api import Clock, Completion, FlashCaps, FlashCompletion, Opcode, SendFlags, WcStatus
from dpu_app.regions import hot_path
from dpu_app.regions.admission import AdmissionFilter
from dpu_app.regions.batch import Batch, Deadlines
from dpu_app.regions.catalogue import Catalogue
from dpu_app.regions.context import Context, EngineSettings, LeasePort, Outbox, Posting
from dpu_app.regions.flash_queue import FlashQueue
from dpu_app.regions.key_operations import KeyOperations
from dpu_app.regions.leases import Leases
from dpu_app.regions.load_path import LoadPath
from dpu_app.regions.namespace_use import NamespaceUse
from dpu_app.regions.quota import QuotaPolicy
from dpu_app.regions.recovery import OpenRegion
from dpu_app.regions.sessions import Connection, Session
from dpu_app.regions.stats import Stats
from dpu_app.regions.store_path import StorePath
from dpu_app.regions.window import Window

NS_PER_MS = 1_000_000
TICK_NS = 100 * NS_PER_MS
_WRITE = Opcode.RDMA_WRITE
# Plain numbers, since `IntFlag` arithmetic costs a microsecond, and backends do some.
_SIGNALED = cast(SendFlags, int(SendFlags.SIGNALED))
_UNSIGNALLED = cast(SendFlags, int(SendFlags.NONE))


class RegionEngine:
    """`region` as recovery left it, `window` on memory that flash and fabric know, `caps` of the flash device."""

    def __init__(
        self,
        settings: EngineSettings,
        region: OpenRegion,
        window: Window,
        caps: FlashCaps,
        clock: Clock,
        lease_port: LeasePort,
        admission: AdmissionFilter,
        quota: QuotaPolicy,
    ) -> None:
        stats = Stats()
        queue = FlashQueue(caps)
        pins_max = int(settings.pins_fraction * region.superblock.geometry.slots)
        catalogue = Catalogue(region, window, queue, caps, stats, clock, pins_max)
        self._namespaces = NamespaceUse(catalogue.index)
        self._context = Context(
            settings, clock, stats, window, queue, catalogue, admission, quota, tenant_bytes=self._namespaces.bytes_of
        )
        self._hot_path = self._context.hot_path = hot_path.create(catalogue, window, stats, clock)
        self._load_path = LoadPath(self._context)
        self._store_path = StorePath(self._context)
        self._leases = Leases(self._context, self._load_path, lease_port)
        self._keys = KeyOperations(self._context)
        self._sessions: dict[int, Session] = {}
        self._deadlines = Deadlines()
        self._ordering = False
        """The eviction order is restored, but for the blocks that have left meanwhile."""
        self._next_tick_ns = clock.monotonic_ns() + TICK_NS
        self.outbox = Outbox()
        stats.set(StatId.RECOVERED, region.recovered)
        stats.set(StatId.RECOVERY_DROPPED, region.dropped)
        self._start = {
            Op.STORE: self._store_path.start,
            Op.RETRIEVE: self._load_path.start,
            Op.PREFETCH: self._load_path.start,
            Op.LEASE: self._leases.start,
            Op.RELEASE: self._leases.release,
            Op.LOOKUP: self._keys.lookup,
            Op.TOUCH: self._keys.touch,
            Op.PIN: self._keys.pin,
            Op.UNPIN: self._keys.unpin,
            Op.DELETE: self._keys.delete,
            Op.CANCEL: self._cancel,
        }

    # ---------------------------------------------------------------- sessions and connections

    def open_session(self, session_id: int, tenant: str, namespaces: dict[int, bytes]) -> None:
        """`namespaces` maps the session's handles (>= 1) to 16-byte digests."""
        before = self._sessions.get(session_id)
        self._sessions[session_id] = Session(session_id, tenant)
        if before is not None:
            self._namespaces.close(np.fromiter(before.handles.values(), np.int64))
        for handle, digest in namespaces.items():
            self.add_namespace(session_id, handle, digest)

    def add_namespace(self, session_id: int, handle: int, digest: bytes) -> None:
        session = self._sessions[session_id]
        before = session.handles.get(handle, -1)
        session.add_namespace(handle, self._namespaces.open(session.tenant, digest))
        self._namespaces.close(np.array([before]))

    def close_session(self, session_id: int) -> None:
        """Everything it held is given back. The driver has closed its connection."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            if session.connection is not None:
                self.disconnected(session.connection.connection_id)
            self._namespaces.close(np.fromiter(session.handles.values(), np.int64))
        self.pump()

    def connected(self, session_id: int, connection_id: int, window_lkey: int) -> None:
        """A new connection of a session; it replaces an earlier one, which the driver has closed."""
        session = self._sessions[session_id]
        if session.connection is not None:
            self.disconnected(session.connection.connection_id)
        connection = Connection(
            connection_id,
            session,
            window_lkey,
            self._context.settings.send_wrs_max,
            self._context.window.unhold_packed,
        )
        session.connection = connection
        self._context.connections[connection_id] = connection

    def disconnected(self, connection_id: int) -> None:
        """The connection is closed: nothing posted on it can touch memory any more."""
        connection = self._context.connections.pop(connection_id, None)
        if connection is None:
            return
        self._context.ready.discard(connection_id)
        if connection.session.connection is connection:
            connection.session.connection = None
        batches = list(connection.batches.values())
        connection.batches.clear()
        for batch in batches:
            batch.abandon()
            self._load_path.leave(batch)
        connection.abort()
        self._leases.disconnected(connection)
        self.pump()

    # ---------------------------------------------------------------- input

    def receive(self, connection_id: int, capsule: ReadableBuffer) -> None:
        """A request capsule; the buffer is free when this returns."""
        connection = self._context.connections.get(connection_id)
        if connection is None or (self._hot_path is not None and self._serve(connection, capsule, self._hot_path)):
            return
        try:
            request = decode_request(bytes(capsule))
        except WireError as error:
            self._context.stats.add(StatId.BAD_CAPSULES)
            self._refuse(connection, error.op, error.request_id, error.status)
            return
        if request.op is Op.STAT:
            self._respond(connection, self._stat(request))
            return
        if request.op is Op.LIST:
            self._respond(connection, self._keys.list_blocks(connection.session, request))
            return
        if request.request_id in connection.batches:
            self._refuse(connection, request.op, request.request_id, Status.BAD_REQUEST)
            return
        settings = self._context.settings
        budget_us = min(request.deadline_us or settings.deadline_default_ms * 1000, settings.deadline_max_ms * 1000)
        batch = Batch(connection, request, self._context.clock.monotonic_ns() + budget_us * 1000, self._answered)
        connection.batches[request.request_id] = batch
        self._deadlines.add(batch)
        self._start[request.op](batch)
        batch.close_if_done()
        self.pump()

    def _serve(self, connection: Connection, capsule: ReadableBuffer, path: hot_path.HotPath) -> bool:
        """The plain case of LOOKUP and RETRIEVE, answered at once. False, and nothing is done, for anything else."""
        served = path.serve(capsule, connection)
        if served is None:
            return False
        response, requests, frames, moved = served
        if requests is not None and frames is not None and moved is not None:
            connection.follow(len(frames) // hot_path.FRAME_BYTES, moved, frames)
            self.outbox.fabric.append(Posting(connection.connection_id, 0, _WRITE, requests, _UNSIGNALLED, moved))
        self._respond(connection, response)
        return True

    def on_sent(self, connection_id: int, count: int) -> None:
        """The SENDs of `count` more of the connection's responses are complete; they complete in order."""
        connection = self._context.connections.get(connection_id)
        if connection is None:
            return
        freed = connection.sent(count)
        if (freed and (connection.waiting or self._load_path.starved)) or self._context.ready:
            self._context.ready.add(connection_id)
            self.pump()

    def on_fabric(self, connection_id: int, completions: Sequence[Completion]) -> None:
        """Completions of the work requests that `outbox.fabric` asked for."""
        connection = self._context.connections.get(connection_id)
        if connection is None:
            return
        for completion in completions:
            if completion.status is WcStatus.SUCCESS:
                connection.complete(completion.wr_id)
            else:
                self._context.stats.add(StatId.TRANSFER_ERRORS)
                self.outbox.broken.append(connection_id)
                break
        self._context.ready.add(connection_id)
        self.pump()

    def on_flash(self, completions: Sequence[FlashCompletion]) -> None:
        self._context.queue.complete(completions)
        self._load_path.post_deliveries()
        self.pump()

    def order_restored(self) -> None:
        """`OpenRegion.restore_order` is through: stores are taken from now on, or after a few ticks where many blocks
        have gone meanwhile."""
        catalogue = self._context.catalogue
        catalogue.order_restored()
        self._ordering = not catalogue.ordered

    def tick(self) -> None:
        """Time has passed: deadlines, leases, housekeeping."""
        now_ns = self._context.clock.monotonic_ns()
        if self._context.queue.behind:
            self.on_flash(())
        if self._store_path.behind:
            self._store_path.go_on()
        if self._ordering:
            self.order_restored()
        for batch in self._deadlines.expired(now_ns):
            self._expire(batch)
        self._leases.expire(now_ns)
        if now_ns >= self._next_tick_ns:
            self._next_tick_ns = now_ns + TICK_NS
            self._context.catalogue.tick()
        self.pump()

    def next_wakeup_ns(self) -> int:
        """Monotonic time at which `tick` is due."""
        behind = self._ordering or self._context.queue.behind or self._store_path.behind
        due_ns = 0 if behind else self._next_tick_ns
        deadline_ns = self._deadlines.next_ns()
        if deadline_ns is not None and deadline_ns < due_ns:
            due_ns = deadline_ns
        lease_ns = self._leases.next_ns()
        if lease_ns is not None and lease_ns < due_ns:
            due_ns = lease_ns
        return due_ns

    # ---------------------------------------------------------------- output

    def pump(self) -> None:
        """Move everything that can move into the outbox."""
        context = self._context
        context.catalogue.table.pump()
        self._load_path.pump()
        while context.ready and not self.outbox.full:
            connection = context.connections.get(context.ready.pop())
            if connection is not None:
                for wr_id, transfer in connection.pump():
                    post = (wr_id, transfer.opcode, transfer.requests, _SIGNALED, transfer.moved)
                    self.outbox.fabric.append(Posting(connection.connection_id, *post))
        self.outbox.flash.extend(context.queue.pump())

    def _answered(self, batch: Batch, response: bytes) -> None:
        batch.connection.batches.pop(batch.capsule.request_id, None)
        self._respond(batch.connection, response)
        self._load_path.leave(batch)

    def _respond(self, connection: Connection, response: bytes) -> None:
        connection.answered()
        self.outbox.responses.append((connection.connection_id, response))

    def _refuse(self, connection: Connection, op: int, request_id: int, status: Status) -> None:
        known = Op(op) if op in REQUEST_LAYOUT else Op.STAT
        empty = np.zeros(0, RESPONSE_LAYOUT[known])
        self._respond(connection, encode(known, request_id, empty, flags=Flags.RESPONSE, status=status))

    def _expire(self, batch: Batch) -> None:
        if batch.op is Op.PREFETCH:
            started = self._load_path.started(batch)
            for entry in batch.open_entries():
                batch.resolve(entry, Status.LATE if entry in started else Status.DROPPED)
        batch.close(Status.DEADLINE)

    def _cancel(self, batch: Batch) -> None:
        """CANCEL: the named requests of this connection are answered as they stand, the rest CANCELLED."""
        for entry, (request_id,) in enumerate(batch.rows):
            target = batch.connection.batches.get(request_id)
            if target is None or target is batch:
                batch.resolve(entry, Status.MISS)
            else:
                target.close(Status.CANCELLED)
                batch.resolve(entry, Status.OK)

    def _stat(self, request: Capsule) -> bytes:
        values = self.stats()
        results = np.zeros(len(values), STAT_RESULT)
        results["stat_id"] = list(values.keys())
        results["value"] = list(values.values())
        return encode(Op.STAT, request.request_id, results, flags=Flags.RESPONSE)

    # ---------------------------------------------------------------- state

    def stats(self) -> dict[StatId, int]:
        context = self._context
        window, catalogue = context.window, context.catalogue
        values = context.stats.snapshot()
        geometry = catalogue.geometry
        values.update(
            {
                StatId.SLOTS: geometry.slots,
                StatId.SLOTS_USED: catalogue.index.used,
                StatId.SLOTS_FREE: catalogue.index.free,
                StatId.SLOTS_IN_TRANSIT: self._store_path.incoming + catalogue.slots_in_transit,
                StatId.SLOT_BYTES: geometry.slot_bytes,
                StatId.USED_BYTES: int(catalogue.index.namespace_bytes.sum()),
                StatId.FRAMES: window.layout.frames,
                StatId.FRAMES_FREE: window.free,
                StatId.FRAMES_DIRTY: window.unsettled,
                StatId.FRAMES_BUSY: window.referenced(),
                StatId.LEASES: len(self._leases),
                StatId.PINS: len(catalogue.pins),
                StatId.SESSIONS: len(self._sessions),
                StatId.PENDING: sum(len(connection.batches) for connection in context.connections.values()),
                StatId.REGION_GENERATION: catalogue.generation,
                StatId.STALE_COMPLETIONS: context.queue.stale_completions,
            }
        )
        return values

    def slots_accounted(self) -> int:
        """Free, holding a block, on their way in, or being cleared: always all of them."""
        catalogue = self._context.catalogue
        return catalogue.index.free + catalogue.index.used + self._store_path.incoming + catalogue.slots_in_transit

    @property
    def blocks_under_way(self) -> int:
        """On their way in, to flash or from it."""
        return self._store_path.incoming + len(self._context.catalogue.unflushed) + self._load_path.loads

    def drain(self) -> None:
        """No new stores; everything staged goes to flash. Watch `drained`."""
        self._context.draining = True
        self._context.catalogue.table.write_stale()
        self.pump()

    @property
    def drained(self) -> bool:
        context = self._context
        return (
            self._store_path.idle
            and not context.catalogue.unflushed
            and context.catalogue.table.idle
            and context.queue.idle
        )
