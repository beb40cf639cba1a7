"""Capsules: the request and response messages of the data path, little-endian, fixed-size entries.

A capsule is a 40-byte header, `entry_count` entries of one layout, and (requests only) `sge_count` 16-byte
scatter/gather elements. A batch is encoded and decoded as one numpy structured array, never entry by entry.
A reader refuses what it does not know (magic, version, operation, entry size, lengths that do not add up,
reserved bits) with `WireError`, which carries the status to answer with. Nothing is read past the buffer.
Layouts are held by the golden files in tests/golden/wire.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from common.status import Status

Entries: TypeAlias = npt.NDArray[np.void]
"""A structured array of one of the layouts below."""
ReadableBuffer: TypeAlias = bytes | bytearray | memoryview

VERSION = 1
MAGIC = 0x4E45
MAX_CAPSULE_BYTES = 65536
MAX_BATCH = 512
"""Entries in one capsule; a client splits larger batches."""
MAX_SGES_PER_ENTRY = 64
KEY_BYTES = 16

_HEADER = struct.Struct("<HBBHBBHHHHIIQQ")
HEADER_BYTES = _HEADER.size

CONNECT_DATA = struct.Struct("<Q16s")
"""Private data of an agent's connection request: session id, token."""
ACCEPT_DATA = struct.Struct("<HI16s")
"""Private data of the region's acceptance: credits (capsules that may be outstanding), slot_bytes, the region's uuid.
The agent compares the last two with what the control plane said: an address may have passed to another region."""


class Op(IntEnum):
    STORE = 1
    RETRIEVE = 2
    LOOKUP = 3
    PREFETCH = 4
    LEASE = 5
    RELEASE = 6
    PIN = 7
    UNPIN = 8
    TOUCH = 9
    DELETE = 10
    LIST = 11
    STAT = 12
    CANCEL = 13


class Flags(IntFlag):
    """Header flags."""

    NONE = 0
    RESPONSE = 1
    UNTIL_FLASH = 2
    """STORE: answer when the block and its slot-table entry are on media, not when it is staged."""
    TO_HOST = 4
    """PREFETCH: deliver into the destination each entry names; without it, only stage on the DPU."""
    ALL_NAMESPACES = 8
    """LIST: every namespace this session has opened."""


class EntryFlags(IntFlag):
    """Per-entry flags of STORE, RETRIEVE and PREFETCH."""

    NONE = 0
    HAS_CHECKSUM = 1
    """STORE: `checksum` is the XXH3-64 of the value; the DPU compares it with what it read."""
    WANT_CHECKSUM = 2
    """RETRIEVE of a range: answer the XXH3-64 of the delivered bytes (a whole block's is always answered)."""


class StatId(IntEnum):
    """Counters and gauges of one region, as STAT answers them. Append, never renumber."""

    SLOTS = 1
    SLOTS_USED = 2
    SLOT_BYTES = 3
    FRAMES = 4
    FRAMES_FREE = 5
    FRAMES_DIRTY = 6
    FRAMES_BUSY = 7
    LEASES = 8
    PINS = 9
    SESSIONS = 10
    PENDING = 11
    STORES = 20
    STORE_BYTES = 21
    STORE_EXISTS = 22
    STORE_REFUSED = 23
    RETRIEVES = 24
    RETRIEVE_BYTES = 25
    RETRIEVE_STAGED = 26
    RETRIEVE_COLD = 27
    RETRIEVE_MISSES = 28
    LOOKUPS = 29
    LOOKUP_HITS = 30
    PREFETCHES = 31
    DELETES = 32
    EVICTIONS = 40
    EXPIRED = 41
    CHECKSUM_MISMATCHES = 42
    FLASH_READ_BYTES = 43
    FLASH_WRITE_BYTES = 44
    TABLE_WRITE_BYTES = 45
    DISCARDED_BYTES = 46
    FLASH_ERRORS = 47
    TRANSFER_ERRORS = 48
    NOT_ADMITTED = 49
    DENIED = 50
    BAD_CAPSULES = 51
    REGION_GENERATION = 60
    RECOVERED = 61
    RECOVERY_DROPPED = 62
    USED_BYTES = 63
    SLOTS_FREE = 64
    SLOTS_IN_TRANSIT = 65
    """Of stores and discards under way; used + free + in transit is all slots, always."""
    STALE_COMPLETIONS = 66
    """Completions of flash for requests that were answered already, or never made: ignored."""


