"""Writes slot-table pages in groups: entries of one page that became due together cost one 4 KiB write.

A page goes out with the entries that are on flash at that moment (data first, then entry); whoever waits for a
page is called when a write that began after its request is through. A failing page is tried again a few times.
Used by the store path (new entries), the catalogue (entries of deleted blocks) and DELETE (claims of earlier copies).
"""

from __future__ import annotations

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


class TableWriter:
    """`encode(page)` gives a page's 4096 bytes as they should be on flash now."""

    def __init__(
        self, geometry: Geometry, window: Window, queue: FlashQueue, stats: Stats, encode: Callable[[int], bytes]
    ) -> None:
        self._geometry = geometry
        self._window = window
        self._queue = queue
        self._stats = stats
        self._encode = encode
        self._due: dict[int, list[Waiter]] = {}
        self._in_flight: dict[int, list[Waiter]] = {}
        self._attempts: dict[int, int] = {}
        self._stale: set[int] = set()

    @property
    def idle(self) -> bool:
        return not self._due and not self._in_flight

    def mark(self, slot: int, waiter: Waiter) -> None:
        """Write the page of `slot` soon and call `waiter`."""
        page = slot // ENTRIES_PER_PAGE
        self._stale.discard(page)
        self._due.setdefault(page, []).append(waiter)

    def mark_stale(self, slot: int) -> None:
        """The page names a block that is gone. That is only a claim, so it is written with the page's next
        write, or at the latest by `write_stale`."""
        page = slot // ENTRIES_PER_PAGE
        if page not in self._due:
            self._stale.add(page)

    def write_stale(self) -> None:
        """Before a clean stop: make due whatever is only stale."""
        for page in self._stale:
            self._due.setdefault(page, [])
        self._stale.clear()

    def settle(self, waiter: Waiter) -> None:
        """Make flash forget every block that is gone by now: `waiter` is called when all pages that are stale, due or
        being written are through, with the first error among them; at once where there are none."""
        self.write_stale()
        pages = [*self._due.values(), *self._in_flight.values()]
        left, first_error = len(pages), 0
        if not left:
            waiter(0)

        def written(error: int) -> None:
            nonlocal left, first_error
            left -= 1
            first_error = first_error or error
            if left == 0:
                waiter(first_error)

        for waiters in pages:
            waiters.append(written)

    def pump(self) -> None:
        """Start what is due, as far as buffers go; a page that is being written waits for its next turn."""
        if not self._due:
            return
        for page in [page for page in self._due if page not in self._in_flight]:
            if len(self._in_flight) >= IN_FLIGHT_MAX:
                return
            buffer = self._window.take_table_buffer()
            if buffer < 0:
                return
            self._in_flight[page] = self._due.pop(page)
            self._window.table_bytes(buffer)[:] = self._encode(page)
            self._queue.add(
                FlashJob(
                    FlashOp.WRITE,
                    Priority.TABLE,
                    self._geometry.page_offset(page),
                    self._window.table_address(buffer),
                    TABLE_PAGE_BYTES,
                    lambda error, page=page, buffer=buffer: self._written(page, buffer, error),  # type: ignore[misc]
                )
            )

    def _written(self, page: int, buffer: int, error: int) -> None:
        self._window.give_table_buffer(buffer)
        waiters = self._in_flight.pop(page)
        if error:
            self._stats.add(StatId.FLASH_ERRORS)
            attempts = self._attempts.get(page, 0) + 1
            if attempts < ATTEMPTS:
                self._attempts[page] = attempts
                self._due[page] = waiters + self._due.get(page, [])
                return
            if page not in self._due:
                self._stale.add(page)  # what is on flash may name blocks that are gone
        else:
            self._stats.add(StatId.TABLE_WRITE_BYTES, TABLE_PAGE_BYTES)
            self._stats.add(StatId.FLASH_WRITE_BYTES, TABLE_PAGE_BYTES)
        self._attempts.pop(page, None)
        for waiter in waiters:
            waiter(error)
