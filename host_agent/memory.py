"""Registered memory: what transfers read from and write to, and how a batch names places in it.

A pool is registered once; every slice of it is then found by its address. Registration with the fabric happens
once for each session's protection domain and again after a session is renewed, without the caller's doing: the
caller holds a `RegisteredMemory`, sessions hold the keys. Never moves a byte.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import UserError
from doca_shims.api import Memory
from host_agent import native_batches
from host_agent.buffers import Buffer, describe, view_of

U64: TypeAlias = npt.NDArray[np.uint64]
LENGTH_BYTES_MAX: Final = (1 << 32) - 1
"""Of one piece of a transfer: the wire carries 32 bits."""
_memory_ids = itertools.count(1)


class RegisteredMemory:
    """A range of this process's memory that a client's sessions may be asked to transfer to and from.

    Close it when no transfer uses it any more; transfers under way then end with TRANSFER_ERROR. A context manager.
    """

    def __init__(
        self, buffer: Buffer, release: Callable[[RegisteredMemory], None], fabric_memory: Memory | None
    ) -> None:
        self.id = next(_memory_ids)
        self.address = buffer.address
        self.length_bytes = buffer.length_bytes
        self.owner = buffer.owner
        self._buffer = buffer
        self._release: Callable[[RegisteredMemory], None] | None = release
        self._fabric_memory = fabric_memory
        self._view: memoryview | None = None
        self.closed = False

    @property
    def view(self) -> memoryview:
        """The bytes, format 'B', writable. Do not use it after `close`."""
        if self._view is None:
            self._view = self._fabric_memory.view if self._fabric_memory is not None else view_of(self._buffer)
        return self._view

    def array(self, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """The bytes as a numpy array that shares them. Do not use it after `close`."""
        return np.frombuffer(self.view, dtype)

    def spans(self, offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> Spans:
        """Pieces of this memory, one a block: byte `offsets` and `lengths`, either of which may be one number.

        Raises UserError when one lies outside the memory.
        """
        if type(offsets) is int and type(lengths) is int and 0 <= lengths <= LENGTH_BYTES_MAX:
            if not 0 <= offsets <= self.length_bytes - lengths:
                raise UserError(f"a piece lies outside the {self.length_bytes} bytes of this memory")
            return Spans((self,), None, _u64(self.address + offsets), _u64(lengths), None)
        starts, sizes = np.broadcast_arrays(np.atleast_1d(offsets), np.atleast_1d(lengths))
        if starts.ndim != 1 or (len(starts) and (starts.dtype.kind not in "iu" or sizes.dtype.kind not in "iu")):
            raise UserError("offsets and lengths are whole numbers in one row")
        starts, sizes = starts.astype(np.int64), sizes.astype(np.int64)  # what the caller has may be too narrow
        if len(starts):
            whole = self.length_bytes
            outside = int(starts.min()) < 0 or int(sizes.min()) < 0 or max(int(starts.max()), int(sizes.max())) > whole
            if outside or int((starts + sizes).max()) > whole:
                raise UserError(f"a piece lies outside the {whole} bytes of this memory")
            if int(sizes.max()) > LENGTH_BYTES_MAX:
                raise UserError(f"a piece is longer than {LENGTH_BYTES_MAX} bytes")
        return Spans((self,), None, starts.astype(np.uint64) + np.uint64(self.address), sizes.astype(np.uint64), None)

    def blocks(self, indices: npt.ArrayLike, block_bytes: int) -> Spans:
        """Pieces of a paged pool: the blocks numbered `indices` of `block_bytes` each. Raises UserError."""
        size = int(block_bytes)
        if isinstance(indices, range):
            numbers = np.arange(indices.start, indices.stop, indices.step)
        else:
            numbers = np.atleast_1d(indices)
        if numbers.size and numbers.dtype.kind not in "iu":
            raise UserError("block numbers are whole numbers")
        there = self.length_bytes // max(size, 1)
        places = numbers.astype(np.uint64)  # block tables are often 32 bits wide; what is negative becomes huge
        if numbers.size and int(places.max()) >= there:
            raise UserError(f"a block lies outside the {there} of this memory")
        if numbers.ndim != 1 or not numbers.size or not 0 < size <= LENGTH_BYTES_MAX:
            return self.spans(places.astype(np.int64) * size, size)
        places *= np.uint64(size)
        places += np.uint64(self.address)
        return Spans((self,), None, places, np.full(len(places), size, np.uint64), None)

    def __getitem__(self, part: slice) -> memoryview:
        return self.view[part]

    def __len__(self) -> int:
        return self.length_bytes

    def close(self) -> None:
        """Deregister everywhere. Idempotent. When it returns no byte can land here any more."""
        release, self._release = self._release, None
        if release is None:
            return
        self.closed = True
        release(self)
        self._view = None
        if self._fabric_memory is not None:
            self._fabric_memory.close()

    def __enter__(self) -> RegisteredMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _u64(value: int) -> U64:
    return np.array((value,), np.uint64)


class Spans:
    """Where the blocks of one batch are: arrays all the way, no object a block.

    Piece i is `lengths[i]` bytes at virtual `addresses[i]`, in `memories[which[i]]` (`which` None: all in the
    first). Block b has the pieces `starts[b]` to `starts[b + 1]`; `starts` None means one piece a block.
    """

    __slots__ = ("addresses", "lengths", "memories", "starts", "which")

    def __init__(
        self,
        memories: tuple[RegisteredMemory, ...],
        which: npt.NDArray[np.intp] | None,
        addresses: U64,
        lengths: U64,
        starts: npt.NDArray[np.intp] | None,
    ) -> None:
        self.memories = memories
        self.which = which
        self.addresses = addresses
        self.lengths = lengths
        self.starts = starts

    def __len__(self) -> int:
        return len(self.addresses) if self.starts is None else len(self.starts) - 1

    @property
    def block_bytes(self) -> U64:
        """Length of each block: the sum of its pieces."""
        if self.starts is None:
            return self.lengths
        totals = np.zeros(len(self.lengths) + 1, np.uint64)
        np.cumsum(self.lengths, out=totals[1:])
        sums: U64 = totals[self.starts[1:]] - totals[self.starts[:-1]]
        return sums

    def pieces(self, block: int) -> list[memoryview]:
        """The bytes of one block, piece by piece."""
        first, last = (block, block + 1) if self.starts is None else self.starts[block : block + 2]
        views: list[memoryview] = []
        for piece in range(int(first), int(last)):
            memory = self.memories[0 if self.which is None else int(self.which[piece])]
            at = int(self.addresses[piece]) - memory.address
            views.append(memory.view[at : at + int(self.lengths[piece])])
        return views


class MemoryTable:
    """All memory registered with one client, found by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._memories: list[RegisteredMemory] = []

    def add(self, memory: RegisteredMemory) -> None:
        with self._lock:
            at = bisect.bisect_right(self._starts, memory.address)
            self._starts.insert(at, memory.address)
            self._memories.insert(at, memory)

    def remove(self, memory: RegisteredMemory) -> None:
        with self._lock:
            at = self._memories.index(memory)
            del self._starts[at], self._memories[at]

    def all(self) -> list[RegisteredMemory]:
        with self._lock:
            return list(self._memories)

    def find(self, address: int, length_bytes: int) -> RegisteredMemory | None:
        """Registered memory that holds the whole range."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            while at >= 0:  # the nearest start below is nearly always it; overlapping registrations go on
                memory = self._memories[at]
                if address + length_bytes <= memory.address + memory.length_bytes:
                    return memory
                at -= 1
        return None

    def resolve(self, places: Spans | Sequence[Any]) -> Spans:
        """Spans of a batch given as one buffer, or list of buffers, a block. Raises UserError for memory that is
        not registered."""
        if isinstance(places, Spans):
            for memory in places.memories:
                if memory.closed:
                    raise UserError("this memory has been closed")
            return places
        plain = self._resolve_plain(places)
        if plain is not None:
            return plain
        addresses: list[int] = []
        lengths: list[int] = []
        which: list[int] = []
        starts = [0]
        memories: dict[int, int] = {}
        order: list[RegisteredMemory] = []
        for place in places:
            for piece in place if isinstance(place, (list, tuple)) else (place,):
                memory, buffer = self._resolve_piece(piece)
                if memory.id not in memories:
                    memories[memory.id] = len(order)
                    order.append(memory)
                addresses.append(buffer.address)
                lengths.append(buffer.length_bytes)
                which.append(memories[memory.id])
            starts.append(len(addresses))
        single = starts == list(range(len(addresses) + 1))
        return Spans(
            tuple(order),
            None if len(order) == 1 else np.array(which, np.intp),
            np.array(addresses, np.uint64),
            np.array(lengths, np.uint64),
            None if single else np.array(starts, np.intp),
        )

    def _resolve_plain(self, places: Sequence[Any]) -> Spans | None:
        """Buffers of bytes that all lie in one memory, in one pass of native code; None where it is another case, or
        that is missing."""
        module = native_batches.MODULE
        made = module.pieces(places) if module is not None else None
        if made is None:
            return None
        addresses, lengths, lowest, end = made
        memory = self.find(lowest, end - lowest)
        if memory is None:
            return None
        return Spans((memory,), None, np.frombuffer(addresses, np.uint64), np.frombuffer(lengths, np.uint64), None)

    def _resolve_piece(self, piece: Any) -> tuple[RegisteredMemory, Buffer]:
        if isinstance(piece, RegisteredMemory):
            if piece.closed:
                raise UserError("this memory has been closed")
            return piece, Buffer(piece.address, piece.length_bytes, piece.owner)
        buffer = describe(piece)
        if buffer.length_bytes > LENGTH_BYTES_MAX:
            raise UserError(f"a piece of {buffer.length_bytes} bytes is longer than {LENGTH_BYTES_MAX}")
        if buffer.length_bytes == 0:  # it is anywhere, and the DPU answers BAD_LENGTH
            memory = next(iter(self.all()), None)
            buffer = Buffer(memory.address if memory else 0, 0, buffer.owner)
        else:
            memory = self.find(buffer.address, buffer.length_bytes)
        if memory is None:
            raise UserError(
                f"{buffer.length_bytes} bytes at 0x{buffer.address:x} are not registered memory: register the buffer "
                f"or the pool it belongs to once (Client.register), or take memory from Client.allocate"
            )
        return memory, buffer


def registered_buffer(memory: Any) -> Buffer:
    """The buffer of an object about to be registered. Raises UserError for an empty one."""
    buffer = describe(memory)
    if buffer.length_bytes == 0:
        raise UserError("memory of zero length cannot be registered")
    return buffer
