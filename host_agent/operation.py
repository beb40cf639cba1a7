"""One call's work in flight: an operation, cut into requests of one capsule each, and its answers as they come.

Whoever receives an answer settles its request; the last one completes the operation. Knows nothing of connections.
Used by `host_agent.link` (settles), `host_agent.progress` (waits) and the client (makes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from common import wire
from common.status import Status
from common.wire import Entries, Flags, Op
from host_agent import native_batches

if TYPE_CHECKING:
    from host_agent.link import RegionLink

Indices: TypeAlias = npt.NDArray[np.intp]

LAYOUT: Final = {op: wire.RESULT if op in (Op.LIST, Op.STAT) else layout for op, layout in wire.RESPONSE_LAYOUT.items()}
"""Of one block's answer, by operation. The status is its first byte."""
_ITEM_BYTES: Final = {op: layout.itemsize for op, layout in LAYOUT.items()}
_STRUCTURES_MAX_BYTES = 16
"""numpy moves structures one by one, except that it picks those of 8 and 16 bytes as fast as numbers. Measured (numpy
2): 512 of 64 bytes picked in 55 us as structures and in 4 us as rows, 512 of 16 bytes in 2.2 and 3.1 us."""


def rows(entries: Entries) -> npt.NDArray[np.uint64]:
    """The same memory as rows of 64-bit words: every layout of the wire is a multiple of 8 bytes."""
    return entries.view(np.uint64).reshape(len(entries), entries.itemsize // 8)


def take(entries: Entries, order: Indices) -> Entries:
    """A copy of the entries at `order`."""
    if entries.itemsize <= _STRUCTURES_MAX_BYTES:
        return entries[order]
    taken: Entries = rows(entries).take(order, axis=0).view(entries.dtype).reshape(len(order))
    return taken


class Request:
    """One capsule: `body` is its `count` entries and, after them, `sge_count` elements. Its answers are those of the
    operation's blocks from `first` on, in the operation's order. Not changed any more once it was submitted."""

    __slots__ = (
        "body",
        "count",
        "deadline_ns",
        "first",
        "flags",
        "link",
        "op",
        "operation",
        "request_id",
        "sge_count",
    )

    def __init__(
        self,
        operation: Operation,
        body: bytes | bytearray | memoryview,
        count: int,
        first: int,
        flags: Flags = Flags.NONE,
        sge_count: int = 0,
    ) -> None:
        self.operation = operation
        self.op = operation.op
        self.body = body
        self.count = count
        self.first = first
        self.flags = flags
        self.sge_count = sge_count
        self.deadline_ns = operation.deadline_ns
        self.request_id = 0
        self.link: RegionLink | None = None
        """Where it was submitted."""

    @classmethod
    def of(
        cls,
        operation: Operation,
        entries: Entries,
        first: int = 0,
        flags: Flags = Flags.NONE,
        sges: Entries | None = None,
    ) -> Request:
        """From arrays, which are copied."""
        body = bytearray(entries.tobytes())
        if sges is None:
            return cls(operation, body, len(entries), first, flags)
        body += sges.tobytes()
        return cls(operation, body, len(entries), first, flags, len(sges))


class Operation:
    """A batch of one kind. `answers` has an element of the operation's response layout for each block, and stands
    at DISCONNECTED until the block's own answer came. `deadline_ns` is in the monotonic clock's time.

    Requests that go to several regions are made in the `order` of the regions: their answers go to the blocks whose
    numbers it lists.

    `pages` is for LIST and STAT, whose answers are not one a block: (aux, entries) of each capsule that came.
    `arrived` lists the requests that were answered, where the caller wants to see them before all are.
    """

    __slots__ = (
        "_answers",
        "_callbacks",
        "_item_bytes",
        "_order",
        "_view",
        "arrived",
        "check",
        "count",
        "deadline_ns",
        "op",
        "pages",
        "pending",
        "raw",
    )

    def __init__(self, op: Op, raw: bytearray, deadline_ns: int) -> None:
        """`raw`: the answers before they came, of the operation's layout."""
        self.op = op
        self.raw = raw
        self.deadline_ns = deadline_ns
        self.pages: list[tuple[int, Entries]] | None = None
        self.pending: set[Request] = set()
        self.arrived: deque[Request] | None = None
        self.check: Callable[[], bool] | None = None
        """Does a bounded part of what is to be done with `arrived`; False where there was nothing to do. For the
        thread that waits."""
        self._item_bytes = item_bytes = _ITEM_BYTES[op]
        self.count = len(raw) // item_bytes
        self._view = memoryview(raw)
        self._answers: Entries | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._order: bytes | None = None

    @property
    def answers(self) -> Entries:
        """By block, as the caller numbers them."""
        answers = self._answers
        if answers is None:
            answers = self._answers = np.frombuffer(self.raw, LAYOUT[self.op])
        return answers

    def reorder(self, order: Indices | bytes) -> None:
        """Requests are for the blocks at `order` alone, and in that order; as bytes it is of 64-bit numbers. Before
        any request is submitted."""
        self._order = order if isinstance(order, bytes) else order.astype(np.int64).tobytes()

    def blocks(self, request: Request) -> list[int]:
        """The numbers of a request's blocks."""
        first, last = request.first, request.first + request.count
        if self._order is None:
            return list(range(first, last))
        return memoryview(self._order).cast("q")[first:last].tolist()

    @property
    def done(self) -> bool:
        return not self.pending

    def answer(self, request: Request, status: Status, aux: int, entries: memoryview) -> bool:
        """Take the answer to `request`; the caller settles it next. False when it does not fit the request.

        `status` is the capsule's: unless OK it holds for every block that has no answer of its own. `entries` is the
        rest of the capsule, a whole number of entries of the operation's layout.
        """
        size = self._item_bytes
        if self.pages is not None:
            self.mark(request, status)
            self.pages.append((aux, np.frombuffer(bytes(entries), wire.RESPONSE_LAYOUT[self.op])))
        elif len(entries) == request.count * size:
            first = request.first
            if self._order is None:
                self._view[first * size : (first + request.count) * size] = entries
            else:
                self._scatter(self._order, first, request.count, entries)
        elif status is not Status.OK and not len(entries):
            self.mark(request, status)
        else:
            return False
        if self.arrived is not None:
            self.arrived.append(request)
        return True

    def _scatter(self, order: bytes, first: int, count: int, entries: memoryview) -> None:
        module = native_batches.MODULE
        if module is not None:
            module.scatter(self.raw, self._item_bytes, order, first, entries)
            return
        places = np.frombuffer(order, np.int64)[first : first + count]
        came = np.frombuffer(entries, LAYOUT[self.op])
        if self._item_bytes <= _STRUCTURES_MAX_BYTES:
            self.answers[places] = came
        else:
            rows(self.answers)[places] = rows(came)

    def mark(self, request: Request, status: Status) -> None:
        """Every block of `request` has this status now."""
        size = self._item_bytes
        if self._order is None:
            first = request.first * size
            self.raw[first : first + request.count * size : size] = bytes((status,)) * request.count
        else:
            for block in self.blocks(request):
                self.raw[block * size] = status

    def settle_as(self, request: Request, status: Status) -> None:
        """Every block of `request` is answered `status`."""
        self.mark(request, status)
        self.settle(request)

    def settle(self, request: Request) -> None:
        self.pending.discard(request)
        if not self.pending:
            self._complete()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it once, in whichever thread completes the operation, or now if it is complete. It must not block."""
        self._callbacks.append(callback)
        if not self.pending:
            self._complete()

    def _complete(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()  # atomic: two threads that settle the last two call each once
            except IndexError:
                return
            callback()
