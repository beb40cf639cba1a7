"""Superblocks: what a region is, kept in two copies so that a torn or rotten one costs nothing.

Owns the geometry (where table and slots lie) and the superblock's bytes; never touches a device. `recovery` reads
and writes the copies, the slot table takes its salt from here. Writers alternate the copies by `sequence`, so the
newest valid copy is the state and the other one the state before. The places of magic, version and checksum are the
same in every version: a newer version is told from damage, an older one is read by its own decoder.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from common.errors import UserError

SUPERBLOCK_BYTES = 4096
SUPERBLOCK_OFFSETS = (0, 65536)
TABLE_PAGE_BYTES = 4096
ENTRIES_PER_PAGE = 64
TABLE_OFFSET = 1 << 20
"""Everything before it is the region's preamble: the superblock copies, and room for later versions."""
DATA_ALIGNMENT_BYTES = 1 << 20
SLOT_ALIGNMENT_BYTES = 4096
SLOTS_MIN = 64
SLOTS_MAX = 1 << 31
SLOT_BYTES_MAX = 1 << 30
NAME_BYTES_MAX = 64
UUID_BYTES = 16

MAGIC = b"ENTRSLRG"
VERSION = 1
_PREFIX = struct.Struct("<8sHH4x")
_BODY_V1 = struct.Struct("<16sIIQQQQQQQH64s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = SUPERBLOCK_BYTES - _CHECKSUM.size
_CLEAN = 1


class SuperblockError(UserError):
    """This copy cannot be used: not a superblock, damaged, or contradicting itself."""


class BlankError(SuperblockError):
    """Nothing but zeros: never formatted."""


class NewerVersionError(SuperblockError):
    """Intact, but of a format version this release does not know."""


def is_blank(buffer: bytes | bytearray | memoryview) -> bool:
    """Whether every byte is zero."""
    return not any(buffer) if len(buffer) < 64 else bytes(buffer).count(0) == len(buffer)


def _align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class Geometry:
    """Where things lie on flash, in bytes from its start. `capacity_bytes` is what the region was formatted for."""

    slot_bytes: int
    slots: int
    table_offset: int
    data_offset: int
    capacity_bytes: int

    @classmethod
    def fit(cls, capacity_bytes: int, slot_bytes: int) -> Geometry:
        """As many slots of `slot_bytes` as `capacity_bytes` holds. Raises UserError saying what to change."""
        if slot_bytes <= 0 or slot_bytes % SLOT_ALIGNMENT_BYTES or slot_bytes > SLOT_BYTES_MAX:
            raise UserError(
                f"slot_bytes is {slot_bytes}: make it a multiple of {SLOT_ALIGNMENT_BYTES}, at most {SLOT_BYTES_MAX}"
            )
        slots, too_many = 0, min(max(capacity_bytes, 0) // slot_bytes, SLOTS_MAX) + 1
        while too_many - slots > 1:
            middle = (slots + too_many) // 2
            if cls._data_offset(middle) + middle * slot_bytes <= capacity_bytes:
                slots = middle
            else:
                too_many = middle
        if slots < SLOTS_MIN:
            needed = cls._data_offset(SLOTS_MIN) + SLOTS_MIN * slot_bytes
            raise UserError(
                f"{capacity_bytes} bytes of flash hold {slots} slots of {slot_bytes} bytes, and a region needs "
                f"at least {SLOTS_MIN}: give it {needed} bytes or more, or make slot_bytes smaller"
            )
        return cls(slot_bytes, slots, TABLE_OFFSET, cls._data_offset(slots), capacity_bytes)

    @staticmethod
    def _data_offset(slots: int) -> int:
        return _align_up(TABLE_OFFSET + -(-slots // ENTRIES_PER_PAGE) * TABLE_PAGE_BYTES, DATA_ALIGNMENT_BYTES)

    @property
    def pages(self) -> int:
        """Pages of the slot table."""
        return -(-self.slots // ENTRIES_PER_PAGE)

    @property
    def table_bytes(self) -> int:
        return self.pages * TABLE_PAGE_BYTES

    def slot_offset(self, slot: int) -> int:
        return self.data_offset + slot * self.slot_bytes

    def page_offset(self, page: int) -> int:
        return self.table_offset + page * TABLE_PAGE_BYTES

    def problem(self) -> str | None:
        """What contradicts itself, or None."""
        if not SLOTS_MIN <= self.slots <= SLOTS_MAX:
            return f"{self.slots} slots"
        if self.slot_bytes <= 0 or self.slot_bytes % SLOT_ALIGNMENT_BYTES or self.slot_bytes > SLOT_BYTES_MAX:
            return f"slots of {self.slot_bytes} bytes"
        if self.table_offset < SUPERBLOCK_OFFSETS[-1] + SUPERBLOCK_BYTES or self.table_offset % TABLE_PAGE_BYTES:
            return f"slot table at {self.table_offset}"
        if self.data_offset < self.table_offset + self.table_bytes or self.data_offset % SLOT_ALIGNMENT_BYTES:
            return f"data at {self.data_offset}"
        if self.slot_offset(self.slots) > self.capacity_bytes:
            return f"data beyond {self.capacity_bytes} bytes"
        return None


@dataclass(frozen=True)
class Superblock:
    """`generation` rises at every format and every recovery; `sequence` at every write. `clean`: the region was
    closed in order, so every entry of the slot table is true; otherwise each is a claim to be verified."""

    uuid: bytes
    generation: int
    sequence: int
    clean: bool
    name: str
    created_s: int
    geometry: Geometry

    @property
    def salt(self) -> int:
        """What binds slot-table entries to this region: 64 bits of its uuid."""
        return xxhash.xxh3_64_intdigest(self.uuid)

    @property
    def offset(self) -> int:
        """Where this superblock is written: the copies alternate."""
        return SUPERBLOCK_OFFSETS[self.sequence % len(SUPERBLOCK_OFFSETS)]

    def encode(self) -> bytes:
        """SUPERBLOCK_BYTES bytes. Raises UserError for a name that does not fit."""
        name = self.name.encode()
        if not name or len(name) > NAME_BYTES_MAX or not self.name.isprintable():
            raise UserError(f"region name {self.name!r}: use 1 to {NAME_BYTES_MAX} bytes of printable text")
        geometry = self.geometry
        body = _BODY_V1.pack(
            self.uuid,
            self.generation,
            _CLEAN if self.clean else 0,
            self.sequence,
            self.created_s,
            geometry.slot_bytes,
            geometry.slots,
            geometry.table_offset,
            geometry.data_offset,
            geometry.capacity_bytes,
            len(name),
            name,
        )
        block = (_PREFIX.pack(MAGIC, VERSION, _BODY_V1.size) + body).ljust(_CHECKSUM_OFFSET, b"\0")
        return block + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(block))

    @staticmethod
    def decode(buffer: bytes | bytearray | memoryview) -> Superblock:
        """Raises SuperblockError, its subclass NewerVersionError where only a newer release can read it."""
        block = bytes(buffer)
        if len(block) != SUPERBLOCK_BYTES:
            raise SuperblockError(f"superblock cut short: {len(block)} of {SUPERBLOCK_BYTES} bytes")
        magic, version, body_bytes = _PREFIX.unpack_from(block)
        if magic != MAGIC:
            raise SuperblockError("blank, never formatted" if is_blank(block) else "bad magic: not an Entresol region")
        if xxhash.xxh3_64_intdigest(block[:_CHECKSUM_OFFSET]) != _CHECKSUM.unpack_from(block, _CHECKSUM_OFFSET)[0]:
            raise SuperblockError("bad checksum: the superblock is damaged")
        if version > VERSION:
            raise NewerVersionError(
                f"format version {version} is newer than {VERSION}, the newest that this release reads: upgrade it"
            )
        decoder = _DECODERS.get(version)
        if decoder is None:
            raise SuperblockError(f"format version {version} was never released")
        superblock = decoder(block[_PREFIX.size : _PREFIX.size + body_bytes])
        problem = superblock.geometry.problem()
        if problem is not None:
            raise SuperblockError(f"superblock contradicts itself: {problem}")
        return superblock


def _decode_v1(body: bytes) -> Superblock:
    if len(body) != _BODY_V1.size:
        raise SuperblockError(f"superblock contradicts itself: version 1 with {len(body)} bytes")
    fields = _BODY_V1.unpack(body)
    uuid, generation, flags, sequence, created_s, slot_bytes, slots, table_offset, data_offset, capacity = fields[:10]
    try:
        name = fields[11][: fields[10]].decode()
    except UnicodeDecodeError:
        raise SuperblockError("superblock contradicts itself: the name is not text") from None
    geometry = Geometry(slot_bytes, slots, table_offset, data_offset, capacity)
    return Superblock(uuid, generation, sequence, bool(flags & _CLEAN), name, created_s, geometry)


_DECODERS: dict[int, Callable[[bytes], Superblock]] = {1: _decode_v1}


def choose(copies: Sequence[bytes]) -> tuple[Superblock | None, list[str]]:
    """The newest valid copy, or None, and one message for each copy that is not valid. An empty copy is one that
    could not be read, and whoever tried says why.

    Raises NewerVersionError if any copy is of a newer version: what an older copy says may no longer hold.
    """
    best: Superblock | None = None
    messages: list[str] = []
    for number, copy in enumerate(copies):
        if not copy:
            continue
        try:
            superblock = Superblock.decode(copy)
        except NewerVersionError:
            raise
        except SuperblockError as error:
            messages.append(f"superblock copy {number}: {error}")
            continue
        if best is None or superblock.sequence > best.sequence:
            best = superblock
    return best, messages
