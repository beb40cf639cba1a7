"""The short way of a large RETRIEVE whose blocks are all staged and go to one piece of memory each: column by column.

What a batch costs per block decides what a core can serve, and here it costs about a third of the general way
(docs/performance.md). Anything else, such as a miss, a cold block, a scatter list, a range that does not fit or
destinations out of order, is left to `load_path`, which answers every case, with the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from common.status import Status
from common.wire import EntryFlags, StatId
from doca_shims.api import RDMA_REQUEST, Opcode
from dpu_app.regions.batch import Batch
from dpu_app.regions.catalogue import Slots
from dpu_app.regions.context import Context
from dpu_app.regions.sessions import TRANSFER_MOVED_MAX, TRANSFER_WRS_MAX, Transfer

_REQUEST = np.dtype(
    [("local", "<u8"), ("remote", "<u8"), ("length", "<u4"), ("lkey", "<u4"), ("rkey", "<u4"), ("reserved", "<u4")]
)
"""`RDMA_REQUEST`, column by column."""
_WANT_CHECKSUM = np.uint16(EntryFlags.WANT_CHECKSUM)


def deliver(context: Context, batch: Batch, slots: Slots) -> bool:
    """Post the WRITEs and, behind them, the answer. False, and nothing is done, for a batch of another kind."""
    window, index = context.window, context.catalogue.index
    entries = batch.capsule.entries
    if batch.remaining != len(slots) or (entries["sge_count"] != 1).any():
        return False
    frame_of = window.frame_of
    frames = [frame_of.get(slot, -1) for slot in slots.tolist()]
    if min(frames) < 0:
        return False
    lengths = index.length[slots].astype(np.int64)
    offsets = entries["offset"].astype(np.int64)
    wanted = entries["length"].astype(np.int64)
    counts = np.where(wanted == 0, lengths - offsets, wanted)
    if (counts <= 0).any() or (offsets + counts > lengths).any():
        return False
    whole = counts == lengths
    if (entries["flags"][~whole] & _WANT_CHECKSUM).any():
        return False
    remote = entries["address"]
    ends = remote + counts.astype(np.uint64)
    if (ends < remote).any() or (remote[1:] < ends[:-1]).any():
        return False
    context.catalogue.count_use(slots)
    window.touch_all(frames)
    window.hold_all(frames)
    context.stats.add(StatId.RETRIEVES, len(frames))
    context.stats.add(StatId.RETRIEVE_STAGED, len(frames))
    answer = _Answer(context, batch, slots, counts, np.where(whole, index.checksum[slots], np.uint64(0)))
    requests = np.zeros(len(frames), _REQUEST)
    requests["local"] = np.array(frames, np.uint64) * np.uint64(window.frame_bytes) + entries["offset"]
    requests["local"] += np.uint64(window.address(0))
    requests["remote"] = remote
    requests["length"] = counts
    requests["lkey"] = batch.connection.window_lkey
    requests["rkey"] = entries["rkey"]
    _post(context, batch, frames, counts.tolist(), requests.tobytes(), answer)
    return True


class _Answer:
    """What is answered once the last WRITE is posted, as it was when the blocks were found: their frames are held."""

    def __init__(
        self,
        context: Context,
        batch: Batch,
        slots: Slots,
        counts: npt.NDArray[np.int64],
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        self._context = context
        self._batch = batch
        self._states = context.catalogue.states_of(slots)
        self._counts = counts
        self._checksums = checksums

    def give(self) -> None:
        results = self._batch.results
        results["state"] = self._states
        results["length"] = self._counts
        results["checksum"] = self._checksums
        self._context.stats.add(StatId.RETRIEVE_BYTES, int(self._counts.sum()))
        self._batch.resolve_vector(np.full(len(results), Status.OK, np.uint8))
        self._batch.close_if_done()


def _post(
    context: Context, batch: Batch, frames: list[int], lengths: list[int], requests: bytes, answer: _Answer
) -> None:
    size = RDMA_REQUEST.size
    for start, stop in _stretches(lengths):
        held = frames[start:stop]
        batch.connection.add(
            Transfer(
                batch,
                Opcode.RDMA_WRITE,
                requests[start * size : stop * size],
                done=lambda _ok, held=held: context.window.unhold_all(held),  # type: ignore[misc]
                posted=answer.give if stop == len(frames) else None,
            )
        )
    context.ready.add(batch.connection.connection_id)


def _stretches(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Of one transfer each: its first entry and the one behind its last."""
    start = moved = 0
    for entry, length in enumerate(lengths):
        if entry > start and (moved + length > TRANSFER_MOVED_MAX or entry - start >= TRANSFER_WRS_MAX):
            yield start, entry
            start, moved = entry, 0
        moved += length
    yield start, len(lengths)
