"""Formatting, opening and closing a region on flash: the only code that writes superblocks.

Opening reads the slot table once, in order, never the data, and rebuilds index and eviction order while it reads. A
damaged or unreadable page costs its own entries. Blocking, before the event loop starts and after it ends: the worker
calls it. Afterwards the engine owns what it returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from common.errors import UserError
from doca_shims.api import FlashDevice, Memory
from dpu_app.regions import eviction as policies
from dpu_app.regions.blocking_flash import BlockingFlash
from dpu_app.regions.eviction import EvictionPolicy
from dpu_app.regions.huge_array import give_back_scratch, prepare_scratch
from dpu_app.regions.index import USED, SlotIndex
from dpu_app.regions.superblock import (
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    TABLE_OFFSET,
    UUID_BYTES,
    BlankError,
    Geometry,
    Superblock,
    SuperblockError,
    choose,
    is_blank,
)
from dpu_app.regions.table_reader import TableReader, oldest_first


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
    restore_order: Callable[[], None] | None = None
    """Where the policy's order is still to be restored: does it, in any thread, while nobody else uses the policy.
    Whatever the index held at opening is then in the policy, the oldest first."""


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
    blank = [block.problem is None and is_blank(block.view(io.memory)) for block in io.read_blocks(0, TABLE_OFFSET)]
    if all(blank):
        return
    try:
        present = choose([io.read(offset, SUPERBLOCK_BYTES)[0] for offset in SUPERBLOCK_OFFSETS])[0]
        what = f"the region {present.name!r} (uuid {present.uuid.hex()})" if present else "other data"
    except SuperblockError as error:
        what = f"a region that cannot be opened ({error})"
    raise UserError(f"this flash holds {what}: choose another, or format with force to destroy what is on it")


def read_superblock(flash: FlashDevice, memory: Memory) -> tuple[Superblock, list[str]]:
    """The superblock in force, and a message about each copy that is not valid. Raises SuperblockError when neither
    is, or one is of a newer version; UserError when the flash is smaller than the region."""
    io = BlockingFlash(flash, memory)
    copies: list[bytes] = []
    messages: list[str] = []
    for number, offset in enumerate(SUPERBLOCK_OFFSETS):
        block, problem = io.read(offset, SUPERBLOCK_BYTES)
        copies.append(block if problem is None else b"")
        if problem is not None:
            messages.append(f"superblock copy {number}: cannot be read: {problem}")
    superblock, damage = choose(copies)
    messages += damage
    if superblock is None:
        if all(copy and is_blank(copy) for copy in copies):
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
    flash: FlashDevice,
    memory: Memory,
    eviction: str = policies.DEFAULT,
    *,
    now_s: int | None = None,
    order_later_above_slots: int | None = None,
) -> OpenRegion:
    """Open what is on `flash`, and mark it as in use. `memory` is registered scratch (16 MiB is enough) and free
    again on return. `now_s` defaults to the wall clock. With more blocks than `order_later_above_slots` the eviction
    order is left to `OpenRegion.restore_order`, so that the region can be served meanwhile.

    Raises as `read_superblock` does, and LowerLayerError where the superblock cannot be written; UserError for an
    unknown `eviction`."""
    started_s = time.monotonic()
    superblock, messages = read_superblock(flash, memory)
    index = SlotIndex(superblock.geometry.slots)
    policy = policies.create(eviction, superblock.geometry.slots, index.fingerprint_of)
    prepare_scratch()
    reader = TableReader(superblock, index, int(time.time()) if now_s is None else now_s)
    io = BlockingFlash(flash, memory)
    reader.read(io)
    reader.finish()
    used = index.flags == USED

    def restore_order() -> None:
        policy.bulk_insert(oldest_first(index, used))
        give_back_scratch()

    later = order_later_above_slots is not None and index.used > order_later_above_slots
    if not later:
        restore_order()
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
        messages=messages + reader.messages,
        dirty_pages=sorted(reader.dirty_pages),
        restore_order=restore_order if later else None,
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
