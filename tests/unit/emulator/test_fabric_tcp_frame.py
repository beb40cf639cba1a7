"""Frames of emu-tcp: what is written is read, and anything else is a FrameError and nothing worse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doca_shims.api import WcStatus
from emulator.fabric_core import MAX_MESSAGE_BYTES, MAX_PRIVATE_DATA_BYTES, MAX_TRANSFER_BYTES
from emulator.fabric_tcp_frame import (
    GREETING_BYTES,
    HEADER_BYTES,
    FrameError,
    FrameKind,
    GreetingKind,
    pack_greeting,
    pack_header,
    unpack_greeting,
    unpack_header,
)

_u32 = st.integers(0, 0xFFFFFFFF)
_u64 = st.integers(0, 0xFFFFFFFFFFFFFFFF)


@given(st.sampled_from(FrameKind), st.integers(0, 1), _u32, _u32, _u32, _u64, st.integers(0, MAX_MESSAGE_BYTES))
def test_round_trip(
    kind: FrameKind, ask: int, sequence: int, posted: int, rkey: int, address: int, length: int
) -> None:
    request = kind in (FrameKind.WRITE, FrameKind.READ, FrameKind.SEND)
    code = int(WcStatus.REM_ACCESS_ERR) if kind is FrameKind.NAK else ask if request else 0
    length = 0 if kind in (FrameKind.ACK, FrameKind.NAK, FrameKind.CREDIT) else length
    packed = pack_header(kind, code, sequence, posted, rkey, address, length)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == (kind, code, sequence, posted, rkey, address, length)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_an_error(packed: bytes) -> None:
    try:
        header = unpack_header(packed)
    except FrameError:
        return
    assert header.length <= MAX_TRANSFER_BYTES


@given(st.sampled_from(FrameKind), st.data())
def test_any_damage_to_a_good_header_is_a_header_or_an_error(kind: FrameKind, data: st.DataObject) -> None:
    code = int(WcStatus.REM_OP_ERR) if kind is FrameKind.NAK else 0
    packed = bytearray(pack_header(kind, code, 1, 2, 3, 4, 0))
    for position in data.draw(st.lists(st.integers(0, HEADER_BYTES - 1), min_size=1, max_size=4)):
        packed[position] = data.draw(st.integers(0, 255))
    try:
        header = unpack_header(packed)
    except FrameError:
        return
    assert header.kind is not FrameKind.SEND or header.length <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "packed",
    [
        pack_header(FrameKind.SEND, 0, 0, 0, length=MAX_MESSAGE_BYTES + 1),
        pack_header(FrameKind.WRITE, 0, 0, 0, length=MAX_TRANSFER_BYTES + 1),
        pack_header(FrameKind.ACK, 0, 0, 0, length=1),
        pack_header(FrameKind.ACK, 1, 0, 0),
        pack_header(FrameKind.WRITE, 2, 0, 0),
        pack_header(FrameKind.NAK, int(WcStatus.SUCCESS), 0, 0),
        pack_header(FrameKind.NAK, int(WcStatus.LOC_PROT_ERR), 0, 0),
        bytes(HEADER_BYTES),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(packed: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_header(packed)


@given(st.sampled_from(GreetingKind), _u32, st.binary(max_size=MAX_PRIVATE_DATA_BYTES))
def test_greetings(kind: GreetingKind, posted: int, text: bytes) -> None:
    packed = pack_greeting(kind, posted, text)
    assert unpack_greeting(packed[:GREETING_BYTES]) == (kind, len(text), posted)
    assert packed[GREETING_BYTES:] == text


@given(st.binary(min_size=GREETING_BYTES, max_size=GREETING_BYTES))
def test_any_bytes_are_a_greeting_or_an_error(packed: bytes) -> None:
    try:
        unpack_greeting(packed)
    except FrameError:
        return


def test_a_greeting_with_too_much_text_is_refused() -> None:
    packed = pack_greeting(GreetingKind.HELLO, 0, bytes(MAX_PRIVATE_DATA_BYTES + 1))
    with pytest.raises(FrameError):
        unpack_greeting(packed[:GREETING_BYTES])