def _layout(fields: list[tuple[str, str]], size: int) -> np.dtype[np.void]:
    layout = np.dtype(fields)
    if layout.itemsize != size:
        raise TypeError(f"wire layout is {layout.itemsize} bytes, not {size}")
    return layout


_KEY = [("key_lo", "<u8"), ("key_hi", "<u8")]

BLOCK_ENTRY = _layout(
    [
        *_KEY,
        ("namespace", "<u4"),
        ("length", "<u4"),
        ("offset", "<u4"),
        ("flags", "<u2"),
        ("sge_count", "<u2"),
        ("address", "<u8"),
        ("rkey", "<u4"),
        ("ttl_s", "<u4"),
        ("checksum", "<u8"),
        ("reserved", "<u8"),
    ],
    64,
)
"""STORE, RETRIEVE, PREFETCH. `length` is the value's (STORE) or the number of bytes wanted (0: from `offset` to
the end). With `sge_count` 1 the memory is (`address`, `rkey`); above, `address` is the index of the first of
`sge_count` elements of the capsule's list; 0 only for a PREFETCH that stages on the DPU. For RETRIEVE with one
element its size is what is wanted; where `length` is 0 the destination must hold the whole `slot_bytes`."""

KEY_ENTRY = _layout([*_KEY, ("namespace", "<u4"), ("argument", "<u4")], 24)
"""LOOKUP, LEASE, PIN, UNPIN, TOUCH, DELETE. `argument`: LEASE its time in ms, PIN its TTL in s, else 0."""

RELEASE_ENTRY = _layout([("lease_id", "<u8"), ("generation", "<u4"), ("reserved", "<u4")], 16)

LIST_REQUEST = _layout([("cursor", "<u8"), ("namespace", "<u4"), ("limit", "<u4")], 16)
"""One entry. `cursor` 0 starts; the response's header `aux` is the next cursor, 0 at the end."""

CANCEL_ENTRY = _layout([("request_id", "<u8")], 8)
EMPTY_ENTRY = _layout([("reserved", "<u8")], 8)

RESULT = _layout([("status", "u1"), ("state", "u1"), ("flags", "<u2"), ("length", "<u4"), ("checksum", "<u8")], 16)
"""STORE, RETRIEVE, PREFETCH, RELEASE, PIN, UNPIN, TOUCH, DELETE, CANCEL. `length` is what was moved, or the
block's whole length where the status is BAD_RANGE; `checksum` the XXH3-64 of what was moved, or 0."""

LOOKUP_RESULT = _layout([("status", "u1"), ("state", "u1"), ("reserved", "<u2"), ("length", "<u4")], 8)
"""LOOKUP; the response's header `aux` is the length of the longest present prefix."""

LEASE_RESULT = _layout(
    [
        ("status", "u1"),
        ("state", "u1"),
        ("reserved", "<u2"),
        ("length", "<u4"),
        ("address", "<u8"),
        ("rkey", "<u4"),
        ("generation", "<u4"),
        ("lease_id", "<u8"),
        ("checksum", "<u8"),
        ("duration_ms", "<u4"),
        ("reserved2", "<u4"),
    ],
    48,
)
LIST_RESULT = _layout(
    [
        *_KEY,
        ("namespace", "<u4"),
        ("length", "<u4"),
        ("state", "u1"),
        ("pinned", "u1"),
        ("reserved", "<u2"),
        ("age_s", "<u4"),
        ("ttl_s", "<u4"),
        ("reserved2", "<u4"),
    ],
    40,
)
STAT_RESULT = _layout([("stat_id", "<u4"), ("reserved", "<u4"), ("value", "<u8")], 16)
SGE = _layout([("address", "<u8"), ("length", "<u4"), ("rkey", "<u4")], 16)

