"""The window: a region's frames in registered DPU memory, and which block each one holds.

A frame is FREE, FILLING (an RDMA READ is writing it), LOADING (flash is), DIRTY (whole, not yet on flash) or
CLEAN (whole, and on flash too). Only a CLEAN frame that nobody references is ever given to another block. After
the frames lie a few table pages, the aligned buffers of slot-table writes. Owned by one region engine.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import InternalError, UserError
from common.status import BlockState
from dpu_app.regions import hot_path
from dpu_app.regions.eviction.slot_queue import Links, SlotQueue
from dpu_app.regions.superblock import TABLE_PAGE_BYTES

TABLE_BUFFERS = 16
RECLAIM_STEPS_MAX = 64
"""Frames in use that one search for another passes by; then it takes any."""


def aligned_length(length: int) -> int:
    """What a value of `length` bytes takes on flash."""
    return -(-length // TABLE_PAGE_BYTES) * TABLE_PAGE_BYTES


class FrameState(IntEnum):
    FREE = 0
    FILLING = 1
    LOADING = 2
    DIRTY = 3
    CLEAN = 4
    DOOMED = 5
    """The block is gone; the frame is free as soon as nobody references it."""


_FREE, _FILLING, _LOADING, _DIRTY, _CLEAN, _DOOMED = (int(state) for state in FrameState)
_STAGED, _STAGED_AND_FLASH = int(BlockState.STAGED), int(BlockState.STAGED_AND_FLASH)
"""Plain numbers: writing an enumeration's member into an array takes several times as long."""


@dataclass(frozen=True)
class WindowLayout:
    """How many frames a window of so many bytes holds, and how large its memory must be."""

    frames: int
    frame_bytes: int

    @classmethod
    def fit(cls, window_bytes: int, slot_bytes: int) -> WindowLayout:
        frames = window_bytes // slot_bytes
        if frames < 4:
            raise UserError(
                f"a window of {window_bytes} bytes holds {frames} frames of {slot_bytes} bytes; "
                f"give the region a window of at least {4 * slot_bytes} bytes"
            )
        return cls(frames, slot_bytes)

    @property
    def memory_bytes(self) -> int:
        return self.frames * self.frame_bytes + TABLE_BUFFERS * TABLE_PAGE_BYTES


