"""The wire format: golden files, refusal of what is not known, and no crash or over-read on any bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import wire
from common.status import Status
from common.wire import Flags, Op, WireError

GOLDEN = Path(__file__).parents[2] / "golden" / "wire"


def filled(layout: np.dtype[np.void], count: int) -> wire.Entries:
    """Entries whose every byte differs from its neighbours."""
    pattern = np.arange(layout.itemsize * count, dtype=np.uint64)
    return ((pattern * 37 + 11) % 251).astype(np.uint8).view(layout)


def capsules() -> dict[str, bytes]:
    out = {}
    for op in Op:
        request, response = filled(wire.REQUEST_LAYOUT[op], 3), filled(wire.RESPONSE_LAYOUT[op], 2)
        sges = filled(wire.SGE, 2) if op in (Op.STORE, Op.RETRIEVE) else None
        name = op.name.lower()
        out[f"{name}_request"] = wire.encode(op, 0x1122334455667788, request, sges=sges, deadline_us=250_000)
        out[f"{name}_response"] = wire.encode(
            op, 0x1122334455667788, response, flags=Flags.RESPONSE, status=Status.BUSY, aux=0x99
        )
    return out


@pytest.mark.parametrize("name", sorted(capsules()))
def test_golden(name: str) -> None:
    """A change here is a change of the wire format: raise the version, keep the old files."""
    assert capsules()[name].hex() == (GOLDEN / f"{name}.hex").read_text().strip()


@pytest.mark.parametrize("op", list(Op))
def test_round_trip(op: Op) -> None:
    request = filled(wire.REQUEST_LAYOUT[op], 5)
    capsule = wire.decode_request(wire.encode(op, 7, request, flags=Flags.UNTIL_FLASH, deadline_us=2**40, aux=3))
    assert (capsule.op, capsule.request_id, capsule.aux) == (op, 7, 3)
    assert capsule.deadline_us == 2**32 - 1
    assert capsule.flags == Flags.UNTIL_FLASH
    assert capsule.entries.tobytes() == request.tobytes()
    response = filled(wire.RESPONSE_LAYOUT[op], 4)
    answer = wire.decode_response(wire.encode(op, 7, response, flags=Flags.RESPONSE, status=Status.DRAINING))
    assert (answer.status, answer.entries.tobytes()) == (Status.DRAINING, response.tobytes())


@pytest.mark.parametrize(
    ("offset", "value", "status"),
    [
        (0, 0, Status.BAD_REQUEST),  # magic
        (2, 2, Status.BAD_VERSION),
        (3, 99, Status.UNSUPPORTED),  # operation
        (4, 1, Status.BAD_REQUEST),  # a response where a request belongs
        (5, 0x80, Status.BAD_REQUEST),  # unknown flag
        (6, 200, Status.BAD_REQUEST),  # unknown status
        (7, 1, Status.BAD_REQUEST),  # reserved
        (8, 4, Status.BAD_REQUEST),  # count
        (10, 25, Status.BAD_REQUEST),  # entry size
        (12, 1, Status.BAD_REQUEST),  # element count
        (14, 1, Status.BAD_REQUEST),  # reserved
        (20, 1, Status.BAD_REQUEST),  # reserved
    ],
)
def test_what_is_not_known_is_refused(offset: int, value: int, status: Status) -> None:
    capsule = bytearray(wire.encode(Op.LOOKUP, 42, filled(wire.KEY_ENTRY, 3)))
    capsule[offset] = value
    with pytest.raises(WireError) as caught:
        wire.decode_request(capsule)
    assert caught.value.status is status
    assert caught.value.request_id in (0, 42)


def test_limits_of_encoding() -> None:
    with pytest.raises(ValueError, match="too large"):
        wire.encode(Op.LOOKUP, 1, np.zeros(wire.MAX_BATCH + 1, wire.KEY_ENTRY))
    with pytest.raises(ValueError, match="too large"):
        wire.encode(Op.STORE, 1, np.zeros(512, wire.BLOCK_ENTRY), sges=np.zeros(2047, wire.SGE))
    with pytest.raises(ValueError, match="other entries"):
        wire.encode(Op.STORE, 1, np.zeros(1, wire.KEY_ENTRY))
    with pytest.raises(ValueError, match="16 bytes"):
        wire.keys_array([b"short"])


def test_keys_survive() -> None:
    keys = [bytes(range(i, i + 16)) for i in range(5)]
    assert [wire.key_bytes(entry) for entry in wire.keys_array(keys)] == keys


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes(data: bytes, response: bool) -> None:
    decode = wire.decode_response if response else wire.decode_request
    with pytest.raises(WireError) as caught:  # no 400 random bytes begin with the magic
        decode(data)
    assert caught.value.status in (Status.BAD_REQUEST, Status.BAD_VERSION, Status.UNSUPPORTED)


@given(st.sampled_from(sorted(capsules())), st.data())
def test_any_change_of_a_good_capsule(name: str, data: st.DataObject) -> None:
    """Flipped, cut or lengthened: refused, or decoded within the buffer."""
    good = bytearray(capsules()[name])
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good) + 8))
    buffer = bytes(good[:cut]).ljust(cut, b"\xff")
    try:
        capsule = (wire.decode_response if name.endswith("response") else wire.decode_request)(buffer)
    except WireError:
        return
    size = wire.HEADER_BYTES + capsule.entries.nbytes + capsule.sges.nbytes
    assert size == len(buffer)
