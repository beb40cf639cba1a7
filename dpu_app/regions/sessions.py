"""What the region engine knows of its peers: sessions, their namespaces, and their connections' send queues.

A session outlives its connections; a connection's posted work is grouped into transfers, each answered by one
signalled completion; what the hot path posts has none of its own, but that of the response behind it. Owned and driven
by the region engine.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from doca_shims.api import RDMA_REQUEST, Opcode

if TYPE_CHECKING:
    from dpu_app.regions.batch import Batch

TRANSFER_MOVED_MAX = 4 << 20
"""A transfer moves no more bytes than this, but for a single block: its checksums are computed in one go."""
IN_FLIGHT_MOVED_MAX = 16 << 20
"""Nor has a connection more posted and not complete, but for a single transfer: where the fabric copies at once, as the
emulated one does, others are served in between, after two milliseconds; and a NIC's queue holds as much per agent."""
TRANSFER_WRS_MAX = 256
"""A transfer never has more work requests than this, so that it always fits a send queue."""
TRANSFER_BYTES_MAX = TRANSFER_WRS_MAX * RDMA_REQUEST.size
_LENGTH_WORD = 4
"""Of 32 bits, in an `RDMA_REQUEST`."""


class Session:
    """One agent, as one tenant. `handles` maps its namespace handles to ids of the region's index."""

    def __init__(self, session_id: int, tenant: str) -> None:
        self.session_id = session_id
        self.tenant = tenant
        self.handles: dict[int, int] = {}
        self.connection: Connection | None = None
        self.table = array("q", [-1])
        """Handle -> index namespace id, -1 where none is open: `handles` for whole batches."""

    def add_namespace(self, handle: int, namespace_id: int) -> None:
        self.handles[handle] = namespace_id
        missing = handle + 1 - len(self.table)
        if missing > 0:
            self.table = self.table + array("q", [-1]) * max(missing, len(self.table))
        self.table[handle] = namespace_id

    def namespace_ids(self, handles: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Index namespace ids of a batch's handles; -1 for a handle this session has not opened."""
        table = np.frombuffer(self.table, np.int64)
        wide = handles.astype(np.int64)
        inside = wide < len(table)
        if inside.all():
            return table[wide]
        return np.where(inside, table[np.where(inside, wide, 0)], -1)

    def handle_of(self) -> Mapping[int, int]:
        """Index namespace id -> handle."""
        return {namespace_id: handle for handle, namespace_id in self.handles.items()}


def moved_by(requests: bytes | bytearray) -> int:
    """Bytes that packed `RDMA_REQUEST`s move."""
    if len(requests) == RDMA_REQUEST.size:
        length: int = RDMA_REQUEST.unpack(requests)[2]
        return length
    return int(np.frombuffer(requests, np.uint32)[_LENGTH_WORD :: RDMA_REQUEST.size // 4].sum(dtype=np.int64))


class Transfer:
    """READs or WRITEs of one batch, packed `RDMA_REQUEST`s, that go out together and complete together. `posted` is
    called when they are on their way, `done` with True when they are through, or with False when they never will be
    (never posted, or flushed)."""

    __slots__ = ("batch", "done", "moved", "opcode", "posted", "requests", "wrs")

    def __init__(
        self,
        batch: Batch,
        opcode: Opcode,
        requests: bytes | bytearray,
        done: Callable[[bool], None],
        posted: Callable[[], None] | None = None,
    ) -> None:
        self.batch = batch
        self.opcode = opcode
        self.requests = requests
        self.wrs = len(requests) // RDMA_REQUEST.size
        self.moved = moved_by(requests)
        self.done = done
        self.posted = posted


class Connection:
    """A connection's send queue as the engine accounts for it: at most `send_wrs_max` work requests posted."""

    def __init__(
        self,
        connection_id: int,
        session: Session,
        window_lkey: int,
        send_wrs_max: int,
        unhold: Callable[[bytes], None],
    ) -> None:
        """`unhold`: for the frames that the hot path held."""
        self.connection_id = connection_id
        self.session = session
        self.window_lkey = window_lkey
        self.batches: dict[int, Batch] = {}
        """Open batches by request id."""
        self.leases: set[int] = set()
        self._send_wrs_max = send_wrs_max
        self._posted_wrs = 0
        self._posted_moved = 0
        self._waiting: deque[Transfer] = deque()
        self._in_flight: OrderedDict[int, Transfer] = OrderedDict()
        self._next_id = 0
        self._answers = 0
        self._sent = 0
        self._followed: deque[tuple[int, int, int, bytes]] = deque()
        """What the hot path posted: number of the answer behind it, work requests, bytes moved, frames held."""
        self._unhold = unhold

    @property
    def waiting(self) -> bool:
        """Transfers wait for room in the send queue."""
        return bool(self._waiting)

    @property
    def room(self) -> int:
        """Work requests that may be posted now, ahead of nobody."""
        return 0 if self._waiting else self._send_wrs_max - self._posted_wrs

    @property
    def room_moved(self) -> int:
        """Bytes that they may move."""
        return max(0, IN_FLIGHT_MOVED_MAX - self._posted_moved)

    def answered(self) -> None:
        """Another response goes to the driver."""
        self._answers += 1

    def follow(self, wrs: int, moved: int, frames: bytes) -> None:
        """So many unsignalled WRITEs are posted, of `moved` bytes from `frames`; the next response goes right behind
        them."""
        self._posted_wrs += wrs
        self._posted_moved += moved
        self._followed.append((self._answers + 1, wrs, moved, frames))

    def sent(self, count: int) -> bool:
        """The SENDs of `count` more responses are complete, so what was posted before them is, too. Whether that
        freed anything."""
        self._sent += count
        followed = self._followed
        freed = False
        while followed and followed[0][0] <= self._sent:
            _, wrs, moved, frames = followed.popleft()
            self._posted_wrs -= wrs
            self._posted_moved -= moved
            self._unhold(frames)
            freed = True
        return freed

    def add(self, transfer: Transfer) -> None:
        self._waiting.append(transfer)

    def pump(self) -> list[tuple[int, Transfer]]:
        """The transfers to post now, each with the number that it completes by. One whose batch was answered meanwhile
        is not posted: its memory may be in other use."""
        out: list[tuple[int, Transfer]] = []
        waiting = self._waiting
        while waiting and self._fits(waiting[0]):
            transfer = waiting.popleft()
            if transfer.batch.closed:
                transfer.done(False)
                continue
            self._posted_wrs += transfer.wrs
            self._posted_moved += transfer.moved
            self._next_id += 1
            self._in_flight[self._next_id] = transfer
            out.append((self._next_id, transfer))
            if transfer.posted is not None:
                transfer.posted()
        return out

    def _fits(self, transfer: Transfer) -> bool:
        if self._posted_wrs + transfer.wrs > self._send_wrs_max:
            return False
        return not self._posted_moved or self._posted_moved + transfer.moved <= IN_FLIGHT_MOVED_MAX

    def complete(self, wr_id: int) -> None:
        """A signalled completion: that transfer is through."""
        transfer = self._in_flight.pop(wr_id, None)
        if transfer is not None:
            self._posted_wrs -= transfer.wrs
            self._posted_moved -= transfer.moved
            transfer.done(True)

    def abort(self) -> None:
        """The connection is closed: nothing of this touches memory any more."""
        for transfer in [*self._in_flight.values(), *self._waiting]:
            transfer.done(False)
        for *_, frames in self._followed:
            self._unhold(frames)
        self._in_flight.clear()
        self._waiting.clear()
        self._followed.clear()
        self._posted_wrs = 0
        self._posted_moved = 0
