"""The native part of the data path, where it was built (`_batches.c`, docs/adr/0006-native-hot-path.md).

Plain batches to capsules in one pass, and answers back to the caller's order. Whatever is not plain, or all where it is
missing or ENTRESOL_NATIVE=0 switches it off, goes the way of `host_agent.batch` and `host_agent.operation`, with the
same bytes. Used by `host_agent.plan`, `host_agent.link` and `host_agent.operation`.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from common import native, wire
from common.status import Status

MODULE: Any = native.load("host_agent._batches")
"""The native module, or None."""


def _known() -> bytes:
    sizes = [wire.RESPONSE_LAYOUT[op].itemsize if op in wire.RESPONSE_LAYOUT else 0 for op in range(256)]
    return struct.pack("<256H", *sizes) + bytes(number in set(Status) for number in range(256))


KNOWN: Final = _known()
"""What it is told of the answers that there are: sizes of their entries by operation, then which statuses exist."""
