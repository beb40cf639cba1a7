"""One call's work in flight: an operation, cut into requests of one capsule each, and its answers as they come.

Whoever receives an answer settles its request; the last one completes the operation. Knows nothing of connections.
Used by `host_agent.link` (settles), `host_agent.progress` (waits) and the client (makes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from common.status import Status
from common.wire import Entries, Flags, Op

if TYPE_CHECKING:
    from host_agent.link import RegionLink

Indices: TypeAlias = npt.NDArray[np.intp]


_STRUCTURES_MAX_BYTES = 16
_SLICE_ROWS_MIN = 64
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
    """One capsule. `entries` and `sges` are not changed after it was submitted; `positions` says where its answers
    go in those of the operation."""

    __slots__ = ("deadline_ns", "entries", "flags", "link", "op", "operation", "positions", "request_id", "sges")

    def __init__(
        self,
        operation: Operation,
        entries: Entries,
        positions: slice,
        sges: Entries | None = None,
        flags: Flags = Flags.NONE,
    ) -> None:
        self.operation = operation
        self.op = operation.op
        self.entries = entries
        self.sges = sges
        self.flags = flags
        self.positions = positions
        self.deadline_ns = operation.deadline_ns
        self.request_id = 0
        self.link: RegionLink | None = None
        """Where it was submitted."""


class Operation:
    """A batch of one kind. `answers` has an element of the operation's response layout for each block, and stands
    at DISCONNECTED until the block's own answer came. `deadline_ns` is in the monotonic clock's time.

    Requests that go to several regions are made in the `order` of the regions, so that each has one slice of the
    answers; `collect` puts them into the caller's order, once the operation is done.

    `pages` is for LIST and STAT, whose answers are not one a block: (aux, entries) of each capsule that came.
    """

    __slots__ = ("_arrived", "_callbacks", "_order", "answers", "deadline_ns", "op", "pages", "pending")

    def __init__(self, op: Op, answers: Entries, deadline_ns: int) -> None:
        self.op = op
        self.answers = answers
        self.deadline_ns = deadline_ns
        self.pages: list[tuple[int, Entries]] | None = None
        self.pending: set[Request] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._order: Indices | None = None
        self._arrived = answers

    def reorder(self, order: Indices) -> None:
        """Answers come for the blocks at `order` alone, and in that order. Before any request is submitted."""
        self._order = order
        self._arrived = take(self.answers, order)

    def collect(self) -> Entries:
        """The answers, in the caller's order. Only when done; idempotent."""
        if self._order is not None:
            if self.answers.itemsize <= _STRUCTURES_MAX_BYTES:
                self.answers[self._order] = self._arrived
            else:
                rows(self.answers)[self._order] = rows(self._arrived)
            self._order = None
        return self.answers

    @property
    def done(self) -> bool:
        return not self.pending

    def answer(self, request: Request, status: Status, aux: int, entries: Entries) -> bool:
        """Take the answer to `request`; the caller settles it next. False when it does not fit the request.

        `status` is the capsule's: unless OK it holds for every block that has no answer of its own.
        """
        if self.pages is not None:
            self._arrived["status"][request.positions] = status
            self.pages.append((aux, entries.copy()))
        elif len(entries) == len(request.entries):
            if len(entries) == len(self._arrived) and self._order is None:
                self._arrived = self.answers = np.frombuffer(bytearray(entries.tobytes()), entries.dtype)
            elif len(entries) < _SLICE_ROWS_MIN:
                self._arrived[request.positions] = entries
            else:
                rows(self._arrived)[request.positions] = rows(entries)
        elif status is not Status.OK and not len(entries):
            self._arrived["status"][request.positions] = status
        else:
            return False
        return True

    def settle_as(self, request: Request, status: Status) -> None:
        """Every block of `request` is answered `status`."""
        self._arrived["status"][request.positions] = status
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
