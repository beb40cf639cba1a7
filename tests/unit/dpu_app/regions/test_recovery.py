"""A region's life on flash: formatted, opened, closed, damaged, cut short; what is lost, what is said, what is not."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from common.errors import LowerLayerError, UserError
from doca_shims.api import FlashOp, FlashRequest
from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.regions import index as index_module
from dpu_app.regions import native_load
from dpu_app.regions.eviction import POLICIES
from dpu_app.regions.index import FREE
from dpu_app.regions.measure import capacity_of
from dpu_app.regions.recovery import OpenRegion, close_region, format_region, open_region
from dpu_app.regions.slot_table import ENTRY_BYTES, encode_page
from dpu_app.regions.superblock import (
    ENTRIES_PER_PAGE,
    SUPERBLOCK_OFFSETS,
    TABLE_PAGE_BYTES,
    Superblock,
    SuperblockError,
)
from tests.unit.dpu_app.regions.memory_flash import MemoryFlash, blank_flash

NOW_S = 1_800_000_000
SLOT_BYTES = 4096
Key = tuple[int, int, bytes]


@pytest.fixture(autouse=True, params=["native", "numpy"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of loading the table hold everything here."""
    if request.param == "numpy":
        monkeypatch.setattr(native_load, "LIBRARY", None)
    elif native_load.LIBRARY is None:
        pytest.skip("the native table load was not built: no compiler or no Python headers")


class Rig:
    """A formatted flash and what was stored in it: key -> (slot, stored_s, generation)."""

    def __init__(self, slots: int) -> None:
        self.flash, self.memory = blank_flash(capacity_of(slots, SLOT_BYTES))
        self.slots = slots
        self.superblock = format_region(self.flash, self.memory, "r0", SLOT_BYTES, now_s=NOW_S)
        self.stored: dict[Key, int] = {}
        self._numbers = random.Random(slots)

    def open(self, eviction: str = "s3fifo", now_s: int = NOW_S) -> OpenRegion:
        region = open_region(self.flash, self.memory, eviction, now_s=now_s)
        index = region.index
        assert index.used + index.free == self.slots
        assert int(np.count_nonzero(index.flags == FREE)) == index.free
        assert region.recovered == index.used
        return region

    def store(self, region: OpenRegion, count: int, expires_s: int = 0) -> None:
        index = region.index
        for _ in range(count):
            digest = self._numbers.randrange(5).to_bytes(16, "little")
            key = (self._numbers.getrandbits(64), self._numbers.getrandbits(64), digest)
            self.insert(region, index.allocate(), key, NOW_S + self._numbers.randrange(1000), expires_s)

    def insert(self, region: OpenRegion, slot: int, key: Key, stored_s: int, expires_s: int = 0) -> None:
        index = region.index
        namespace = index.namespace_id(key[2])
        generation = region.superblock.generation
        index.insert(slot, key[0], key[1], namespace, 1 + slot % 4096, key[0] ^ 1, generation, stored_s, expires_s)
        self.stored[key] = slot

    def write_table(self, region: OpenRegion) -> None:
        geometry = region.superblock.geometry
        for page in range(geometry.pages):
            self.write_page(page, encode_page(region.index, page, region.superblock.salt))

    def write_page(self, page: int, block: bytes) -> None:
        offset = self.superblock.geometry.page_offset(page)
        self.flash.content[offset : offset + TABLE_PAGE_BYTES] = block

    def filled(self, count: int, close: bool = True) -> None:
        """Store `count` blocks and write them, then close, or stop without."""
        region = self.open()
        self.store(region, count)
        self.write_table(region)
        if close:
            close_region(self.flash, self.memory, region)

    def assert_holds(self, region: OpenRegion, lost: set[int] | None = None) -> None:
        """Every key is in its slot, but for those of the `lost` slots, which are absent."""
        index = region.index
        for key, slot in self.stored.items():
            namespace = index.find_namespace(key[2])
            found = index.find_one(key[0], key[1], namespace)
            assert found == (-1 if slot in (lost or ()) else slot)
            if found >= 0:
                assert index.length[slot] == 1 + slot % 4096
                assert index.checksum[slot] == key[0] ^ 1
        expected = len(self.stored) - len(lost or ())
        assert index.used == expected
        lengths = sum(1 + slot % 4096 for slot in self.stored.values() if slot not in (lost or ()))
        assert int(index.namespace_bytes.sum()) == lengths


