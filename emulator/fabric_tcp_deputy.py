"""The thread of an emu-tcp device that stands in for owners who do not look at their connections.

While an owner looks (`TcpConnection.looks` rises), the thread only ticks: it compares, sends acknowledgements that
found nothing to go along with, and leaves sockets alone, so that it costs the owner next to nothing. A connection
whose owner has left something unread for a tick or two is served here, at once from then on, until the owner looks
again. One that is idle is not ticked but watched. Deadlines of all connections are kept here too.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_log = logging.getLogger(__name__)

_TICK_S = 0.01
_ATTENTION_S = 0.5
"""So long after its owner's last look a connection is ticked."""


class Driven(Protocol):
    """What the deputy sees of a connection."""

    looks: int
    ticking: bool
    backlog: bool

    @property
    def pending(self) -> bool: ...
    def serve(self) -> None: ...
    def settle(self) -> None: ...
    def check_deadlines(self, now_s: float) -> None: ...
    def abort(self) -> None: ...


class _Watched:
    """A connection, and what the deputy noted of it."""

    __slots__ = ("connection", "fd", "looks", "served", "since_s", "unread")

    def __init__(self, connection: Driven, fd: int) -> None:
        self.connection = connection
        self.fd = fd
        self.looks = -1
        self.since_s = 0.0
        """When its owner was last seen looking."""
        self.unread = False
        """Something was pending at the last tick, and the owner had not looked."""
        self.served = False
        """It is served as soon as something comes."""


class Deputy:
    """One for a device. Its thread lives while there are connections."""

    def __init__(self, check_s: float) -> None:
        """Deadlines are checked every `check_s` seconds."""
        self._check_s = check_s
        self._lock = threading.Lock()
        self._thread: _Thread | None = None

    def add(self, connection: Driven, fd: int) -> None:
        """Stand in for it from now on; `fd` is its socket."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # none yet, or in a forked child
                self._thread = _Thread(self._check_s)
                self._thread.start()
            self._thread.add(_Watched(connection, fd))

    def attend(self, connection: Driven) -> None:
        """The owner is active: tick."""
        connection.ticking = True
        thread = self._thread
        if thread is not None:
            thread.attend(connection)

    def remove(self, connection: Driven, fd: int) -> None:
        """Never touch it again once this returns and its lock is free. The socket is still open."""
        with self._lock:
            thread = self._thread
            if thread is None or not thread.remove(connection, fd):
                return
            self._thread = None
        thread.join()


class _Thread(threading.Thread):
    def __init__(self, check_s: float) -> None:
        super().__init__(name="emu-tcp deputy", daemon=True)
        self._check_s = check_s
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._watched: dict[int, _Watched] = {}
        self._by_connection: dict[Driven, _Watched] = {}
        self._ticked: set[_Watched] = set()
        self._attended: deque[Driven] = deque()
        self._stopping = False

    # ------------------------------------------------------------------------------------ for other threads

    def add(self, watched: _Watched) -> None:
        self._by_connection[watched.connection] = watched
        self._watched[watched.fd] = watched
        self._epoll.register(watched.fd, select.EPOLLIN | select.EPOLLONESHOT)

    def attend(self, connection: Driven) -> None:
        self._attended.append(connection)
        os.eventfd_write(self._wake, 1)

    def remove(self, connection: Driven, fd: int) -> bool:
        """Whether it was the last one, upon which the thread ends."""
        if self._by_connection.pop(connection, None) is None:
            return False
        self._watched.pop(fd, None)
        with suppress(OSError):
            self._epoll.unregister(fd)
        if self._by_connection:
            return False
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        return True

    # ------------------------------------------------------------------------------------ the thread

    def run(self) -> None:
        tick_due_s = check_due_s = time.monotonic()
        while not self._stopping:
            events = self._epoll.poll(min(self._check_s, _TICK_S) if self._ticked else self._check_s)
            now_s = time.monotonic()
            for fd, _ in events:
                self._event(fd, now_s)
            while self._attended:
                self._begin_ticking(self._by_connection.get(self._attended.popleft()), now_s)
            if self._ticked and now_s >= tick_due_s:
                tick_due_s = now_s + _TICK_S
                for watched in list(self._ticked):
                    self._safely(self._tick, watched, now_s)
            if now_s >= check_due_s:
                check_due_s = now_s + self._check_s
                for watched in list(self._by_connection.values()):
                    self._safely(self._check, watched, now_s)
        self._epoll.close()
        os.close(self._wake)

    def _safely(self, action: Callable[[_Watched, float], None], watched: _Watched, now_s: float) -> None:
        """A connection at which this code fails ends, and its owner learns of it by that; the others go on."""
        try:
            action(watched, now_s)
        except Exception:  # noqa: BLE001  the thread serves every other connection
            _log.exception("a connection ended by a fault of the emulator")
            self._ticked.discard(watched)
            watched.connection.abort()

    @staticmethod
    def _check(watched: _Watched, now_s: float) -> None:
        watched.connection.check_deadlines(now_s)

    def _event(self, fd: int, now_s: float) -> None:
        if fd == self._wake:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
            return
        watched = self._watched.get(fd)
        if watched is not None:
            self._safely(self._come, watched, now_s)

    def _come(self, watched: _Watched, now_s: float) -> None:
        """There is something to read, or room to send."""
        connection = watched.connection
        if watched.served and connection.looks == watched.looks:
            connection.serve()
            self._watch(watched)
        else:
            self._begin_ticking(watched, now_s)

    def _begin_ticking(self, watched: _Watched | None, now_s: float) -> None:
        if watched is None:
            return
        watched.connection.ticking = True
        watched.since_s = now_s
        watched.unread = watched.served = False
        self._ticked.add(watched)

    def _tick(self, watched: _Watched, now_s: float) -> None:
        connection = watched.connection
        if connection not in self._by_connection:
            self._ticked.discard(watched)
            return
        connection.settle()
        if connection.looks != watched.looks:
            watched.looks = connection.looks
            watched.since_s = now_s
            watched.unread = False
        elif not connection.pending:
            watched.unread = False
            if now_s - watched.since_s > _ATTENTION_S:
                self._watch(watched)
        elif not watched.unread:
            watched.unread = True
        else:
            connection.serve()
            watched.served = True
            self._watch(watched)

    def _watch(self, watched: _Watched) -> None:
        """Tick no more; wake when something comes, or there is room for what is to be sent."""
        connection = watched.connection
        self._ticked.discard(watched)
        connection.ticking = False
        connection.settle()
        interest = select.EPOLLIN | select.EPOLLONESHOT | (select.EPOLLOUT if connection.backlog else 0)
        with suppress(OSError):  # removed meanwhile
            self._epoll.modify(watched.fd, interest)
