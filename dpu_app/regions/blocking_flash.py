"""Blocking flash transfers, for opening, formatting and closing a region: never on the data path.

Owns the tags and the waiting; the device and the memory are the caller's. Errors and short counts come back as
values, because one bad page must not cost the rest of a region.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Iterator
from typing import NamedTuple

from common.errors import DeadlineError, LowerLayerError
from doca_shims.api import FlashCompletion, FlashDevice, FlashOp, FlashRequest, Memory

TIMEOUT_S = 30.0
"""A device that completes nothing for so long has failed."""
REQUEST_BYTES_MAX = 4 << 20
IN_FLIGHT_MAX = 4


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
        self.request_bytes = limit - limit % max(device.caps.block_bytes, 4096)
        if self.request_bytes == 0:
            raise LowerLayerError("open flash", errno.EINVAL, "scratch memory or max_io_bytes is below 4096 bytes")
        self.in_flight_max = min(IN_FLIGHT_MAX, device.caps.queue_depth_max, memory.length_bytes // self.request_bytes)

    def read_blocks(self, offset_bytes: int, length_bytes: int) -> Iterator[Block]:
        """Read a range in large requests, several in flight. Yields each as it completes, in any order; its memory
        is read into again when the caller asks for the next block."""
        step = self.request_bytes
        end = offset_bytes + length_bytes
        cursor = offset_bytes
        in_flight: dict[int, int] = {}
        spare = [number * step for number in range(self.in_flight_max)]
        while cursor < end or in_flight:
            requests = []
            while cursor < end and spare:
                position = spare.pop()
                length = min(step, end - cursor)
                requests.append(self._request(FlashOp.READ, cursor, position, length))
                in_flight[position] = cursor
                cursor += length
            if requests:
                self.device.submit(requests)
            for completion in self._completions():
                start = in_flight.pop(completion.tag)
                length = min(step, end - start)
                yield Block(start, length, completion.tag, problem_of(completion.result, length))
                spare.append(completion.tag)

    def read(self, offset_bytes: int, length_bytes: int) -> tuple[bytes, str | None]:
        """At most `request_bytes`, and why they are not to be used, or None."""
        problem = self._one(FlashOp.READ, offset_bytes, length_bytes)
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
        cursor, end, in_flight = offset_bytes, offset_bytes + length_bytes, 0
        while cursor < end or in_flight:
            while cursor < end and in_flight < self.in_flight_max:
                length = min(step, end - cursor)
                self.device.submit([FlashRequest(cursor, FlashOp.WRITE, cursor, self.memory.address, length)])
                cursor += length
                in_flight += 1
            for completion in self._completions():
                in_flight -= 1
                length = min(step, end - completion.tag)
                self._demand("write flash", problem_of(completion.result, length), completion.tag)

    def flush(self) -> None:
        """Raises LowerLayerError."""
        self._demand("flush flash", self._one(FlashOp.FLUSH, 0, 0), 0)

    def _request(self, op: FlashOp, offset_bytes: int, position: int, length_bytes: int) -> FlashRequest:
        address = self.memory.address + position if length_bytes else 0
        return FlashRequest(position, op, offset_bytes, address, length_bytes)

    def _one(self, op: FlashOp, offset_bytes: int, length_bytes: int) -> str | None:
        self.device.submit([self._request(op, offset_bytes, 0, length_bytes)])
        (completion,) = self._completions()
        return problem_of(completion.result, length_bytes)

    def _completions(self) -> list[FlashCompletion]:
        completions = self.device.poll()
        while not completions:
            if not self._wait(self.device, self._timeout_s):
                raise DeadlineError(f"flash completed nothing for {self._timeout_s:.0f} s")
            completions = self.device.poll()
        return completions

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
