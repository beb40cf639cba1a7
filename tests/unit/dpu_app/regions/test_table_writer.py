"""Slot-table pages: grouped, tried again, settled; and no turn takes longer the more of them wait."""

from __future__ import annotations

import pytest

from doca_shims.api import FlashCaps, FlashCompletion
from dpu_app.regions.flash_queue import FlashQueue
from dpu_app.regions.stats import Stats
from dpu_app.regions.superblock import ENTRIES_PER_PAGE, TABLE_PAGE_BYTES, Geometry
from dpu_app.regions.table_writer import ATTEMPTS, IN_FLIGHT_MAX, TableWriter
from dpu_app.regions.window import Window, WindowLayout
from tests.unit.dpu_app.work import instructions

SLOT_BYTES = 4096
EIO = -5


class Table:
    """A writer on a flash that answers when it is told to."""

    def __init__(self, pages: int = 100_000) -> None:
        geometry = Geometry.fit(pages * ENTRIES_PER_PAGE * (SLOT_BYTES + 64) + (4 << 20), SLOT_BYTES)
        layout = WindowLayout.fit(4 * SLOT_BYTES, SLOT_BYTES)
        caps = FlashCaps(1 << 50, SLOT_BYTES, 1 << 20, 64, True, "test")
        self.queue = FlashQueue(caps)
        self.encoded: list[int] = []
        window = Window(layout, 0, memoryview(bytearray(layout.memory_bytes)))
        self.writer = TableWriter(geometry, window, self.queue, Stats(), self._encode)
        self._first_offset = geometry.page_offset(0)
        self.at_flash: list[tuple[int, int]] = []
        """(tag, page)."""
        self.heard: list[tuple[str, int]] = []

    def _encode(self, page: int) -> bytes:
        self.encoded.append(page)
        return bytes(TABLE_PAGE_BYTES)

    def mark(self, page: int, name: str) -> None:
        self.writer.mark(page * ENTRIES_PER_PAGE, lambda error: self.heard.append((name, error)))

    def mark_stale(self, *pages: int) -> None:
        for page in pages:
            self.writer.mark_stale(page * ENTRIES_PER_PAGE)

    def settle(self, name: str) -> None:
        self.writer.settle(lambda error: self.heard.append((name, error)))

    def pump(self) -> list[int]:
        """Start what may start; the pages at flash."""
        self.writer.pump()
        for request in self.queue.pump():
            self.at_flash.append((request.tag, (request.offset_bytes - self._first_offset) // TABLE_PAGE_BYTES))
        return [page for _, page in self.at_flash]

    def answer(self, *results: int) -> None:
        """Flash answers what was started first; 0 stands for success."""
        for result in results or [0] * len(self.at_flash):
            tag, _ = self.at_flash.pop(0)
            self.queue.complete([FlashCompletion(tag, result or TABLE_PAGE_BYTES)])

    def finish(self) -> int:
        """Pump and answer until nothing is left; how many pages were written."""
        before = len(self.encoded)
        while self.pump():
            self.answer()
        assert self.writer.idle
        return len(self.encoded) - before


@pytest.fixture
def table() -> Table:
    return Table()


def test_entries_of_one_page_cost_one_write(table: Table) -> None:
    table.mark(3, "a")
    table.mark(3, "b")
    assert table.pump() == [3]
    table.mark(3, "c")  # its entry may not be in what is being written
    assert table.pump() == [3]
    table.answer()
    assert table.heard == [("a", 0), ("b", 0)]
    assert table.finish() == 1
    assert table.heard[2:] == [("c", 0)]


def test_a_failing_page_is_tried_again_and_given_up(table: Table) -> None:
    table.mark(3, "a")
    for attempt in range(ATTEMPTS):
        assert table.heard == []
        assert table.pump() == [3], attempt
        if attempt == 0:
            table.mark(3, "b")  # joins the next attempt
        table.answer(EIO)
    assert table.heard == [("a", EIO), ("b", EIO)]
    table.settle("after")  # what is on flash may name blocks that are gone
    assert table.finish() == 1
    assert table.heard[2:] == [("after", 0)]


def test_a_settlement_waits_for_what_is_stale_due_and_in_flight(table: Table) -> None:
    table.mark(1, "in flight")
    table.pump()
    table.mark(2, "due")
    table.mark_stale(3, 4)
    table.settle("settled")
    table.mark(5, "later")
    table.mark_stale(6)
    assert {1, 2, 5} < set(table.pump()) < {1, 2, 3, 4, 5}
    table.answer()
    assert ("settled", 0) not in table.heard
    table.pump()
    table.answer()
    assert table.heard[-1] == ("settled", 0)
    assert 6 not in table.encoded


def test_a_settlement_of_nothing_is_through_at_once(table: Table) -> None:
    table.settle("a")
    assert table.heard == [("a", 0)]
    table.mark(1, "due")
    table.settle("b")
    table.settle("c")
    assert table.heard == [("a", 0)]
    table.finish()
    assert table.heard == [("a", 0), ("due", 0), ("b", 0), ("c", 0)]


def test_a_settlement_hears_of_a_failure_of_its_own_pages_alone(table: Table) -> None:
    table.mark_stale(1)
    table.settle("first")
    table.mark(9, "other")
    for _ in range(ATTEMPTS):
        table.pump()
        table.answer(*(EIO if page == 1 else 0 for _, page in table.at_flash))
    assert table.heard == [("other", 0), ("first", EIO)]
    table.settle("second")
    table.finish()
    assert table.heard[-1] == ("second", 0)


def test_a_page_that_is_due_again_counts_for_the_earlier_settlement(table: Table) -> None:
    pages = set(range(10, 10 + IN_FLIGHT_MAX + 1))
    table.mark_stale(*pages)
    table.settle("first")
    [left] = pages - set(table.pump())
    table.mark(left, "due later")
    assert table.heard == []
    assert table.finish() == 1
    assert table.heard == [("due later", 0), ("first", 0)]
    table.settle("second")
    assert table.heard[-1] == ("second", 0)


def test_before_a_stop_all_that_is_stale_is_written(table: Table) -> None:
    table.mark_stale(*range(50))
    assert table.writer.idle
    table.writer.write_stale()
    assert not table.writer.idle
    assert table.finish() == 50


def test_a_turn_takes_no_longer_when_a_whole_table_is_stale() -> None:
    """As after a crash: the first DELETE settles every page, and each of them comes with a completion of flash."""
    work = []
    for pages in (200, 40_000):
        table = Table()
        table.mark_stale(*range(pages))
        settling = instructions(lambda table=table: table.settle("all"))  # type: ignore[misc]
        pumping = instructions(table.pump)
        for _ in range(20):
            table.answer()
            pumping = max(pumping, instructions(table.pump))
        work.append((settling, pumping))
    assert work[1] == work[0]


def test_a_turn_takes_no_longer_when_many_pages_are_due() -> None:
    work = []
    for pages in (200, 40_000):
        table = Table()
        for page in range(pages):
            table.mark(page, "")
        settling = instructions(lambda table=table: table.settle("all"))  # type: ignore[misc]
        table.pump()
        for _ in range(20):
            table.answer()
            table.pump()
        table.answer()
        work.append((settling, instructions(table.pump)))
    assert work[1] == work[0]
