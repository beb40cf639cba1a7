"""The sending half of an emu-tcp connection: frames in order, gathered from registered memory, never blocking.

Whoever appends a frame also pumps: what the socket takes at once goes at once. A thread of its own sends the
rest when there is room, so that neither the owner's `post_send` nor the receiving thread ever waits for a peer;
two peers that READ each other cannot block one another.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress

from emulator.fabric_core import Region

_GATHER_FRAMES = 32
_POLL_MS = 250


class Frame:
    """Bytes to send: a header and views of registered memory, which stays registered until they are gone."""

    __slots__ = ("buffers", "regions", "remaining", "sequence")

    def __init__(self, header: bytes, payload: list[memoryview], regions: tuple[Region, ...], sequence: int) -> None:
        self.buffers: list[memoryview] = [memoryview(header), *payload]
        self.remaining = sum(len(buffer) for buffer in self.buffers)
        self.regions = regions
        self.sequence = sequence
        """Of a request; -1 for any other frame."""

    def advance(self, count: int) -> None:
        """The first `count` bytes are in the socket."""
        self.remaining -= count
        while count:
            first = self.buffers[0]
            if count < len(first):
                self.buffers[0] = first[count:]
                return
            count -= len(first)
            del self.buffers[0]


class Transmitter:
    """Sends frames on one socket, which it does not own."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._socket = sock
        self._frames: deque[Frame] = deque()
        self._lock = threading.Lock()
        """Held while bytes are copied out of registered memory."""
        self._wake = threading.Event()
        self._stopped = False
        self._end_when_empty = False
        self._sent_sequence = 0xFFFFFFFF  # of the last request that is wholly in the socket
        self.progress_s = time.monotonic()
        """When the socket last took something."""
        self._thread = threading.Thread(target=self._run, name=f"emu-tcp tx {name}", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._frames)

    def append(self, frame: Frame) -> None:
        """Queue it. The caller keeps the order of its appends by its own lock, and pumps after releasing that."""
        self._frames.append(frame)

    def pump(self) -> None:
        """Send what the socket takes now; leave the rest to the thread."""
        while self._frames:
            if not self._lock.acquire(blocking=False):
                return  # the holder looks again after it has released
            try:
                full = self._push()
            finally:
                self._lock.release()
            if full:
                self._wake.set()
                return
        if self._end_when_empty:
            self._end()

    def _push(self) -> bool:
        """True when the socket is full."""
        frames = self._frames
        while frames:
            # By index: other threads append meanwhile, which an iterator would not bear.
            buffers: list[memoryview] = []
            for index in range(min(len(frames), _GATHER_FRAMES)):
                buffers.extend(frames[index].buffers)
            try:
                count = self._socket.sendmsg(buffers, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                frames.clear()  # the peer is gone; the receiving thread sees it too, and says so
                return False
            self.progress_s = time.monotonic()
            while count:
                first = frames[0]
                if count < first.remaining:
                    first.advance(count)
                    break
                count -= first.remaining
                frames.popleft()
                if first.sequence >= 0:
                    self._sent_sequence = first.sequence
        return False

    def has_sent(self, sequence: int) -> bool:
        """Whether the request of this number, one of the latest 2^31, is wholly in the socket."""
        if (self._sent_sequence - sequence) & 0xFFFFFFFF < 1 << 31:
            return True
        with self._lock:  # an answer can be faster than the sender's own note of having sent
            return (self._sent_sequence - sequence) & 0xFFFFFFFF < 1 << 31

    def refers_to(self, region: Region) -> bool:
        """Whether a waiting frame still has to read this region. When False, no copy of it is under way either."""
        with self._lock:
            found = any(region in frame.regions for frame in list(self._frames))
        self.pump()
        return found

    def end_when_empty(self) -> None:
        """Send what is queued, then the end of the stream."""
        self._end_when_empty = True
        self.pump()

    def stop(self) -> None:
        """Drop what is queued. When it returns, registered memory is read no more."""
        self._stopped = True
        with self._lock:
            self._frames.clear()
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _end(self) -> None:
        with suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_WR)

    def _run(self) -> None:
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            while self._frames and not self._stopped:
                if room.poll(_POLL_MS):
                    self.pump()
