"""Who waits for the fabric: the calling threads themselves, one at a time, without a polling thread.

A thread that waits for its operation leads if nobody does: it sleeps in epoll over every link's descriptor, once it has
looked for a short time (`host_agent.busy_poll`), and handles what arrives for all. The others follow, asleep, until
their operation completes or the lead is free. A background thread exists only from the first asynchronous operation on,
and leads only while one is outstanding and no caller waits. Deadlines are kept here: an operation that is not answered
in time ends as `RegionLink.expire` says.
"""

from __future__ import annotations

import logging
import os
import select
import threading

from doca_shims.api import Clock
from host_agent.busy_poll import BusyPolling
from host_agent.link import RegionLink
from host_agent.operation import Operation

log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 5.0
_yield = os.sched_yield


class Progress:
    """One for each client. Closed after all links are."""

    def __init__(self, clock: Clock, busy: BusyPolling) -> None:
        self._clock = clock
        self._busy = busy
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._links: dict[int, RegionLink] = {}
        self._unsettled: set[RegionLink] = set()
        """Links polled with a result since they were last polled empty; only the leader touches it."""
        self._lead = threading.Lock()
        self._leader = 0
        self._changed = threading.Condition()
        self._followers = 0
        self._background: set[Operation] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------ for links

    def attach(self, link: RegionLink, fd: int) -> None:
        self._links[fd] = link
        self._epoll.register(fd, select.EPOLLIN)

    def detach(self, fd: int) -> None:
        if self._links.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    # ------------------------------------------------------------------------------------ for callers

    def wait(self, operation: Operation) -> None:
        """Return when `operation`, whose requests are all submitted, is done: at its deadline at the latest."""
        operation.when_done(self._notify)
        try:
            self._wait(operation)
        except BaseException:  # such as KeyboardInterrupt: the caller's memory must not be written later
            self.abandon(operation)
            raise

    def _wait(self, operation: Operation) -> None:
        pending = operation.pending
        while pending:
            if self._lead.acquire(False):
                self._leader = threading.get_ident()
                try:
                    self._drive(operation)
                finally:
                    self._step_down()
            else:
                self._follow(operation)
            if pending and self._clock.monotonic_ns() >= operation.deadline_ns:
                _expire(operation)
                return

    def abandon(self, operation: Operation) -> None:
        """Nobody wants it any more, and its memory may be reused as soon as this returns."""
        operation.deadline_ns = 0
        _expire(operation)

    def watch(self, operation: Operation) -> None:
        """See to it that `operation` is driven, and ended at its deadline, though nobody waits for it."""
        with self._changed:
            if self._closed:
                return
            self._background.add(operation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_background, name="entresol-progress", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        operation.when_done(lambda: self._forget(operation))
        if self._leader and self._leader != threading.get_ident():
            os.eventfd_write(self._wake_fd, 1)  # a background leader has one deadline more to keep

    def close(self) -> None:
        """Idempotent. Every link is closed before."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        os.eventfd_write(self._wake_fd, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        # Whoever leads leaves at once, its operation having ended with its link; nobody leads after this.
        if not self._lead.acquire(timeout=_CLOSE_TIMEOUT_S):
            log.error("a caller still waits while the client closes")
            return
        self._epoll.close()
        os.close(self._wake_fd)

    # ------------------------------------------------------------------------------------ leading and following

    def _drive(self, operation: Operation) -> None:
        pending, clock = operation.pending, self._clock.monotonic_ns
        while pending:
            now_ns = clock()
            if now_ns >= operation.deadline_ns:
                return
            found = not self._followers and self._busy.limit_ns > 0 and self._look(operation, now_ns)
            if not found:
                self._settle_links()
            # While others wait, all that is left to do for this operation alone waits until somebody else leads.
            if not pending or (operation.check is not None and not self._followers and operation.check()) or found:
                continue
            left_s = (operation.deadline_ns - clock()) / 1e9
            if left_s > 0:
                self._sleep(0.0 if self._unsettled else left_s)

    def _look(self, operation: Operation, now_ns: int) -> bool:
        """Look for answers to `operation`, if that is worth it, until one came or the time for it is over. Whether one
        came. Others that wait, and so want the interpreter, end it: its lock is free for long in epoll only."""
        pending, clock = operation.pending, self._clock.monotonic_ns
        links = [link for link in {request.link for request in list(pending)} if link is not None]
        looking = self._busy.due(operation, len(links))
        if looking is None:
            return False
        until_ns = min(now_ns + self._busy.limit_ns, operation.deadline_ns)
        self._unsettled.update(links)  # a look leaves them untold
        awaited = len(pending)
        found = False
        while not self._followers:
            for link in links:
                link.drive(False)
            found = len(pending) < awaited
            if found or clock() >= until_ns:
                break
            _yield()  # the interpreter's lock, and the core to whoever else is to run on it
        looking.told(found)
        return found

    def _settle_links(self) -> None:
        """Poll again what gave something last time, or was looked at only: a connection promises to wake us once a
        plain poll found nothing. Done before sleeping and not after each answer, so that it overlaps with the DPU's
        work on the next request."""
        for link in list(self._unsettled):
            if not link.drive():
                self._unsettled.discard(link)

    def _sleep(self, timeout_s: float) -> None:
        """Until something arrives, is completed by another thread, or the time is up; handles what arrived."""
        for fd, _events in self._epoll.poll(timeout_s):
            link = self._links.get(fd)
            if link is not None:
                if link.drive():
                    self._unsettled.add(link)
            elif fd == self._wake_fd:
                try:
                    os.eventfd_read(fd)
                except BlockingIOError:
                    continue

    def _step_down(self) -> None:
        self._leader = 0
        self._lead.release()
        if self._followers or self._background:
            with self._changed:
                self._changed.notify_all()

    def _follow(self, operation: Operation) -> None:
        """Sleep until the operation is done, its deadline, or the lead is free."""
        with self._changed:
            self._followers += 1
            try:
                if self._leader and self._thread is not None and self._leader == self._thread.ident:
                    os.eventfd_write(self._wake_fd, 1)  # the background thread makes room for a caller
                while not operation.done and self._lead.locked():
                    left_s = (operation.deadline_ns - self._clock.monotonic_ns()) / 1e9
                    if left_s <= 0:
                        return
                    self._changed.wait(left_s)
            finally:
                self._followers -= 1
                self._changed.notify_all()

    def _notify(self) -> None:
        """An operation that a thread waits for is done; the thread may lead, follow, or be this one."""
        if self._followers:
            with self._changed:
                self._changed.notify_all()
        if self._leader and self._leader != threading.get_ident():
            os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------------------------------ the background thread

    def _forget(self, operation: Operation) -> None:
        with self._changed:
            self._background.discard(operation)
            self._changed.notify_all()

    def _run_background(self) -> None:
        while not self._closed:
            try:
                self._expire_overdue()  # never under the condition: it takes locks whose holders notify
                with self._changed:
                    if self._closed:
                        return
                    if not self._background or self._followers or self._lead.locked():
                        self._changed.wait(self._background_left_s())
                        continue
                if self._lead.acquire(blocking=False):
                    self._lead_background()
            except Exception:  # the thread serves every asynchronous operation to come
                log.exception("handling answers failed")

    def _lead_background(self) -> None:
        self._leader = threading.get_ident()
        try:
            while self._background and not self._followers and not self._closed:
                self._settle_links()
                self._sleep(0.0 if self._unsettled else self._background_left_s() or 0.0)
                self._expire_overdue()
        finally:
            self._step_down()

    def _background_left_s(self) -> float | None:
        """Until the earliest deadline; None without one."""
        deadlines = [operation.deadline_ns for operation in list(self._background)]
        return max((min(deadlines) - self._clock.monotonic_ns()) / 1e9, 0.0) if deadlines else None

    def _expire_overdue(self) -> None:
        now_ns = self._clock.monotonic_ns()
        for operation in [operation for operation in list(self._background) if operation.deadline_ns <= now_ns]:
            _expire(operation)


def _expire(operation: Operation) -> None:
    """Answer what is outstanding with DEADLINE, destroying connections where it must be."""
    for link in {request.link for request in list(operation.pending)}:
        if link is not None:
            link.expire(operation)