def _flip(flash: MemoryFlash, offset: int) -> None:
    flash.content[offset] ^= 0x10


def _fail(op: FlashOp, start: int, end: int, result: int) -> Callable[[FlashRequest], int | None]:
    """A fault of every request of `op` that touches the range."""

    def fault(request: FlashRequest) -> int | None:
        touches = request.offset_bytes < end and request.offset_bytes + request.length_bytes > start
        return result if request.op is op and touches else None

    return fault


def test_a_new_region_is_empty_and_open_for_all() -> None:
    rig = Rig(1000)
    region = rig.open()
    assert (region.index.used, region.index.free) == (0, 1000)
    assert not region.unverified
    assert region.messages == []
    assert region.superblock.generation == rig.superblock.generation + 1
    assert region.superblock.name == "r0"
    assert region.superblock.created_s == NOW_S
    assert sum(region.index.allocate() >= 0 for _ in range(1001)) == 1000


@pytest.mark.parametrize(("slots", "used"), [(64, 64), (65, 30), (10_000, 10_000), (10_000, 7_777)])
def test_what_was_stored_is_there_after_a_clean_stop(slots: int, used: int) -> None:
    rig = Rig(slots)
    rig.filled(used)
    region = rig.open()
    rig.assert_holds(region)
    assert not region.unverified
    assert (region.dropped, region.messages, region.dirty_pages) == (0, [], [])


def test_after_an_unclean_stop_entries_are_claims() -> None:
    rig = Rig(1000)
    rig.filled(400, close=False)
    region = rig.open()
    rig.assert_holds(region)
    assert region.unverified
    close_region(rig.flash, rig.memory, region)
    assert region.superblock.clean
    assert not rig.open().unverified


def test_generation_and_sequence_rise_at_every_opening() -> None:
    rig = Rig(100)
    seen = [rig.superblock]
    for close in (True, False, False, True):
        region = rig.open()
        assert region.superblock.generation == seen[-1].generation + 1
        assert region.superblock.sequence > seen[-1].sequence
        if close:
            close_region(rig.flash, rig.memory, region)
        seen.append(region.superblock)
    assert len({superblock.uuid for superblock in seen}) == 1
    again = format_region(rig.flash, rig.memory, "r0", SLOT_BYTES, force=True)
    assert again.uuid != rig.superblock.uuid
    assert rig.open().index.used == 0


def test_the_data_is_never_read() -> None:
    rig = Rig(2000)
    rig.filled(2000)
    rig.flash.requests.clear()
    rig.open()
    reads = [request for request in rig.flash.requests if request.op is FlashOp.READ]
    assert max(request.offset_bytes + request.length_bytes for request in reads) <= rig.superblock.geometry.data_offset
    assert sum(request.length_bytes for request in reads) == rig.superblock.geometry.table_bytes + 2 * 4096


# ------------------------------------------------------------------------------------------------ formatting


def test_formatting_refuses_what_is_not_blank() -> None:
    flash, memory = blank_flash(8 << 20)
    flash.content[1080] = 0x53  # as the magic of ext4 would be
    with pytest.raises(UserError, match=r"other data.*force"):
        format_region(flash, memory, "r0", SLOT_BYTES)
    with pytest.raises(SuperblockError, match="no valid superblock"):
        open_region(flash, memory)
    format_region(flash, memory, "r0", SLOT_BYTES, force=True)
    with pytest.raises(UserError, match=r"the region 'r0'.*force"):
        format_region(flash, memory, "r1", SLOT_BYTES)
    assert open_region(flash, memory).superblock.name == "r0"


def test_formatting_clears_the_table_of_before() -> None:
    rig = Rig(500)
    rig.filled(500)
    superblock = format_region(
        rig.flash, rig.memory, "r0", SLOT_BYTES, force=True, uuid=rig.superblock.uuid, now_s=NOW_S
    )
    region = rig.open()
    assert (region.index.used, region.dropped, superblock.generation) == (0, 0, 1)


def test_a_format_cut_short_leaves_no_region() -> None:
    """Whatever write is the last one, the flash is blank or a whole new region, never the old one with no table."""
    for last in range(1, 8):
        rig = Rig(500)
        rig.filled(500)
        writes = 0

        def fault(request: FlashRequest, last: int = last) -> int | None:
            nonlocal writes
            writes += request.op is FlashOp.WRITE
            return -errno.EIO if writes > last else None

        rig.flash.faults = fault
        with contextlib.suppress(LowerLayerError):
            format_region(rig.flash, rig.memory, "new", SLOT_BYTES, force=True)
        rig.flash.faults = lambda request: None
        try:
            region = open_region(rig.flash, rig.memory)
        except SuperblockError:
            continue
        assert region.superblock.name == "new"
        assert region.index.used == 0


