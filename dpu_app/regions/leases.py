"""LEASE and RELEASE: time-limited grants of a staged block's frame for a client's own one-sided READs.

Each lease is its own registration, so its rkey reaches that frame and nothing else, and revoking it ends the
peer's access whatever the peer does. A lease ends by RELEASE, by its time, or with its session's connection.
"""

from __future__ import annotations

import heapq

from common.status import Status
from dpu_app.regions.batch import Batch
from dpu_app.regions.context import Context, LeasePort
from dpu_app.regions.flash_queue import Priority
from dpu_app.regions.load_path import LoadPath
from dpu_app.regions.presence import find_slots
from dpu_app.regions.sessions import Connection

NS_PER_MS = 1_000_000
EXPIRED_MAX = 64
"""Leases that end by their time in one turn, each in some ten microseconds: all of one agent may end together."""


class Lease:
    __slots__ = ("connection", "frame", "generation", "lease_id", "rkey")

    def __init__(self, lease_id: int, connection: Connection, frame: int, generation: int, rkey: int) -> None:
        self.lease_id = lease_id
        self.connection = connection
        self.frame = frame
        self.generation = generation
        self.rkey = rkey


class Leases:
    def __init__(self, context: Context, load_path: LoadPath, port: LeasePort) -> None:
        self._context = context
        self._load_path = load_path
        self._port = port
        self._leases: dict[int, Lease] = {}
        self._expiry: list[tuple[int, int]] = []
        self._next_id = 0
        self._leases_of: dict[int, int] = {}
        """Leased frame -> how many leases are on it."""
        self._frames_max = max(1, int(context.settings.leases_fraction * context.window.layout.frames))

    def __len__(self) -> int:
        return len(self._leases)

    def start(self, batch: Batch) -> None:
        """LEASE: stage what is not staged, then grant."""
        slots = self._load_path.use(batch, find_slots(self._context, batch))
        self._load_path.stage(batch, slots, Priority.DEMAND, self._grant)

    def _grant(self, batch: Batch, entry: int, frame: int) -> None:
        context = self._context
        settings = context.settings
        slot = context.window.slot[frame]
        length = context.catalogue.index.length_of[slot]
        wanted_ms = batch.rows[entry][3] or settings.lease_default_ms
        duration_ms = min(wanted_ms, settings.lease_max_ms)
        connection = batch.connection
        if frame not in self._leases_of and len(self._leases_of) >= self._frames_max:
            batch.resolve(entry, Status.BUSY)
            return
        try:
            rkey = self._port.grant(connection.connection_id, context.window.address(frame), length)
        except OSError:
            batch.resolve(entry, Status.BUSY)
            return
        context.window.hold(frame)
        self._leases_of[frame] = self._leases_of.get(frame, 0) + 1
        self._next_id += 1
        lease = Lease(self._next_id, connection, frame, context.window.generation[frame], rkey)
        self._leases[lease.lease_id] = lease
        connection.leases.add(lease.lease_id)
        heapq.heappush(self._expiry, (context.clock.monotonic_ns() + duration_ms * NS_PER_MS, lease.lease_id))
        row = batch.results[entry]
        row["address"] = context.window.address(frame)
        row["rkey"] = rkey
        row["generation"] = lease.generation
        row["lease_id"] = lease.lease_id
        row["duration_ms"] = duration_ms
        checksum = context.catalogue.index.checksum_of[slot]
        batch.resolve(entry, Status.OK, context.catalogue.state_of(slot), length, checksum)

    def release(self, batch: Batch) -> None:
        """RELEASE: a lease that is gone already, or another's, is a MISS."""
        for entry, row in enumerate(batch.rows):
            lease = self._leases.get(row[0])
            if lease is None or lease.connection is not batch.connection or lease.generation != row[1]:
                batch.resolve(entry, Status.MISS)
            else:
                self._end(lease)
                batch.resolve(entry, Status.OK)
        batch.close_if_done()

    def disconnected(self, connection: Connection) -> None:
        for lease_id in list(connection.leases):
            self._end(self._leases[lease_id])

    def next_ns(self) -> int | None:
        while self._expiry and self._expiry[0][1] not in self._leases:
            heapq.heappop(self._expiry)
        return self._expiry[0][0] if self._expiry else None

    def expire(self, now_ns: int) -> None:
        """End those whose time is over, at most EXPIRED_MAX; the rest is due still."""
        for _ in range(EXPIRED_MAX):
            expiry = self.next_ns()
            if expiry is None or expiry > now_ns:
                return
            self._end(self._leases[heapq.heappop(self._expiry)[1]])

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        lease.connection.leases.discard(lease.lease_id)
        self._port.revoke(lease.connection.connection_id, lease.rkey)
        self._context.window.unhold(lease.frame)
        self._leases_of[lease.frame] -= 1
        if not self._leases_of[lease.frame]:
            del self._leases_of[lease.frame]
