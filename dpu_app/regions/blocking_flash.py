"""Blocking flash transfers, for opening, formatting and closing a region: never on the data path.

Owns the tags and the waiting; the device and the memory are the caller's. Errors and short counts come back as
values, because one bad page must not cost the rest of a region.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from common.errors import DeadlineError, LowerLayerError
from doca_shims.api import FlashDevice, FlashOp, FlashRequest, Memory

TIMEOUT_S = 30.0
"""A device that completes nothing for so long has failed."""
REQUEST_BYTES_MAX = 4 << 20
IN_FLIGHT_MAX = 4
PAGE_BYTES = 4096
PAGE_ATTEMPTS = 3
_TAGS = itertools.count(1 << 63)
"""Tags of this process's blocking requests: never used twice, and far from those of a region's queue."""


def wait_readable(device: FlashDevice, timeout_s: float) -> bool:
    """Whether completions may be waiting; False after `timeout_s`."""
    poller = select.poll()
    poller.register(device.fileno(), select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


class Block(NamedTuple):
    """`length_bytes` read from `offset_bytes`, at `position` of the scratch memory; `problem` says why they are
    not to be used."""

    offset_bytes: int
    length_bytes: int
    position: int
    problem: str | None

    def view(self, memory: Memory) -> memoryview:
        return memory.view[self.position : self.position + self.length_bytes]


class BlockingFlash:
    """`memory` is scratch, registered with the device by its owner, and not to be used by anybody else meanwhile."""

    def __init__(
        self,
        device: FlashDevice,
        memory: Memory,
        wait: Callable[[FlashDevice, float], bool] = wait_readable,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.device = device
        self.memory = memory
        self._wait = wait
        self._timeout_s = timeout_s
        limit = min(REQUEST_BYTES_MAX, device.caps.max_io_bytes, memory.length_bytes)
        self.request_bytes = limit - limit % max(device.caps.block_bytes, PAGE_BYTES)
        if self.request_bytes == 0:
            raise LowerLayerError("open flash", errno.EINVAL, "scratch memory or max_io_bytes is below 4096 bytes")
        self._in_flight: dict[int, FlashRequest] = {}
        self.in_flight_max = min(IN_FLIGHT_MAX, device.caps.queue_depth_max, memory.length_bytes // self.request_bytes)

    def read_blocks(self, offset_bytes: int, length_bytes: int) -> Iterator[Block]:
        """Read a range in large requests, several in flight. Yields each as it completes, in any order; its memory
        is read into again when the caller asks for the next block. Where a large request fails it is tried again
        page by page, so that a problem costs its own page and no more."""
        step = self.request_bytes
        end = offset_bytes + length_bytes
        wanted = deque((start, min(step, end - start), 0) for start in range(offset_bytes, end, step))
        attempts: dict[int, int] = {}
        spare = [number * step for number in range(self.in_flight_max)]
        while wanted or self._in_flight:
            requests = []
            while wanted and spare:
                start, length, attempt = wanted.popleft()
                attempts[start] = attempt
                requests.append(self._request(FlashOp.READ, start, spare.pop(), length))
            if requests:
                self.device.submit(requests)
            for (_, _, start, address, length), result in self._completions():
                problem = problem_of(result, length)
                position = address - self.memory.address
                if problem is not None and (length > PAGE_BYTES or attempts[start] < PAGE_ATTEMPTS):
                    pages = range(start, start + length, PAGE_BYTES)
                    wanted.extend((page, min(PAGE_BYTES, start + length - page), attempts[start] + 1) for page in pages)
                else:
                    yield Block(start, length, position, problem)
                spare.append(position)

    def read(self, offset_bytes: int, length_bytes: int) -> tuple[bytes, str | None]:
        """At most `request_bytes`, and why they are not to be used, or None. What fails is tried again."""
        for _ in range(PAGE_ATTEMPTS):
            problem = self._one(FlashOp.READ, offset_bytes, length_bytes)
            if problem is None:
                break
        return bytes(self.memory.view[:length_bytes]), problem

    def write(self, offset_bytes: int, data: bytes) -> None:
        """At most `request_bytes`. Raises LowerLayerError."""
        self.memory.view[: len(data)] = data
        self._demand("write flash", self._one(FlashOp.WRITE, offset_bytes, len(data)), offset_bytes)

    def write_zeros(self, offset_bytes: int, length_bytes: int) -> None:
        """Raises LowerLayerError. A discard would not do: what it reads as afterwards is undefined."""
        step = self.request_bytes
        view = self.memory.view[:step]
        view[:] = bytes(step)
        cursor, end = offset_bytes, offset_bytes + length_bytes
        while cursor < end or self._in_flight:
            while cursor < end and len(self._in_flight) < self.in_flight_max:
                length = min(step, end - cursor)
                self.device.submit([self._request(FlashOp.WRITE, cursor, 0, length)])
                cursor += length
            for request, result in self._completions():
                self._demand("write flash", problem_of(result, request.length_bytes), request.offset_bytes)

    def flush(self) -> None:
        """Raises LowerLayerError."""
        self._demand("flush flash", self._one(FlashOp.FLUSH, 0, 0), 0)

    def _request(self, op: FlashOp, offset_bytes: int, position: int, length_bytes: int) -> FlashRequest:
        address = self.memory.address + position if length_bytes else 0
        request = FlashRequest(next(_TAGS), op, offset_bytes, address, length_bytes)
        self._in_flight[request.tag] = request
        return request

    def _one(self, op: FlashOp, offset_bytes: int, length_bytes: int) -> str | None:
        self.device.submit([self._request(op, offset_bytes, 0, length_bytes)])
        ((_, result),) = self._completions()
        return problem_of(result, length_bytes)

    def _completions(self) -> list[tuple[FlashRequest, int]]:
        """Requests of this object that completed, and their results; at least one. Completions of anything else,
        left over from whoever used the device before, are dropped."""
        while True:
            own = [
                (self._in_flight.pop(completion.tag), completion.result)
                for completion in self.device.poll()
                if completion.tag in self._in_flight
            ]
            if own:
                return own
            if not self._wait(self.device, self._timeout_s):
                raise DeadlineError(f"flash completed nothing for {self._timeout_s:.0f} s")

    @staticmethod
    def _demand(operation: str, problem: str | None, offset_bytes: int) -> None:
        if problem is not None:
            raise LowerLayerError(operation, errno.EIO, f"{problem}, at offset {offset_bytes}")


def problem_of(result: int, length_bytes: int) -> str | None:
    """What a completion's `result` says is wrong, None where all of `length_bytes` moved."""
    if result < 0:
        return os.strerror(-result)
    if result != length_bytes:
        return f"short transfer: {result} of {length_bytes} bytes"
    return None
