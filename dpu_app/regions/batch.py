"""One request capsule on its way: per-entry results, how many are still open, and its deadline.

An entry is resolved once; when the last one is, or at the deadline, the batch is answered once and closed. What
is still under way for a closed batch must not touch the requester's memory any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.status import BlockState, Status
from common.wire import RESPONSE_LAYOUT, Capsule, Flags, Op, encode
from dpu_app.regions.memory_list import Piece

if TYPE_CHECKING:
    from dpu_app.regions.load_path import Load
    from dpu_app.regions.sessions import Connection

OPEN = 255


class Batch:
    def __init__(
        self, connection: Connection, capsule: Capsule, deadline_ns: int, answer: Callable[[Batch, bytes], None]
    ) -> None:
        count = len(capsule.entries)
        self.connection = connection
        self.capsule = capsule
        self.deadline_ns = deadline_ns
        self.closed = False
        self.remaining = count
        self.loads: set[Load] = set()
        self.results = np.zeros(count, RESPONSE_LAYOUT[capsule.op])
        self.status: npt.NDArray[np.uint8] = self.results["status"]
        self.status[:] = OPEN
        self.aux = 0
        self._answer = answer
        self.memory: list[list[Piece]] = []
        """Per entry the client memory it names; for operations that move data."""

    @property
    def op(self) -> Op:
        return self.capsule.op

    @property
    def until_flash(self) -> bool:
        return bool(self.capsule.flags & Flags.UNTIL_FLASH)

    def open_entries(self) -> list[int]:
        return np.flatnonzero(self.status == OPEN).tolist()  # type: ignore[no-any-return]

    def resolve(
        self, entry: int, status: Status, state: BlockState = BlockState.ABSENT, length: int = 0, checksum: int = 0
    ) -> None:
        """Answer one entry; the first answer stands."""
        if self.closed or self.status[entry] != OPEN:
            return
        self.status[entry] = status
        if length or state:
            row = self.results[entry]
            row["state"] = state
            row["length"] = length
            row["checksum"] = checksum
        self.remaining -= 1
        if self.remaining == 0:
            self.close()

    def resolve_many(
        self,
        entries: list[int],
        status: Status,
        states: npt.NDArray[np.uint8],
        lengths: list[int],
        checksums: list[int],
    ) -> None:
        """`resolve` for several entries, all of which are open."""
        if self.closed:
            return
        results = self.results
        results["state"][entries] = states
        results["length"][entries] = lengths
        results["checksum"][entries] = checksums
        self.status[entries] = status
        self.remaining -= len(entries)
        self.close_if_done()

    def resolve_where(self, mask: npt.NDArray[np.bool_], status: Status) -> None:
        """Answer the open entries of `mask` alike. The caller closes the batch when nothing remains."""
        chosen = mask & (self.status == OPEN)
        self.status[chosen] = status
        self.remaining -= int(np.count_nonzero(chosen))

    def close_if_done(self) -> None:
        if self.remaining == 0 and not self.closed:
            self.close()

    def close(self, rest: Status = Status.OK) -> None:
        """Answer; entries still open get `rest`."""
        if self.closed:
            return
        if self.remaining:
            self.status[self.status == OPEN] = rest
            self.remaining = 0
        self.closed = True
        self._answer(self, self.encode())

    def abandon(self) -> None:
        """The requester is gone: no answer."""
        self.closed = True

    def encode(self) -> bytes:
        capsule = self.capsule
        return encode(capsule.op, capsule.request_id, self.results, flags=Flags.RESPONSE, aux=self.aux)


class Deadlines:
    """Open batches by deadline. Closed ones are dropped as they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Batch]] = []
        self._sequence = 0

    def add(self, batch: Batch) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (batch.deadline_ns, self._sequence, batch))

    def next_ns(self) -> int | None:
        heap = self._heap
        while heap and heap[0][2].closed:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def expired(self, now_ns: int) -> list[Batch]:
        out = []
        while (deadline := self.next_ns()) is not None and deadline <= now_ns:
            out.append(heapq.heappop(self._heap)[2])
        return out
