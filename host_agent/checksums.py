"""XXH3-64 of a batch's blocks in the caller's memory: claimed with a STORE, compared after a RETRIEVE.

Capsule by capsule, so that it overlaps with what the DPUs do meanwhile: a capsule of a STORE goes out while the next
one's checksums are computed, and what a RETRIEVE brought is compared while other capsules' bytes still travel. Always
in the calling thread, under no lock. Used by `host_agent.calls` (makes) and `host_agent.progress` (`step`).
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Final

import xxhash

from common import wire
from common.status import Status
from host_agent.memory import Spans
from host_agent.operation import Operation, Request

CAPSULE_BYTES: Final = 4 << 20
"""Of blocks in one capsule, where checksums are wanted: enough that a capsule more costs little, and few enough that
what is left to compare after the last bytes have come is little as well."""
_ANSWER: Final = struct.Struct("<BxxxIQ")
_unpack = _ANSWER.unpack_from
_xxh3 = xxhash.xxh3_64_intdigest
_CHECKSUM: Final = struct.Struct("<Q")
_ANSWER_BYTES: Final = wire.RESULT.itemsize
_ENTRY_BYTES: Final = wire.BLOCK_ENTRY.itemsize
_CHECKSUM_AT: Final = dict(wire.BLOCK_ENTRY.fields or {})["checksum"][1]


def checksum(pieces: list[memoryview]) -> int:
    """Of the pieces one after the other."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


class Checksums:
    """Of the blocks that `spans` names, which are those of `operation`."""

    def __init__(self, operation: Operation, spans: Spans) -> None:
        self._operation = operation
        self._spans = spans
        self._view: memoryview | None = None
        self._places: list[int] = []
        self._sizes: list[int] = []

    def seal(self, request: Request) -> None:
        """Write the checksums of a STORE's blocks into its capsule, which was not sent yet."""
        view = self._whole_view()
        for number, block in enumerate(self._operation.blocks(request)):
            if view is None:
                claimed = checksum(self._spans.pieces(block))
            else:
                at = self._places[block]
                claimed = _xxh3(view[at : at + self._sizes[block]])
            _CHECKSUM.pack_into(request.body, number * _ENTRY_BYTES + _CHECKSUM_AT, claimed)

    def compare_as_they_come(self) -> None:
        """Before anything of a RETRIEVE is submitted."""
        self._operation.arrived = deque()
        self._operation.check = self.step

    def step(self) -> bool:
        """Compare what one capsule brought with what the DPU states, CORRUPT where they differ. False: there is none
        at present."""
        operation = self._operation
        if not operation.arrived:
            return False
        raw = operation.raw
        view = self._whole_view()
        places, sizes = self._places, self._sizes
        for block in operation.blocks(operation.arrived.popleft()):
            status, length, stated = _unpack(raw, block * _ANSWER_BYTES)
            if status:
                continue
            if view is None:
                agree = self._agree(block, length, stated)
            else:
                at = places[block]
                agree = length <= sizes[block] and _xxh3(view[at : at + length]) == stated
            if not agree:
                raw[block * _ANSWER_BYTES] = Status.CORRUPT
        return True

    def _agree(self, block: int, length: int, stated: int) -> bool:
        left = length
        pieces: list[memoryview] = []
        for piece in self._spans.pieces(block):
            pieces.append(piece[:left])
            left -= len(pieces[-1])
        return not left and checksum(pieces) == stated

    def _whole_view(self) -> memoryview | None:
        """Of the memory, where all blocks are in one piece of one memory: it spares numpy's cost of each number. None
        elsewhere. Fills places and sizes."""
        spans = self._spans
        if spans.starts is not None or spans.which is not None or not len(spans):
            return None
        if self._view is None:
            memory = spans.memories[0]
            self._places = [address - memory.address for address in spans.addresses.tolist()]
            self._sizes = spans.lengths.tolist()
            self._view = memory.view
        return self._view


def capsule_blocks(spans: Spans) -> int:
    """How many blocks one capsule takes, where their checksums are wanted."""
    largest = int(spans.block_bytes.max()) if len(spans) else 0
    return min(wire.MAX_BATCH, max(1, CAPSULE_BYTES // max(largest, 1)))
