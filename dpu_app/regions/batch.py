"""One request capsule on its way: per-entry results, how many are still open, and its deadline.

An entry is resolved once; when the last one is, or at the deadline, the batch is answered once and closed. What
is still under way for a closed batch must not touch the requester's memory any more.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.status import BlockState, Status
from common.wire import RESPONSE_LAYOUT, Capsule, Flags, encode
from dpu_app.regions.memory_list import Piece, Row

if TYPE_CHECKING:
    from dpu_app.regions.load_path import Load
    from dpu_app.regions.sessions import Connection

OPEN = 255
EXPIRED_MAX = 16
"""Batches that end at their deadline in one turn: agents whose flash has failed may wait with hundreds of them."""
_KEPT_MIN = 256
"""So few batches, closed or not, are not worth looking through."""
_UNTIL_FLASH = int(Flags.UNTIL_FLASH)
_RESULT = struct.Struct("<BBHIQ")
_TEMPLATES = {
    layout: bytes([OPEN]).ljust(layout.itemsize, b"\0")
    for layout in set(RESPONSE_LAYOUT.values())
    if layout.names and layout.names[0] == "status"
}
"""One unanswered entry of each response layout."""


class Batch:
    def __init__(
        self, connection: Connection, capsule: Capsule, deadline_ns: int, answer: Callable[[Batch, bytes], None]
    ) -> None:
        count = len(capsule.entries)
        layout = RESPONSE_LAYOUT[capsule.op]
        self.connection = connection
        self.capsule = capsule
        self.op = capsule.op
        self.until_flash = bool(capsule.flags & _UNTIL_FLASH)
        self.deadline_ns = deadline_ns
        self.closed = False
        self.remaining = count
        self.loads: dict[Load, None] = {}  # a set would be left in the order of addresses: not repeatable
        self.aux = 0
        self.memory: list[list[Piece]] = []
        """Per entry the client memory it names; for operations that move data."""
        self._answer = answer
        self._size = layout.itemsize
        self._buffer = bytearray(_TEMPLATES[layout] * count)
        self.results = np.frombuffer(self._buffer, layout)
        """The response's entries, writable; a `status` of OPEN is not answered yet."""

    @cached_property
    def rows(self) -> list[Row]:
        """The request's entries as Python tuples, for what handles them one by one."""
        return self.capsule.entries.tolist()  # type: ignore[no-any-return]

    def open_entries(self) -> list[int]:
        statuses = self._buffer[:: self._size]
        return [entry for entry, status in enumerate(statuses) if status == OPEN]

    def resolve(
        self, entry: int, status: Status, state: int = BlockState.ABSENT, length: int = 0, checksum: int = 0
    ) -> None:
        """Answer one entry, and the whole request with the last; the first answer stands."""
        if self.closed or self._buffer[entry * self._size] != OPEN:
            return
        if self._size == _RESULT.size:
            _RESULT.pack_into(self._buffer, entry * _RESULT.size, status, state, 0, length, checksum)
        else:
            row = self.results[entry]
            row["status"] = status
            row["state"] = state
            row["length"] = length
            row["checksum"] = checksum
        self.remaining -= 1
        if self.remaining == 0:
            self.close()

    def resolve_all(self, entries: list[int], status: Status) -> None:
        """Answer open entries alike. The caller closes the batch when nothing remains."""
        size = self._size
        for entry in entries:
            self._buffer[entry * size] = status
        self.remaining -= len(entries)

    def resolve_vector(self, statuses: npt.NDArray[np.uint8]) -> None:
        """Answer every entry of a batch of which none is answered."""
        self.results["status"] = statuses
        self.remaining = 0

    def close_if_done(self) -> None:
        if self.remaining == 0 and not self.closed:
            self.close()

    def close(self, rest: Status = Status.OK) -> None:
        """Answer; entries still open get `rest`."""
        if self.closed:
            return
        self.resolve_all(self.open_entries() if self.remaining else [], rest)
        self.closed = True
        self._answer(self, self.encode())
        self._forget()

    def abandon(self) -> None:
        """The requester is gone: no answer."""
        self.closed = True
        self._forget()

    def _forget(self) -> None:
        """Objects by entry, which are most of a batch: `Deadlines` and what is still under way may keep it for long."""
        self.__dict__.pop("rows", None)
        self.memory = []

    def encode(self) -> bytes:
        return encode(self.op, self.capsule.request_id, self.results, flags=Flags.RESPONSE, aux=self.aux)


class Deadlines:
    """Open batches by deadline. Closed ones are dropped as they surface, or when half of what is kept is closed: one
    that stays open for long would otherwise keep all that came and went behind it."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Batch]] = []
        self._sequence = 0
        self._clear_at = _KEPT_MIN

    def add(self, batch: Batch) -> None:
        if len(self._heap) >= self._clear_at:
            self._heap = [item for item in self._heap if not item[2].closed]
            heapq.heapify(self._heap)
            self._clear_at = max(_KEPT_MIN, 2 * len(self._heap))
        self._sequence += 1
        heapq.heappush(self._heap, (batch.deadline_ns, self._sequence, batch))

    def next_ns(self) -> int | None:
        heap = self._heap
        while heap and heap[0][2].closed:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def expired(self, now_ns: int) -> list[Batch]:
        """At most EXPIRED_MAX of them; the rest is due still."""
        out: list[Batch] = []
        while len(out) < EXPIRED_MAX and (deadline := self.next_ns()) is not None and deadline <= now_ns:
            out.append(heapq.heappop(self._heap)[2])
        return out
