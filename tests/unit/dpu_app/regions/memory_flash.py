"""A flash in memory, with faults on demand, for the tests of recovery."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from doca_shims.api import FlashCaps, FlashCompletion, FlashDevice, FlashOp, FlashRequest, Memory, ShimError
from dpu_app.flash.anonymous_memory import AnonymousMemory


class MemoryFlash:
    """Keeps its bytes in `content`; completes requests in reverse order of submission. `faults`, asked before each
    request, answers a negative errno, a short count, or None."""

    def __init__(self, capacity_bytes: int) -> None:
        self.content = bytearray(capacity_bytes)
        self.faults: Callable[[FlashRequest], int | None] = lambda request: None
        self.requests: list[FlashRequest] = []
        self.caps = FlashCaps(capacity_bytes, 4096, 1 << 20, 8, True, "memory")
        self._ready: list[FlashCompletion] = []
        self._memories: list[Memory] = []

    def register_memory(self, memory: Memory) -> None:
        self._memories.append(memory)

    def submit(self, requests: Sequence[FlashRequest]) -> None:
        if len(self._ready) + len(requests) > self.caps.queue_depth_max:
            raise ShimError(errno.EAGAIN, "submit", "queue is full")
        for request in requests:
            if request.offset_bytes % 4096 or request.length_bytes % 4096 or request.address % 4096:
                raise ShimError(errno.EINVAL, "submit", f"misaligned: {request}")
            if request.offset_bytes + request.length_bytes > self.caps.capacity_bytes:
                raise ShimError(errno.EINVAL, "submit", f"out of range: {request}")
            self.requests.append(request)
            self._ready.append(FlashCompletion(request.tag, self._perform(request)))

    def _perform(self, request: FlashRequest) -> int:
        fault = self.faults(request)
        if fault is not None and fault < 0:
            return fault
        length = request.length_bytes if fault is None else fault
        if request.op is FlashOp.READ:
            piece = bytes(self.content[request.offset_bytes : request.offset_bytes + length])
            self._at(request, length)[:] = piece
        elif request.op is FlashOp.WRITE:
            self.content[request.offset_bytes : request.offset_bytes + length] = self._at(request, length)
        return length

    def _at(self, request: FlashRequest, length: int) -> memoryview:
        for memory in self._memories:
            start = request.address - memory.address
            if start >= 0 and start + request.length_bytes <= memory.length_bytes:
                return memory.view[start : start + length]
        raise ShimError(errno.EINVAL, "submit", "memory was not registered")

    def fileno(self) -> int:
        raise AssertionError("nobody needs to wait for this flash")

    def poll(self) -> list[FlashCompletion]:
        ready, self._ready = self._ready[::-1], []
        return ready

    def close(self) -> None:
        pass


_conforms: Callable[[int], FlashDevice] = MemoryFlash


def blank_flash(capacity_bytes: int) -> tuple[MemoryFlash, AnonymousMemory]:
    """A flash of zeros, and scratch memory registered with it."""
    flash, memory = MemoryFlash(capacity_bytes), AnonymousMemory(2 << 20)
    flash.register_memory(memory)
    return flash, memory