class Window:
    """`address` and `view` are the memory's; `view` has `layout.memory_bytes` bytes."""

    def __init__(self, layout: WindowLayout, address: int, view: memoryview) -> None:
        self.layout = layout
        self.frame_bytes = layout.frame_bytes
        self._base = address
        self._view = view
        self._free = list(range(layout.frames - 1, -1, -1))
        links = Links(layout.frames)
        self._clean = SlotQueue(links)  # of frames, the least recently used at its tail
        self.state = bytearray(layout.frames)
        """FrameState of each frame."""
        self.slot = array("q", [-1]) * layout.frames
        self.references = array("I", [0]) * layout.frames
        self.generation = [0] * layout.frames
        self._block_state = np.full(layout.frames + 1, BlockState.FLASH, np.uint8)
        """Per frame, of the block in it; the last is that of a block in no frame, whose frame is -1."""
        self.frames: Any = None
        """The same frames to native code, where it is to be had."""
        if hot_path.LIBRARY is not None:
            self.frames = hot_path.LIBRARY.Frames(self.references, self.state, self._block_state, links.pairs)
        self.frame_of: MutableMapping[int, int] = {} if self.frames is None else self.frames
        """slot -> frame, whole blocks only (DIRTY or CLEAN)."""
        self._block_state_of = self._block_state.data
        self._unsettled = 0  # FILLING and DIRTY
        self._table_buffers = list(range(TABLE_BUFFERS))

    # ---------------------------------------------------------------- addresses

    def address(self, frame: int) -> int:
        return self._base + frame * self.frame_bytes

    def bytes_of(self, frame: int, length: int, offset: int = 0) -> memoryview:
        start = frame * self.frame_bytes + offset
        return self._view[start : start + length]

    def zero_tail(self, frame: int, length: int, aligned: int) -> None:
        """Clear what follows the value up to the aligned length: another tenant's old bytes never reach flash."""
        if aligned > length:
            self.bytes_of(frame, aligned - length, length)[:] = bytes(aligned - length)

    # ---------------------------------------------------------------- counts

    @property
    def unsettled(self) -> int:
        """Frames that hold, or are about to hold, what is not on flash yet."""
        return self._unsettled

    @property
    def free(self) -> int:
        return len(self._free)

    def referenced(self) -> int:
        return int(np.count_nonzero(np.frombuffer(self.references, np.uint32)))

    def block_state(self, slot: int) -> int:
        """BlockState of a block of the region."""
        return self._block_state_of[self.frame_of.get(slot, -1)]

    def block_states(self, slots: Sequence[int]) -> npt.NDArray[np.uint8]:
        """`block_state` of many."""
        frame_of = self.frame_of
        return self._block_state[[frame_of.get(slot, -1) for slot in slots]]

    # ---------------------------------------------------------------- life of a frame

    def take(self, slot: int, state: FrameState) -> int:
        """A frame for `slot` in state FILLING or LOADING, or -1 when all are dirty or referenced."""
        frame = self._free.pop() if self._free else self._reclaim()
        if frame < 0:
            return -1
        self.state[frame] = state
        self.slot[frame] = slot
        self.generation[frame] = (self.generation[frame] + 1) & 0xFFFFFFFF
        if state is FrameState.FILLING:
            self._unsettled += 1
        return frame

    def _reclaim(self) -> int:
        """The clean frame used longest ago that nobody references, or -1. A referenced one that stands before it is in
        use, and goes to the others of which that is true: leases may hold half of the window, and would be passed by
        again and again."""
        for _ in range(min(RECLAIM_STEPS_MAX, self._clean.size)):
            frame = self._clean.tail
            self._clean.remove(frame)
            if self.references[frame] == 0:
                del self.frame_of[self.slot[frame]]
                return frame
            self._clean.push(frame)
        return self._reclaim_any() if self._clean.size else -1

    def _reclaim_any(self) -> int:
        free = np.frombuffer(self.references, np.uint32) == 0
        free &= np.frombuffer(self.state, np.uint8) == FrameState.CLEAN
        frame = int(free.argmax())
        if not free[frame]:
            return -1
        self._clean.remove(frame)
        del self.frame_of[self.slot[frame]]
        return frame

    def fill(self, frame: int) -> None:
        """FILLING -> DIRTY: the block is whole and may be read."""
        self._expect(frame, _FILLING)
        self.state[frame] = _DIRTY
        self.frame_of[self.slot[frame]] = frame
        self._block_state_of[frame] = _STAGED

    def settle(self, frame: int) -> None:
        """DIRTY or LOADING -> CLEAN: the block is whole here and on flash."""
        if self.state[frame] == _DIRTY:
            self._unsettled -= 1
        else:
            self._expect(frame, _LOADING)
        self.state[frame] = _CLEAN
        self.frame_of[self.slot[frame]] = frame
        self._block_state_of[frame] = _STAGED_AND_FLASH
        self._clean.push(frame)

    def drop(self, frame: int) -> None:
        """The block leaves the frame, which is free at once or when its last reference goes."""
        state = self.state[frame]
        if state in (_FREE, _DOOMED):
            raise InternalError(f"frame {frame} dropped twice")
        if state in (_FILLING, _DIRTY):
            self._unsettled -= 1
        if state in (_DIRTY, _CLEAN):
            del self.frame_of[self.slot[frame]]
            if state == _CLEAN:
                self._clean.remove(frame)
        self.slot[frame] = -1
        if self.references[frame]:
            self.state[frame] = _DOOMED
        else:
            self._release(frame)

    def _release(self, frame: int) -> None:
        self.state[frame] = _FREE
        self._free.append(frame)

    def touch(self, frame: int) -> None:
        """Its block was used."""
        if self.frames is not None:
            self.frames.touch(frame)
        elif self.state[frame] == _CLEAN:
            self._clean.remove(frame)
            self._clean.push(frame)

    def touch_all(self, frames: Sequence[int]) -> None:
        for frame in frames:
            self.touch(frame)

    def hold_all(self, frames: Sequence[int]) -> None:
        references = self.references
        for frame in frames:
            references[frame] += 1

    def unhold_all(self, frames: Sequence[int]) -> None:
        for frame in frames:
            self.unhold(frame)

    def unhold_packed(self, frames: bytes) -> None:
        """`unhold_all` of what the hot path held: packed u32."""
        for frame in self.frames.unhold(frames):
            self._release(frame)

    def hold(self, frame: int) -> None:
        self.references[frame] += 1

    def unhold(self, frame: int) -> None:
        if self.references[frame] <= 0:
            raise InternalError(f"frame {frame} released more often than held")
        self.references[frame] -= 1
        if self.references[frame] == 0 and self.state[frame] == _DOOMED:
            self._release(frame)

    def _expect(self, frame: int, state: int) -> None:
        if self.state[frame] != state:
            raise InternalError(f"frame {frame} is {FrameState(self.state[frame]).name}, not {FrameState(state).name}")

    # ---------------------------------------------------------------- table pages

    def take_table_buffer(self) -> int:
        return self._table_buffers.pop() if self._table_buffers else -1

    def give_table_buffer(self, buffer: int) -> None:
        self._table_buffers.append(buffer)

    def table_address(self, buffer: int) -> int:
        return self._base + self._table_offset(buffer)

    def table_bytes(self, buffer: int) -> memoryview:
        offset = self._table_offset(buffer)
        return self._view[offset : offset + TABLE_PAGE_BYTES]

    def _table_offset(self, buffer: int) -> int:
        return self.layout.frames * self.frame_bytes + buffer * TABLE_PAGE_BYTES