def test_a_write_that_fails_is_told() -> None:
    flash, memory = blank_flash(8 << 20)
    for result in (-errno.ENOSPC, 4096):
        flash.faults = _fail(FlashOp.WRITE, 1 << 20, 2 << 20, result)
        with pytest.raises(LowerLayerError):
            format_region(flash, memory, "r0", SLOT_BYTES)


def test_blank_flash_is_told_from_foreign() -> None:
    flash, memory = blank_flash(8 << 20)
    with pytest.raises(SuperblockError, match=r"blank.*format"):
        open_region(flash, memory)


# ----------------------------------------------------------------------------------------------- superblocks


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("damage", ["flip", "zero", "EIO", "short"])
def test_one_bad_superblock_costs_nothing_but_trust(copy: int, damage: str) -> None:
    rig = Rig(300)
    rig.filled(200)
    offset = SUPERBLOCK_OFFSETS[copy]
    if damage == "flip":
        _flip(rig.flash, offset + 100)
    elif damage == "zero":
        rig.flash.content[offset : offset + 4096] = bytes(4096)
    else:
        rig.flash.faults = _fail(FlashOp.READ, offset, offset + 4096, -errno.EIO if damage == "EIO" else 512)
    region = rig.open()
    rig.assert_holds(region)
    assert region.unverified
    assert any(f"copy {copy}" in message for message in region.messages)


def test_an_old_clean_copy_does_not_vouch_for_what_came_after() -> None:
    rig = Rig(300)
    rig.filled(100)
    region = rig.open()
    rig.store(region, 50)
    rig.write_table(region)
    _flip(rig.flash, region.superblock.offset + 200)
    again = rig.open()
    assert again.unverified
    assert again.superblock.generation > region.superblock.generation
    rig.assert_holds(again)


def test_two_bad_superblocks_are_an_error_that_names_both() -> None:
    rig = Rig(100)
    for offset in SUPERBLOCK_OFFSETS:
        _flip(rig.flash, offset + 300)
    with pytest.raises(SuperblockError, match=r"copy 0: bad checksum.*copy 1: bad checksum"):
        rig.open()
    rig.flash.faults = lambda request: -errno.EIO if request.op is FlashOp.READ else None
    with pytest.raises(SuperblockError, match="cannot be read"):
        rig.open()


def test_a_flash_that_shrank_is_refused() -> None:
    rig = Rig(300)
    small, memory = blank_flash(rig.flash.caps.capacity_bytes - (1 << 20))
    small.content[:] = rig.flash.content[: len(small.content)]
    with pytest.raises(UserError, match="was formatted for"):
        open_region(small, memory)


def test_a_superblock_that_cannot_be_written_stops_the_opening() -> None:
    rig = Rig(100)
    rig.flash.faults = _fail(FlashOp.WRITE, 0, 1 << 20, -errno.EIO)
    with pytest.raises(LowerLayerError):
        rig.open()


# ---------------------------------------------------------------------------------------------- damaged tables


