"""The sending half of an emu-tcp connection: buffers in order, gathered from registered memory, never blocking.

Everything runs under the connection's lock. What the socket does not take at once stays in the queue, and whoever
drives the connection pushes again when there is room, so that two peers that READ each other cannot block one another.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from itertools import islice

from emulator.fabric_core import Region

_GATHER_BUFFERS = 512


class Transmitter:
    """Sends buffers on one socket, which it does not own."""

    __slots__ = ("_end_when_empty", "_queue", "_socket", "progress_s", "queued_bytes", "sent_bytes")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._queue: deque[tuple[bytes | bytearray | memoryview, Region | None]] = deque()
        self._end_when_empty = False
        self.queued_bytes = 0
        """Of the stream, ever; `sent_bytes` of these are in the socket."""
        self.sent_bytes = 0
        self.progress_s = time.monotonic()
        """When the socket last took something."""

    def __len__(self) -> int:
        """Buffers that wait."""
        return len(self._queue)

    @property
    def waiting_bytes(self) -> int:
        return self.queued_bytes - self.sent_bytes

    def header(self, header: bytes | bytearray) -> None:
        self._queue.append((header, None))
        self.queued_bytes += len(header)

    def payload(self, view: memoryview, region: Region) -> None:
        """`region` stays registered until these bytes are gone, or whoever deregisters it ends the connection."""
        self._queue.append((view, region))
        self.queued_bytes += len(view)

    def send(self, frames: bytes) -> bool:
        """Whole small frames, copied already. False when some of it has to wait."""
        length = len(frames)
        self.queued_bytes += length
        if self._queue:
            self._queue.append((frames, None))
            return False
        try:
            count = self._socket.send(frames, socket.MSG_DONTWAIT)
        except BlockingIOError:
            count = 0
        except OSError:
            return True  # as in `push`
        self.sent_bytes += count
        if count == length:
            return True
        self._queue.append((memoryview(frames)[count:], None))
        return False

    def push(self) -> bool:
        """Send what the socket takes now. False when it is full; True when nothing waits any more."""
        queue = self._queue
        while queue:
            buffers = [buffer for buffer, _ in islice(queue, _GATHER_BUFFERS)]
            try:
                count = self._socket.sendmsg(buffers, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                queue.clear()  # the peer is gone; whoever receives sees it too, and says so
                return True
            self.sent_bytes += count
            if self.sent_bytes == self.queued_bytes:
                queue.clear()
                break
            self.progress_s = time.monotonic()
            if not self._drop(count, len(buffers)):
                return False
        if self._end_when_empty:
            self._end_when_empty = False
            with suppress(OSError):  # not connected any more
                self._socket.shutdown(socket.SHUT_WR)
        return True

    def _drop(self, count: int, gathered: int) -> bool:
        """Forget the first `count` bytes. Whether that was all of the first `gathered` buffers."""
        queue = self._queue
        while gathered:
            buffer, region = queue[0]
            if count < len(buffer):
                queue[0] = (memoryview(buffer)[count:], region)
                return False
            count -= len(buffer)
            queue.popleft()
            gathered -= 1
        return True

    def refers_to(self, region: Region) -> bool:
        """Whether a waiting buffer is of this region."""
        return any(of is region for _, of in self._queue)

    def end_when_empty(self) -> None:
        """Send what is queued, then the end of the stream."""
        self._end_when_empty = True

    def clear(self) -> None:
        """Drop what is queued: registered memory is read no more."""
        self._queue.clear()
