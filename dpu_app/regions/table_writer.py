"""Writes slot-table pages in groups: entries of one page that became due together cost one 4 KiB write.

A page goes out with the entries that are on flash at that moment (data first, then entry); whoever waits for a
page is called when a write that began after its request is through. A failing page is tried again a few times.
Nothing here takes longer the more pages wait: after a crash every page of a large table may be stale.
Used by the store path (new entries), the catalogue (entries of deleted blocks) and DELETE (claims of earlier copies).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from common.wire import StatId
from doca_shims.api import FlashOp
from dpu_app.regions.flash_queue import FlashJob, FlashQueue, Priority
from dpu_app.regions.stats import Stats
from dpu_app.regions.superblock import ENTRIES_PER_PAGE, TABLE_PAGE_BYTES, Geometry
from dpu_app.regions.window import Window

Waiter = Callable[[int], None]
"""Called with 0 once the page is on media, or with the negative errno of its last attempt."""

ATTEMPTS = 3
IN_FLIGHT_MAX = 4


class _Page:
    """A page that is to be written, or is being written. `term` is the settlement that it belongs to."""

    __slots__ = ("attempts", "term", "waiters")

    def __init__(self, term: int) -> None:
        self.term = term
        self.attempts = 0
        self.waiters: list[Waiter] = []


class TableWriter:
    """`encode(page)` gives a page's 4096 bytes as they should be on flash now.

    Settlements are numbered: a page counts for the term in which it became due, or had been stale when that term
    ended, and a settlement is through when no page of its term or an earlier one is left."""

    def __init__(
        self, geometry: Geometry, window: Window, queue: FlashQueue, stats: Stats, encode: Callable[[int], bytes]
    ) -> None:
        self._geometry = geometry
        self._window = window
        self._queue = queue
        self._stats = stats
        self._encode = encode
        self._due: OrderedDict[int, _Page] = OrderedDict()
        self._in_flight: dict[int, _Page] = {}
        self._stale: set[int] = set()
        self._backlog: deque[tuple[int, set[int]]] = deque()
        """By term, pages that were stale when it ended; they become due a few at a time."""
        self._term = 0
        self._left: OrderedDict[int, int] = OrderedDict([(0, 0)])
        """Pages due, in flight or in the backlog, by term, the earliest first; the current term is always there."""
        self._settlements: deque[tuple[int, Waiter]] = deque()
        self._errors: dict[int, int] = {}
        """First error by the settlement's term."""

    @property
    def idle(self) -> bool:
        return not self._due and not self._in_flight and not self._backlog

    def mark(self, slot: int, waiter: Waiter) -> None:
        """Write the page of `slot` soon and call `waiter`."""
        page = slot // ENTRIES_PER_PAGE
        self._stale.discard(page)
        self._make_due(page).waiters.append(waiter)

    def mark_stale(self, slot: int) -> None:
        """The page names a block that is gone. That is only a claim, so it is written with the page's next
        write, or at the latest by `write_stale`."""
        page = slot // ENTRIES_PER_PAGE
        if page not in self._due:
            self._stale.add(page)

    def write_stale(self) -> None:
        """Before a clean stop: make due whatever is only stale."""
        if self._stale:
            self._left[self._term] += len(self._stale)
            self._backlog.append((self._term, self._stale))
            self._stale = set()

    def settle(self, waiter: Waiter) -> None:
        """Make flash forget every block that is gone by now: `waiter` is called when all pages that are stale, due or
        being written are through, with the first error among them; at once where there are none."""
        self.write_stale()
        self._settlements.append((self._term, waiter))
        self._term += 1
        self._left[self._term] = 0
        self._end_terms()

    def pump(self) -> None:
        """Start what is due, as far as buffers go; a page that is being written waits for its next turn."""
        while len(self._in_flight) < IN_FLIGHT_MAX:
            if not self._due and not self._draw():
                return
            page = self._next()
            if page < 0 and self._draw():
                page = self._next()
            if page < 0:
                return
            buffer = self._window.take_table_buffer()
            if buffer < 0:
                return
            self._start(page, buffer)

    def _next(self) -> int:
        """The first page that is due and not being written, or -1."""
        for page in self._due:  # at most IN_FLIGHT_MAX of them are being written
            if page not in self._in_flight:
                return page
        return -1

    def _draw(self) -> bool:
        """Make one page of the backlog due. False when there is none."""
        if not self._backlog:
            return False
        term, pages = self._backlog[0]
        page = pages.pop()
        if not pages:
            self._backlog.popleft()
        due = self._due.get(page)
        if due is None:
            self._due[page] = _Page(term)
        else:  # one write serves both
            self._left[max(term, due.term)] -= 1
            due.term = min(term, due.term)
        return True

    def _make_due(self, page: int) -> _Page:
        due = self._due.get(page)
        if due is None:
            term = self._withdraw(page)
            if term < 0:
                term = self._term
                self._left[term] += 1
            due = self._due[page] = _Page(term)
        return due

    def _withdraw(self, page: int) -> int:
        """Take a page out of the backlog. The term it counts for, or -1 if it was not there."""
        for place, (term, pages) in enumerate(self._backlog):  # one for each settlement under way
            if page in pages:
                pages.discard(page)
                if not pages:
                    del self._backlog[place]
                return term
        return -1

    def _start(self, page: int, buffer: int) -> None:
        self._in_flight[page] = self._due.pop(page)
        self._window.table_bytes(buffer)[:] = self._encode(page)
        self._queue.add(
            FlashJob(
                FlashOp.WRITE,
                Priority.TABLE,
                self._geometry.page_offset(page),
                self._window.table_address(buffer),
                TABLE_PAGE_BYTES,
                lambda error: self._written(page, buffer, error),
            )
        )

    def _written(self, page: int, buffer: int, error: int) -> None:
        self._window.give_table_buffer(buffer)
        written = self._in_flight.pop(page)
        if error:
            self._stats.add(StatId.FLASH_ERRORS)
            written.attempts += 1
            if written.attempts < ATTEMPTS:
                self._again(page, written)
                return
            if page not in self._due:
                self._stale.add(page)  # what is on flash may name blocks that are gone
            for term, _ in self._settlements:
                if term >= written.term:
                    self._errors.setdefault(term, error)
        else:
            self._stats.add(StatId.TABLE_WRITE_BYTES, TABLE_PAGE_BYTES)
            self._stats.add(StatId.FLASH_WRITE_BYTES, TABLE_PAGE_BYTES)
        for waiter in written.waiters:
            waiter(error)
        self._left[written.term] -= 1
        self._end_terms()

    def _again(self, page: int, failed: _Page) -> None:
        """A failed page is due again, together with what became due of it meanwhile."""
        later = self._due.get(page)
        if later is not None:
            failed.waiters += later.waiters
            self._left[max(failed.term, later.term)] -= 1
            failed.term = min(failed.term, later.term)
        self._due[page] = failed

    def _end_terms(self) -> None:
        while self._settlements:
            term, left = next(iter(self._left.items()))
            if left or term == self._term:
                return
            del self._left[term]
            _, waiter = self._settlements.popleft()
            waiter(self._errors.pop(term, 0))