REQUEST_LAYOUT: dict[int, np.dtype[np.void]] = {
    Op.STORE: BLOCK_ENTRY,
    Op.RETRIEVE: BLOCK_ENTRY,
    Op.PREFETCH: BLOCK_ENTRY,
    Op.LOOKUP: KEY_ENTRY,
    Op.LEASE: KEY_ENTRY,
    Op.RELEASE: RELEASE_ENTRY,
    Op.PIN: KEY_ENTRY,
    Op.UNPIN: KEY_ENTRY,
    Op.TOUCH: KEY_ENTRY,
    Op.DELETE: KEY_ENTRY,
    Op.LIST: LIST_REQUEST,
    Op.STAT: EMPTY_ENTRY,
    Op.CANCEL: CANCEL_ENTRY,
}
RESPONSE_LAYOUT: dict[int, np.dtype[np.void]] = {
    Op.STORE: RESULT,
    Op.RETRIEVE: RESULT,
    Op.PREFETCH: RESULT,
    Op.LOOKUP: LOOKUP_RESULT,
    Op.LEASE: LEASE_RESULT,
    Op.RELEASE: RESULT,
    Op.PIN: RESULT,
    Op.UNPIN: RESULT,
    Op.TOUCH: RESULT,
    Op.DELETE: RESULT,
    Op.LIST: LIST_RESULT,
    Op.STAT: STAT_RESULT,
    Op.CANCEL: RESULT,
}
_REQUEST_BYTES = {op: layout.itemsize for op, layout in REQUEST_LAYOUT.items()}
_SGE_BYTES = SGE.itemsize
_U32_MAX = 0xFFFFFFFF
_ALL_FLAGS = int(Flags.RESPONSE | Flags.UNTIL_FLASH | Flags.TO_HOST | Flags.ALL_NAMESPACES)
_STATUSES = {int(status): status for status in Status}
_OPS = {int(op): op for op in Op}
_RESPONSE = int(Flags.RESPONSE)


class WireError(Exception):
    """A capsule that is refused. `request_id` and `op` are 0 where not even they could be read."""

    def __init__(self, status: Status, detail: str, op: int = 0, request_id: int = 0) -> None:
        super().__init__(f"capsule refused ({status.name}): {detail}")
        self.status = status
        self.op = op
        self.request_id = request_id


class Capsule(NamedTuple):
    """A decoded capsule. `entries` and `sges` are views of the buffer it was decoded from."""

    op: Op
    flags: int
    """Of `Flags`; a plain number, since `IntFlag` arithmetic costs a microsecond."""
    status: Status
    """Of the capsule as a whole; OK in requests. Not OK: `entries` may be empty, and it holds for all."""
    deadline_us: int
    """Requests: time the sender still gives, counted from arrival; 0 means the receiver's own default."""
    request_id: int
    aux: int
    entries: Entries
    sges: Entries


_NO_SGES: Entries = np.zeros(0, SGE)


def encode(
    op: Op,
    request_id: int,
    entries: Entries,
    *,
    sges: Entries | None = None,
    flags: Flags = Flags.NONE,
    status: Status = Status.OK,
    deadline_us: int = 0,
    aux: int = 0,
) -> bytes:
    """One capsule. Raises ValueError when it would not fit MAX_CAPSULE_BYTES or MAX_BATCH, or the layout is
    not the operation's."""
    layout = (RESPONSE_LAYOUT if int(flags) & _RESPONSE else REQUEST_LAYOUT)[op]
    if entries.dtype != layout:
        raise ValueError(f"{op.name} takes other entries than these")
    count = len(entries)
    sge_count = 0 if sges is None else len(sges)
    size = HEADER_BYTES + count * layout.itemsize + sge_count * SGE.itemsize
    if count > MAX_BATCH or size > MAX_CAPSULE_BYTES:
        raise ValueError(f"{count} entries and {sge_count} elements make {size} bytes: too large for one capsule")
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        op,
        flags,
        status,
        0,
        count,
        layout.itemsize,
        sge_count,
        0,
        min(deadline_us, 0xFFFFFFFF),
        0,
        request_id,
        aux,
    )
    if sges is None or sge_count == 0:
        return header + entries.tobytes()
    return b"".join((header, entries.tobytes(), sges.tobytes()))


