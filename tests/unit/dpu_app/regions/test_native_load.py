"""The native table load beside its numpy twin, entry by entry on the same table."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.regions import native_load
from dpu_app.regions.blocking_flash import BlockingFlash
from dpu_app.regions.index import SlotIndex
from dpu_app.regions.measure import capacity_of, fill_table
from dpu_app.regions.recovery import format_region, open_region
from tests.unit.dpu_app.regions.memory_flash import MemoryFlash

SLOTS = 20_000
COLUMNS = ("key_lo", "key_hi", "checksum", "length", "generation", "stored_s", "expires_s", "flags")


@pytest.mark.skipif(native_load.LIBRARY is None, reason="the native table load was not built")
@pytest.mark.parametrize("damage", [0, 40])
def test_both_give_the_same_index(monkeypatch: pytest.MonkeyPatch, damage: int) -> None:
    flash, memory = MemoryFlash(capacity_of(SLOTS, 4096)), AnonymousMemory(4 << 20)
    flash.register_memory(memory)
    superblock = format_region(flash, memory, "r", 4096)
    fill_table(BlockingFlash(flash, memory), superblock, shuffled=True, seed=5)
    numbers = random.Random(damage)
    for _ in range(damage):
        place = superblock.geometry.table_offset + numbers.randrange(SLOTS * 64)
        flash.content[place] ^= 1 << numbers.randrange(8)
    indices: list[SlotIndex] = []
    for library in (native_load.LIBRARY, None):
        monkeypatch.setattr(native_load, "LIBRARY", library)
        region = open_region(flash, memory)
        assert SLOTS - damage <= region.recovered <= SLOTS
        assert region.dropped == SLOTS - region.recovered
        indices.append(region.index)
    native, numpy = indices
    used = np.flatnonzero(native.flags)
    for column in COLUMNS:
        assert (getattr(native, column) == getattr(numpy, column)).all(), column
    assert (native.namespace_digests(native.namespace[used]) == numpy.namespace_digests(numpy.namespace[used])).all()
    assert sorted(native.namespace_bytes.tolist()) == sorted(numpy.namespace_bytes.tolist())
    for index in indices:
        assert (index.find(index.key_lo[used], index.key_hi[used], index.namespace[used]) == used).all()
        assert (index.find(index.key_lo[used] + np.uint64(1), index.key_hi[used], index.namespace[used]) == -1).all()
