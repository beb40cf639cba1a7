"""The shortest way for batches of one block, where numpy's fixed cost of each array would be most of the time.

Makes the same capsule as `host_agent.batch`, from plain integers. Whatever is unusual (a scatter list, a refusal, a
destination of no length) is left to the general way: every function here may answer None.
"""

from __future__ import annotations

import struct
from typing import Final

from common import wire
from common.errors import UserError
from host_agent.batch import Keys
from host_agent.memory import LENGTH_BYTES_MAX, Spans
from host_agent.registration import Domain

_KEY: Final = struct.Struct("<QQ")
_BLOCK_ENTRY: Final = struct.Struct("<QQIIIHHQIIQQ")
_KEY_ENTRY: Final = struct.Struct("<QQII")


def only_key(keys: Keys) -> tuple[int, int] | None:
    """The halves of the key of a list of one. Raises UserError for a key that is not 16 bytes."""
    if type(keys) is not list or len(keys) != 1:
        return None
    if len(keys[0]) != wire.KEY_BYTES:
        raise UserError(f"a block key is {wire.KEY_BYTES} bytes")
    low, high = _KEY.unpack(keys[0])
    return low, high


def only_span(spans: Spans) -> tuple[int, int] | None:
    """(address, length) of a block in one piece that is not empty."""
    if spans.starts is not None or len(spans.addresses) != 1:
        return None
    length = int(spans.lengths[0])
    return (int(spans.addresses[0]), length) if 0 < length <= LENGTH_BYTES_MAX else None


def block_entry(
    key: tuple[int, int],
    namespace: int,
    place: tuple[int, int],
    spans: Spans,
    domain: Domain,
    *,
    wanted: int,
    offset: int = 0,
    flags: int = 0,
    ttl_s: int = 0,
    checksum: int = 0,
) -> bytes:
    """STORE, RETRIEVE. Raises UserError for memory that is not registered."""
    region = domain.region(spans.memories[0])
    if region is None:
        raise UserError("this memory has been closed, or is registered with another client")
    return _BLOCK_ENTRY.pack(
        key[0], key[1], namespace, wanted, offset, flags, 1, place[0], region.rkey, ttl_s, checksum, 0
    )


def key_entry(key: tuple[int, int], namespace: int, argument: int) -> bytes:
    """LOOKUP, LEASE, PIN, UNPIN, TOUCH, DELETE."""
    return _KEY_ENTRY.pack(key[0], key[1], namespace, argument)
