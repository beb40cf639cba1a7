"""What the region engine knows of its peers: sessions, their namespaces, and their connections' send queues.

A session outlives its connections; a connection's posted work is grouped into transfers, each answered by one
signalled completion. Owned and driven by the region engine.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from doca_shims.api import SendFlags, SendRequest

if TYPE_CHECKING:
    from dpu_app.regions.batch import Batch

TRANSFER_WRS_MAX = 256
"""A transfer never has more work requests than this, so that it always fits a send queue."""


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


class Transfer:
    """Work requests of one batch that go out together; all carry `transfer_id`, and the last alone is signalled.
    `posted` is called when they are on their way, `done` with True when they are through, or with False when they
    never will be (never posted, or flushed)."""

    __slots__ = ("batch", "done", "posted", "requests", "transfer_id")

    def __init__(
        self,
        transfer_id: int,
        batch: Batch,
        requests: list[SendRequest],
        done: Callable[[bool], None],
        posted: Callable[[], None] | None = None,
    ) -> None:
        self.transfer_id = transfer_id
        self.batch = batch
        self.requests = requests
        self.done = done
        self.posted = posted


class Connection:
    """A connection's send queue as the engine accounts for it: at most `send_wrs_max` work requests posted."""

    def __init__(self, connection_id: int, session: Session, window_lkey: int, send_wrs_max: int) -> None:
        self.connection_id = connection_id
        self.session = session
        self.window_lkey = window_lkey
        self.batches: dict[int, Batch] = {}
        """Open batches by request id."""
        self.leases: set[int] = set()
        self._send_wrs_max = send_wrs_max
        self._posted_wrs = 0
        self._waiting: deque[Transfer] = deque()
        self._in_flight: OrderedDict[int, Transfer] = OrderedDict()
        self._next_id = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._in_flight)

    def new_transfer_id(self) -> int:
        """For the work requests of the next transfer."""
        self._next_id += 1
        return self._next_id

    def add(self, transfer: Transfer) -> None:
        self._waiting.append(transfer)

    def pump(self) -> list[SendRequest]:
        """The work requests to post now. A transfer whose batch was answered meanwhile is not posted: its
        memory may be in other use."""
        out: list[SendRequest] = []
        waiting = self._waiting
        while waiting and self._posted_wrs + len(waiting[0].requests) <= self._send_wrs_max:
            transfer = waiting.popleft()
            if transfer.batch.closed:
                transfer.done(False)
                continue
            requests = transfer.requests
            self._posted_wrs += len(requests)
            self._in_flight[transfer.transfer_id] = transfer
            out += requests
            out[-1] = requests[-1]._replace(flags=SendFlags.SIGNALED)
            if transfer.posted is not None:
                transfer.posted()
        return out

    def complete(self, wr_id: int) -> None:
        """A signalled completion: that transfer is through."""
        transfer = self._in_flight.pop(wr_id, None)
        if transfer is not None:
            self._posted_wrs -= len(transfer.requests)
            transfer.done(True)

    def abort(self) -> None:
        """The connection is closed: nothing of this touches memory any more."""
        for transfer in [*self._in_flight.values(), *self._waiting]:
            transfer.done(False)
        self._in_flight.clear()
        self._waiting.clear()
        self._posted_wrs = 0
