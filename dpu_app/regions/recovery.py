"""Formatting, opening and closing a region on flash: the only code that writes superblocks.

Opening reads the slot table once, in order, never the data, and rebuilds index and eviction order while it reads. A
damaged or unreadable page costs its own entries. Blocking, before the event loop starts and after it ends: the worker
calls it. Afterwards the engine owns what it returns.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from common.errors import UserError
from doca_shims.api import FlashDevice, Memory
from dpu_app.regions import eviction as policies
from dpu_app.regions import slot_table
from dpu_app.regions.blocking_flash import Block, BlockingFlash
from dpu_app.regions.bulk_load import BulkLoad
from dpu_app.regions.eviction import EvictionPolicy
from dpu_app.regions.index import USED, SlotIndex
from dpu_app.regions.superblock import (
    ENTRIES_PER_PAGE,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    TABLE_OFFSET,
    TABLE_PAGE_BYTES,
    UUID_BYTES,
    BlankError,
    Geometry,
    Superblock,
    SuperblockError,
    choose,
    is_blank,
)


@dataclass
class OpenRegion:
    """A region ready to serve. `unverified`: it was not closed in order, so each entry is a claim, to be verified at
    its first read. `recovered` and `dropped` count entries; `dirty_pages` are slot-table pages that name entries
    which were dropped: to be written again before the slots they name are given out."""

    superblock: Superblock
    index: SlotIndex
    policy: EvictionPolicy
    unverified: bool
    recovered: int
    dropped: int
    duration_s: float
    messages: list[str] = field(default_factory=list)
    dirty_pages: list[int] = field(default_factory=list)


def format_region(
    flash: FlashDevice,
    memory: Memory,
    name: str,
    slot_bytes: int,
    force: bool = False,
    *,
    uuid: bytes | None = None,
    now_s: int | None = None,
) -> Superblock:
    """Make an empty region of the whole device. Raises UserError where the device holds anything already, unless
    `force`; LowerLayerError. `uuid` and `now_s` default to random bytes and the wall clock."""
    geometry = Geometry.fit(flash.caps.capacity_bytes, slot_bytes)
    io = BlockingFlash(flash, memory)
    if not force:
        _refuse_foreign(io)
    superblock = Superblock(
        uuid=os.urandom(UUID_BYTES) if uuid is None else uuid,
        generation=1,
        sequence=0,
        clean=True,
        name=name,
        created_s=int(time.time()) if now_s is None else now_s,
        geometry=geometry,
    )
    copies = [superblock, replace(superblock, sequence=1)]
    encoded = [copy.encode() for copy in copies]
    # First nothing may say that here is a region; then the table, then the copies: cut short anywhere, it is blank.
    io.write_zeros(0, geometry.data_offset)
    io.flush()
    for copy, block in zip(copies, encoded):
        io.write(copy.offset, block)
    io.flush()
    return copies[-1]


def _refuse_foreign(io: BlockingFlash) -> None:
    for block in io.read_blocks(0, TABLE_OFFSET):
        view = block.view(io.memory)
        if block.problem is None and is_blank(view):
            continue
        try:
            present = choose([_read_copy(io, offset)[0] for offset in SUPERBLOCK_OFFSETS])[0]
            what = f"the region {present.name!r} (uuid {present.uuid.hex()})" if present else "other data"
        except SuperblockError as error:
            what = f"a region that cannot be opened ({error})"
        raise UserError(f"this flash holds {what}: choose another, or format with force to destroy what is on it")


def _read_copy(io: BlockingFlash, offset: int) -> tuple[bytes, str | None]:
    return io.read(offset, SUPERBLOCK_BYTES)


def read_superblock(flash: FlashDevice, memory: Memory) -> tuple[Superblock, list[str]]:
    """The superblock in force, and a message about each copy that is not valid. Raises SuperblockError when neither
    is, or one is of a newer version; UserError when the flash is smaller than the region."""
    io = BlockingFlash(flash, memory)
    copies: list[bytes] = []
    messages: list[str] = []
    for number, offset in enumerate(SUPERBLOCK_OFFSETS):
        block, problem = _read_copy(io, offset)
        if problem is None:
            copies.append(block)
        else:
            messages.append(f"superblock copy {number} at {offset}: {problem}")
    superblock, damage = choose(copies)
    messages += damage
    if superblock is None:
        if len(copies) == len(SUPERBLOCK_OFFSETS) and all(is_blank(copy) for copy in copies):
            raise BlankError("this flash is blank: format it first")
        raise SuperblockError("no valid superblock, so there is no region to open: " + "; ".join(messages))
    capacity_bytes = flash.caps.capacity_bytes
    if superblock.geometry.capacity_bytes > capacity_bytes:
        raise UserError(
            f"region {superblock.name!r} was formatted for {superblock.geometry.capacity_bytes} bytes and this flash "
            f"has {capacity_bytes}: give it back its size, or format it anew"
        )
    return superblock, messages


def open_region(
    flash: FlashDevice, memory: Memory, eviction: str = policies.DEFAULT, *, now_s: int | None = None
) -> OpenRegion:
    """Open what is on `flash`, and mark it as in use. `memory` is registered scratch (16 MiB is enough) and free
    again on return. `now_s` defaults to the wall clock. Raises as `read_superblock` does, and LowerLayerError where
    the superblock cannot be written; UserError for an unknown `eviction`."""
    started_s = time.monotonic()
    superblock, messages = read_superblock(flash, memory)
    index = SlotIndex(superblock.geometry.slots)
    policy = policies.create(eviction, superblock.geometry.slots)
    reader = _TableReader(superblock, index, int(time.time()) if now_s is None else now_s, messages)
    io = BlockingFlash(flash, memory)
    for block in io.read_blocks(superblock.geometry.table_offset, superblock.geometry.table_bytes):
        reader.add(block, memory)
    reader.finish()
    order = _oldest_first(index)
    policy.bulk_insert(order, index.fingerprints(order))
    # A copy that cannot be read may have said more than this one does.
    unverified = not superblock.clean or bool(messages)
    newest = max(superblock.generation, reader.newest_generation)
    serving = replace(superblock, generation=newest + 1, sequence=superblock.sequence + 1, clean=False)
    _write_superblock(io, serving)
    return OpenRegion(
        superblock=serving,
        index=index,
        policy=policy,
        unverified=unverified,
        recovered=index.used,
        dropped=reader.dropped,
        duration_s=time.monotonic() - started_s,
        messages=messages,
        dirty_pages=sorted(reader.dirty_pages),
    )


def close_region(flash: FlashDevice, memory: Memory, region: OpenRegion) -> None:
    """Say on flash that every entry of the slot table is true: its pages must be written before. Raises
    LowerLayerError, and the region then counts as not closed. Updates `region.superblock`."""
    io = BlockingFlash(flash, memory)
    io.flush()
    superblock = replace(region.superblock, sequence=region.superblock.sequence + 1, clean=True)
    _write_superblock(io, superblock)
    region.superblock = superblock


def _write_superblock(io: BlockingFlash, superblock: Superblock) -> None:
    io.write(superblock.offset, superblock.encode())
    io.flush()


class _TableReader:
    """Takes the blocks of the slot table into the index, in any order."""

    def __init__(self, superblock: Superblock, index: SlotIndex, now_s: int, messages: list[str]) -> None:
        self._superblock = superblock
        self._index = index
        self._now_s = now_s
        self._messages = messages
        self._load = BulkLoad(index)
        self.dropped = 0
        self.newest_generation = 0
        self.dirty_pages: set[int] = set()

    def add(self, block: Block, memory: Memory) -> None:
        geometry = self._superblock.geometry
        page = (block.offset_bytes - geometry.table_offset) // TABLE_PAGE_BYTES
        pages = block.length_bytes // TABLE_PAGE_BYTES
        if block.problem is not None:
            self._messages.append(
                f"slot table pages {page} to {page + pages - 1}: {block.problem}: their entries are lost"
            )
            self.dirty_pages.update(range(page, page + pages))
            return
        first_slot = page * ENTRIES_PER_PAGE
        entries, valid = slot_table.decode_pages(block.view(memory), first_slot, self._superblock.salt)
        valid[max(0, geometry.slots - first_slot) :] = False
        self._drop_damaged(entries, valid, page)
        expires_s = entries["expires_s"]
        expired = valid & (expires_s != 0) & (expires_s <= self._now_s)
        if expired.any():
            valid &= ~expired
            self._drop(np.flatnonzero(expired) + first_slot)
        if valid.all():
            positions = np.arange(len(entries))
        else:
            positions = np.flatnonzero(valid)
            entries = entries[positions]
        if len(positions) == 0:
            return
        self.newest_generation = max(self.newest_generation, int(entries["generation"].max()))
        self._load.add(positions + first_slot, entries, self._namespaces(entries))

    def _drop_damaged(self, entries: slot_table.Entries, valid: slot_table.Mask, page: int) -> None:
        if valid.all():
            return
        damaged = slot_table.damaged(entries, valid)
        if len(damaged):
            pages = np.unique(damaged // ENTRIES_PER_PAGE) + page
            self._messages.append(
                f"{len(damaged)} damaged entries in slot table pages {pages[0]} to {pages[-1]}: dropped"
            )
            self._drop(damaged + page * ENTRIES_PER_PAGE)

    def _drop(self, slots: npt.NDArray[np.int64]) -> None:
        self.dropped += len(slots)
        self.dirty_pages.update(np.unique(slots // ENTRIES_PER_PAGE).tolist())

    def _namespaces(self, entries: slot_table.Entries) -> npt.NDArray[np.uint16]:
        digests, inverse = np.unique(entries["namespace"], return_inverse=True)
        ids = np.array([self._index.namespace_id(digest.tobytes()) for digest in digests], np.int64)
        return ids[inverse.reshape(-1)].astype(np.uint16)

    def finish(self) -> None:
        self._load.finish()
        losers = np.array(self._load.losers, np.int64)
        self._drop(losers)
        for slot in losers.tolist():
            self._index.release(slot)


def _oldest_first(index: SlotIndex) -> npt.NDArray[np.int64]:
    """Slots in use by generation, then time stored."""
    slots = np.flatnonzero(index.flags == USED)
    order = np.lexsort((index.stored_s[slots], index.generation[slots]))
    return slots[order]
