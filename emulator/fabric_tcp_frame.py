"""Frames of emu-tcp: a 32-byte little-endian header, and for some kinds a payload of `length` bytes.

Requests (WRITE, READ, SEND) carry a sequence number; responses (ACK, NAK, DATA) name the request they answer,
and by that every earlier one. Every header says how many receives its sender has posted, so that a SEND leaves
only where one waits. What does not parse raises FrameError, and the connection ends: nothing is resynchronised.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from doca_shims.api import WcStatus
from emulator.fabric_core import MAX_MESSAGE_BYTES, MAX_PRIVATE_DATA_BYTES, MAX_TRANSFER_BYTES

HEADER = struct.Struct("<HBBIIIQII")
"""Magic, kind, code, sequence, posted, rkey, address, length, and 0."""
HEADER_BYTES = HEADER.size
MAGIC = 0x5445
CODE_OFFSET = 3

_GREETING = struct.Struct("<12sBxHI")
GREETING_BYTES = _GREETING.size
_GREETING_MAGIC = b"entresol-t-1"
REASON_BYTES_MAX = 1024


class FrameKind(IntEnum):
    WRITE = 1
    READ = 2
    SEND = 3
    ACK = 4
    NAK = 5
    DATA = 6
    CREDIT = 7


class Header(NamedTuple):
    """`code` is 1 in a request that wants to be acknowledged, and a `WcStatus` in a NAK."""

    kind: FrameKind
    code: int
    sequence: int
    posted: int
    rkey: int
    address: int
    length: int


class GreetingKind(IntEnum):
    HELLO = 1
    READY = 2
    REJECTED = 3


class FrameError(Exception):
    """The peer sent something that is not of this protocol."""


_new = tuple.__new__
_KINDS: tuple[FrameKind | None, ...] = (None, *FrameKind, *(None,) * (255 - len(FrameKind)))
_LENGTH_MAX = (0, MAX_TRANSFER_BYTES, MAX_TRANSFER_BYTES, MAX_MESSAGE_BYTES, 0, 0, MAX_TRANSFER_BYTES, 0)
"""Both by the kind's number: an enumeration's hash is computed in Python."""
_NAK_CODES = frozenset(
    int(status)
    for status in (
        WcStatus.REM_ACCESS_ERR,
        WcStatus.REM_INV_REQ_ERR,
        WcStatus.REM_OP_ERR,
        WcStatus.RNR_RETRY_EXC_ERR,
    )
)


def pack_header(
    kind: FrameKind, code: int, sequence: int, posted: int, rkey: int = 0, address: int = 0, length: int = 0
) -> bytes:
    return HEADER.pack(MAGIC, kind, code, sequence, posted, rkey, address, length, 0)


def unpack_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """The header that begins at `offset`. Raises FrameError."""
    magic, number, code, sequence, posted, rkey, address, length, reserved = HEADER.unpack_from(buffer, offset)
    kind = _KINDS[number]
    if magic != MAGIC or kind is None or reserved:
        raise FrameError(f"magic 0x{magic:04x}, kind {number}, reserved {reserved}")
    if length > _LENGTH_MAX[number]:
        raise FrameError(f"{kind.name} of {length} bytes")
    if kind is FrameKind.NAK:
        if code not in _NAK_CODES:
            raise FrameError(f"NAK with status {code}")
    elif code and (code > 1 or number > FrameKind.SEND):
        raise FrameError(f"{kind.name} with code {code}")
    return _new(Header, (kind, code, sequence, posted, rkey, address, length))


def pack_greeting(kind: GreetingKind, posted: int, text: bytes) -> bytes:
    return _GREETING.pack(_GREETING_MAGIC, kind, len(text), posted) + text


def unpack_greeting(buffer: bytes | bytearray) -> tuple[GreetingKind, int, int]:
    """(kind, length of the text that follows, receives posted). Raises FrameError."""
    magic, number, length, posted = _GREETING.unpack(buffer)
    if magic != _GREETING_MAGIC or number not in tuple(GreetingKind):
        raise FrameError("not a greeting of this protocol")
    kind = GreetingKind(number)
    if length > (REASON_BYTES_MAX if kind is GreetingKind.REJECTED else MAX_PRIVATE_DATA_BYTES):
        raise FrameError(f"{kind.name} with {length} bytes")
    return kind, length, posted