def write_request(
    place: memoryview,
    op: Op,
    request_id: int,
    body: ReadableBuffer,
    count: int,
    *,
    sge_count: int = 0,
    flags: int = 0,
    deadline_us: int = 0,
) -> int:
    """As `encode`, into `place`, of a request whose `count` entries and `sge_count` elements are bytes already. The
    size of the capsule. Raises ValueError when it would not fit, or `body` has another size."""
    entry_bytes = _REQUEST_BYTES[op]
    body_bytes = count * entry_bytes + sge_count * _SGE_BYTES
    size = HEADER_BYTES + body_bytes
    if body_bytes != len(body) or count > MAX_BATCH or size > len(place):
        raise ValueError(
            f"{op.name}: {len(body)} bytes are not {count} entries and {sge_count} elements of one capsule"
        )
    deadline_us = deadline_us if deadline_us < _U32_MAX else _U32_MAX
    _HEADER.pack_into(
        place, 0, MAGIC, VERSION, op, flags, 0, 0, count, entry_bytes, sge_count, 0, deadline_us, 0, request_id, 0
    )
    place[HEADER_BYTES:size] = body
    return size


def decode_request(buffer: ReadableBuffer) -> Capsule:
    """Raises WireError."""
    return _decode(buffer, response=False)


def decode_response(buffer: ReadableBuffer) -> Capsule:
    """Raises WireError."""
    return _decode(buffer, response=True)


def _decode(buffer: ReadableBuffer, *, response: bool) -> Capsule:
    size = len(buffer)
    if size < HEADER_BYTES:
        raise WireError(Status.BAD_REQUEST, f"{size} bytes, shorter than a header")
    (
        magic,
        version,
        op,
        flags,
        status,
        reserved0,
        count,
        entry_bytes,
        sge_count,
        reserved1,
        deadline_us,
        reserved2,
        request_id,
        aux,
    ) = _HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise WireError(Status.BAD_REQUEST, f"magic 0x{magic:04x}")
    if version != VERSION:
        raise WireError(Status.BAD_VERSION, f"version {version}, this side speaks {VERSION}", op, request_id)
    layout = (RESPONSE_LAYOUT if response else REQUEST_LAYOUT).get(op)
    if layout is None:
        raise WireError(Status.UNSUPPORTED, f"operation {op}", op, request_id)
    if flags & ~_ALL_FLAGS or reserved0 or reserved1 or reserved2 or status not in _STATUSES:
        raise WireError(Status.BAD_REQUEST, "reserved bits or unknown flags are set", op, request_id)
    if bool(flags & _RESPONSE) is not response:
        raise WireError(Status.BAD_REQUEST, "a response where a request belongs, or the reverse", op, request_id)
    if entry_bytes != layout.itemsize or count > MAX_BATCH or (response and sge_count):
        raise WireError(Status.BAD_REQUEST, f"{count} entries of {entry_bytes} bytes", op, request_id)
    sge_offset = HEADER_BYTES + count * entry_bytes
    if sge_offset + sge_count * SGE.itemsize != size:
        raise WireError(Status.BAD_REQUEST, f"lengths do not add up to {size} bytes", op, request_id)
    entries = np.frombuffer(buffer, layout, count, HEADER_BYTES)
    sges = np.frombuffer(buffer, SGE, sge_count, sge_offset) if sge_count else _NO_SGES
    return Capsule(_OPS[op], flags, _STATUSES[status], deadline_us, request_id, aux, entries, sges)


def keys_array(keys: list[bytes] | tuple[bytes, ...], layout: np.dtype[np.void] = KEY_ENTRY) -> Entries:
    """Zeroed entries of `layout` with their keys set. Each key is KEY_BYTES bytes."""
    joined = b"".join(keys)
    if len(joined) != len(keys) * KEY_BYTES or any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"a block key is {KEY_BYTES} bytes")
    pairs = np.frombuffer(joined, "<u8").reshape(-1, 2)
    entries = np.zeros(len(keys), layout)
    entries["key_lo"] = pairs[:, 0]
    entries["key_hi"] = pairs[:, 1]
    return entries


def key_bytes(entry: Any) -> bytes:
    """The 16-byte key of one entry."""
    return int(entry["key_lo"]).to_bytes(8, "little") + int(entry["key_hi"]).to_bytes(8, "little")