def test_a_damaged_entry_costs_itself() -> None:
    rig = Rig(1000)
    rig.filled(900)
    slots = {5, 64 * 3 + 63, 700}
    for slot in slots:
        _flip(rig.flash, rig.superblock.geometry.table_offset + slot * ENTRY_BYTES + 20)
    region = rig.open()
    rig.assert_holds(region, lost=slots)
    assert region.dropped == 3
    assert region.dirty_pages == sorted({slot // 64 for slot in slots})
    assert region.messages


@pytest.mark.parametrize("result", [-errno.EIO, 0, 512])
def test_an_unreadable_page_costs_its_entries(result: int) -> None:
    rig = Rig(5000)
    rig.filled(5000)
    geometry = rig.superblock.geometry
    offset = geometry.page_offset(7)
    rig.flash.faults = _fail(FlashOp.READ, offset, offset + TABLE_PAGE_BYTES, result)
    region = rig.open()
    rig.assert_holds(region, lost=set(range(7 * ENTRIES_PER_PAGE, 8 * ENTRIES_PER_PAGE)))
    assert region.dirty_pages == [7]
    assert any("page 7" in message for message in region.messages)
    assert {region.index.allocate() for _ in range(64)} == set(range(448, 512))


@pytest.mark.parametrize("torn_bytes", [512, 1000, 2048])
def test_a_torn_page_keeps_the_entries_that_are_whole(torn_bytes: int) -> None:
    rig = Rig(64)
    region = rig.open()
    rig.store(region, 30)
    rig.write_table(region)
    before = bytes(rig.flash.content[rig.superblock.geometry.page_offset(0) :][:4096])
    old = dict(rig.stored)
    rig.store(region, 34)
    after = encode_page(region.index, 0, region.superblock.salt)
    rig.write_page(0, after[:torn_bytes] + before[torn_bytes:])
    recovered = rig.open()
    for key, slot in rig.stored.items():
        found = recovered.index.find_one(key[0], key[1], recovered.index.find_namespace(key[2]))
        if (slot + 1) * ENTRY_BYTES <= torn_bytes or key in old:
            assert found == slot
        else:
            assert found == -1


def test_a_table_of_noise_is_an_empty_region() -> None:
    rig = Rig(2000)
    geometry = rig.superblock.geometry
    noise = random.Random(1).randbytes(geometry.table_bytes)
    rig.flash.content[geometry.table_offset : geometry.table_offset + len(noise)] = noise
    region = rig.open()
    assert region.index.used == 0
    assert region.dropped == geometry.pages * ENTRIES_PER_PAGE
    assert len(region.messages) <= 30


def test_pages_in_each_other_s_place_are_refused() -> None:
    rig = Rig(256)
    rig.filled(256)
    geometry = rig.superblock.geometry
    one, two = (bytes(rig.flash.content[geometry.page_offset(n) :][:4096]) for n in (1, 2))
    rig.write_page(1, two)
    rig.write_page(2, one)
    region = rig.open()
    rig.assert_holds(region, lost=set(range(64, 192)))
    assert region.dropped == 128


# ------------------------------------------------------------------------------------- what a crash leaves behind


@pytest.mark.parametrize("slots", [64, 3000])
@pytest.mark.parametrize("newer_first", [True, False])
def test_of_two_slots_with_one_key_the_later_generation_stays(slots: int, newer_first: bool) -> None:
    """Some keys are stored in a second slot in a later generation, and the first one's page is not written again."""
    rig = Rig(slots)
    region = rig.open()
    rig.store(region, slots // 2)
    rig.write_table(region)
    if newer_first:  # make room before them: the later entries get the lower slots
        freed = [slot for key, slot in rig.stored.items() if slot < slots // 4]
        for key in [key for key, slot in rig.stored.items() if slot in freed]:
            del rig.stored[key]
        for slot in freed:
            region.index.remove(slot)
            region.index.release(slot)
        rig.write_table(region)
    region = rig.open()
    twice = list(rig.stored.items())[::3]
    old_table = [bytes(rig.flash.content[rig.superblock.geometry.page_offset(n) :][:4096]) for n in range(slots // 64)]
    for key, slot in twice:
        region.index.remove(slot)
        rig.insert(region, region.index.allocate(), key, NOW_S - 5000)
    new_table = [encode_page(region.index, page, region.superblock.salt) for page in range(slots // 64)]
    for page, (old, new) in enumerate(zip(old_table, new_table)):
        entries = [
            new[at : at + 64] if any(new[at : at + 64]) else old[at : at + 64] for at in range(0, TABLE_PAGE_BYTES, 64)
        ]
        rig.write_page(page, b"".join(entries))
    recovered = rig.open()
    rig.assert_holds(recovered)
    assert recovered.dropped == len(twice)
    assert recovered.dirty_pages == sorted({slot // 64 for _, slot in twice})
    victims = set()
    while (slot := recovered.policy.victim(lambda slot: False)) >= 0:
        recovered.policy.on_remove(slot)
        victims.add(slot)
    assert victims == set(rig.stored.values())


def test_many_slots_with_one_key_leave_one() -> None:
    rig = Rig(6400)
    region = rig.open()
    key = (1, 2, b"n" * 16)
    for slot in range(6400):
        region.index.allocate()
        rig.insert(region, slot, key, NOW_S + (slot * 7919) % 6400)
        block = encode_page(region.index, slot // 64, region.superblock.salt)
        offset = region.superblock.geometry.table_offset + slot * ENTRY_BYTES
        rig.flash.content[offset : offset + ENTRY_BYTES] = block[slot % 64 * 64 : slot % 64 * 64 + 64]
        region.index.remove(slot)
    recovered = rig.open()
    assert (recovered.index.used, recovered.dropped) == (1, 6399)
    slot = recovered.index.find_one(1, 2, recovered.index.find_namespace(b"n" * 16))
    assert recovered.index.stored_s[slot] == NOW_S + 6399
    assert recovered.policy.victim(lambda slot: False) == slot


def test_expired_blocks_are_not_recovered() -> None:
    rig = Rig(500)
    region = rig.open()
    rig.store(region, 100)
    lasting = set(rig.stored.values())
    rig.store(region, 100, expires_s=NOW_S + 10)
    rig.write_table(region)
    rig.assert_holds(rig.open(now_s=NOW_S + 9))
    expired = rig.open(now_s=NOW_S + 10)
    rig.assert_holds(expired, lost=set(rig.stored.values()) - lasting)
    assert expired.dropped == 100
    assert expired.dirty_pages == sorted({slot // 64 for slot in rig.stored.values() if slot not in lasting})


def test_blocks_of_namespaces_beyond_the_last_id_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(500)
    rig.filled(500)
    present = {key[2] for key in rig.stored}
    monkeypatch.setattr(index_module, "NAMESPACES_MAX", len(present) - 2)
    region = rig.open()
    known = {digest for digest in present if region.index.find_namespace(digest) >= 0}
    assert len(known) == len(present) - 2
    lost = {slot for key, slot in rig.stored.items() if key[2] not in known}
    rig.assert_holds(region, lost)
    assert region.dropped == len(lost)
    assert region.messages


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_eviction_goes_on_where_it_was(eviction: str) -> None:
    rig = Rig(640)
    region = rig.open()
    rig.store(region, 320)
    rig.write_table(region)
    region = rig.open()
    rig.store(region, 320)
    rig.write_table(region)
    recovered = rig.open(eviction)
    index = recovered.index
    victims = []
    while (slot := recovered.policy.victim(lambda slot: False)) >= 0:
        recovered.policy.on_remove(slot)
        victims.append(slot)
    ages = [(int(index.generation[slot]), int(index.stored_s[slot]), slot) for slot in victims]
    assert len(victims) == 640
    if eviction == "s3fifo":  # two queues, each in order
        assert sum(one > two for one, two in pairwise(ages)) <= 2
    else:
        assert ages == sorted(ages)


def test_ages_too_far_apart_for_one_number_keep_their_generations_apart() -> None:
    rig = Rig(64)
    region = rig.open()
    region.superblock = replace(region.superblock, generation=1)
    rig.insert(region, region.index.allocate(), (1, 1, b"n" * 16), (1 << 32) - 1)
    region.superblock = replace(region.superblock, generation=(1 << 32) - 2)
    rig.insert(region, region.index.allocate(), (2, 2, b"n" * 16), 0)
    rig.write_table(region)
    recovered = rig.open("fifo")
    assert recovered.policy.victim(lambda slot: False) == 0
    assert recovered.superblock.generation == (1 << 32) - 1


def test_memory_of_the_caller_is_scratch_of_any_size() -> None:
    rig = Rig(3000)
    rig.filled(3000)
    for pages in (1, 3, 64):
        rig.memory = AnonymousMemory(pages * 4096)
        rig.flash.register_memory(rig.memory)
        region = rig.open()
        rig.assert_holds(region)
        close_region(rig.flash, rig.memory, region)


def test_an_unknown_policy_is_told_before_the_flash_is_touched() -> None:
    rig = Rig(64)
    before = bytes(rig.flash.content)
    with pytest.raises(UserError, match="no eviction policy"):
        rig.open("arc")
    assert bytes(rig.flash.content) == before


def test_close_reports_a_flash_that_refuses() -> None:
    rig = Rig(64)
    region = rig.open()
    rig.flash.faults = lambda request: -errno.EIO if request.op is FlashOp.FLUSH else None
    with pytest.raises(LowerLayerError):
        close_region(rig.flash, rig.memory, region)
    assert not region.superblock.clean
    rig.flash.faults = lambda request: None
    assert rig.open().unverified


def test_superblocks_on_flash_are_what_is_returned() -> None:
    rig = Rig(64)
    region = rig.open()
    offset = region.superblock.offset
    assert Superblock.decode(rig.flash.content[offset : offset + 4096]) == region.superblock
