"""What the simulated world knows of a region's inside: its first format, its hash seeds, and which block lies where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.regions import hot_path
from dpu_app.regions.index import USED, SlotIndex
from dpu_app.regions.recovery import format_region
from dpu_app.regions.superblock import ENTRIES_PER_PAGE, TABLE_OFFSET, TABLE_PAGE_BYTES, Geometry
from emulator.sim_flash import Fault, Media, SimFlash
from tests.sim.requests import NS_PER_S
from tests.sim.truth import Block, Truth, require

SCRATCH_BYTES = 2 << 20


class SimClock:
    def __init__(self) -> None:
        self.now_ns = 5 * NS_PER_S
        self.wall_offset_ns = 1_700_000_000 * NS_PER_S

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns + self.wall_offset_ns


@cache
def formatted(slots: int, slot_bytes: int) -> Media:
    """A region of so many slots, as format leaves it."""
    media = Media(2 * TABLE_OFFSET + slots * slot_bytes)
    flash = SimFlash(media, 0)
    scratch = AnonymousMemory(SCRATCH_BYTES)
    flash.register_memory(scratch)
    superblock = format_region(flash, scratch, "sim", slot_bytes, uuid=bytes(range(16)), now_s=1)
    require(superblock.geometry.slots == slots, "another number of slots than meant")
    flash.close()
    scratch.close()
    return media


def slots_in(geometry: Geometry, fault: Fault) -> range:
    """Slots whose data or whose entry a fault touched."""
    end = fault.offset_bytes + max(1, fault.length_bytes)
    if fault.offset_bytes >= geometry.data_offset:
        first = (fault.offset_bytes - geometry.data_offset) // geometry.slot_bytes
        return range(first, -(-(end - geometry.data_offset) // geometry.slot_bytes))
    if fault.offset_bytes >= geometry.table_offset:
        entry_bytes = TABLE_PAGE_BYTES // ENTRIES_PER_PAGE
        first = (fault.offset_bytes - geometry.table_offset) // entry_bytes
        return range(first, min(geometry.slots, -(-(end - geometry.table_offset) // entry_bytes)))
    return range(0)


def block_in(index: SlotIndex, slot: int, truth: Truth) -> Block | None:
    """The block that a slot holds now."""
    if index.flags[slot] != USED:
        return None
    key = int(index.key_lo[slot]).to_bytes(8, "little") + int(index.key_hi[slot]).to_bytes(8, "little")
    return truth.find(index.namespace_digest(int(index.namespace[slot])), key)


@contextmanager
def seeded_hashes(seed: int) -> Iterator[None]:
    """The index seeds its hash from the system; here the seed of the world must decide everything. Others may draw from
    the same source at other times, so each gets the same number."""
    with mock.patch("dpu_app.regions.index.secrets.randbits", lambda bits: seed & ((1 << bits) - 1)):
        yield


@contextmanager
def hot_paths(native: bool) -> Iterator[None]:
    """Engines that are made meanwhile have the native hot path, where it was built, or have not."""
    with mock.patch.object(hot_path, "LIBRARY", hot_path.LIBRARY if native else None):
        yield
