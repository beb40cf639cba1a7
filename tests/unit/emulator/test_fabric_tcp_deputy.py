"""The deputy of emu-tcp: it serves owners who do not look, leaves alone those who do, and survives what they do."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from emulator.fabric_tcp_deputy import Deputy

_LIMIT_S = 20.0


class _Connection:
    """Something to read is always there. `owner` is called at each tick."""

    def __init__(self, owner: Callable[[_Connection], None] = lambda connection: None) -> None:
        self.looks = 0
        self.ticking = False
        self.backlog = False
        self.pending = True
        self.owner = owner
        self.ticks = 0
        self.serves = 0
        self.served = threading.Event()
        self.checked = threading.Event()
        self.many_ticks = threading.Event()
        self.aborted = threading.Event()
        self.fails = False

    def serve(self) -> None:
        self.serves += 1
        self.served.set()
        if self.fails:
            raise RuntimeError("a fault")

    def settle(self) -> None:
        self.owner(self)
        self.ticks += 1
        if self.ticks >= 30:
            self.many_ticks.set()

    def abort(self) -> None:
        self.aborted.set()

    def check_deadlines(self, now_s: float) -> None:
        del now_s
        self.checked.set()


@contextmanager
def _watched(deputy: Deputy, connection: _Connection) -> Iterator[socket.socket]:
    here, there = socket.socketpair()
    with here, there:
        deputy.add(connection, here.fileno())
        try:
            yield there
        finally:
            deputy.remove(connection, here.fileno())


def test_an_owner_who_does_not_look_is_stood_in_for() -> None:
    connection = _Connection()
    with _watched(Deputy(0.05), connection) as there:
        there.send(b"x")
        assert connection.served.wait(_LIMIT_S)
        first = connection.serves
        connection.served.clear()
        assert connection.served.wait(_LIMIT_S), "what is still there is served again"
        assert connection.serves > first
        assert connection.checked.wait(_LIMIT_S)


def test_an_owner_who_looks_is_left_alone() -> None:
    def looks(connection: _Connection) -> None:
        connection.looks += 1

    connection = _Connection(looks)
    with _watched(Deputy(0.05), connection) as there:
        there.send(b"x")
        assert connection.many_ticks.wait(_LIMIT_S)
        assert connection.ticking
    assert not connection.serves


def test_an_owner_who_looks_again_is_left_alone_again() -> None:
    connection = _Connection()
    deputy = Deputy(0.05)
    with _watched(deputy, connection) as there:
        there.send(b"x")
        assert connection.served.wait(_LIMIT_S)

        def looks(connection: _Connection) -> None:
            connection.looks += 1

        connection.owner = looks
        connection.looks += 1
        deputy.attend(connection)
        connection.many_ticks.wait(_LIMIT_S)
        before, connection.ticks = connection.serves, 0
        connection.many_ticks.clear()
        assert connection.many_ticks.wait(_LIMIT_S)
        assert connection.serves == before


def test_an_idle_connection_is_not_ticked() -> None:
    connection, other = _Connection(), _Connection()
    deputy = Deputy(0.01)
    with _watched(deputy, connection), _watched(deputy, other) as there:
        there.send(b"x")
        assert other.served.wait(_LIMIT_S)
        assert not connection.ticks


def test_a_fault_of_one_connection_ends_it_and_spares_the_others(caplog: pytest.LogCaptureFixture) -> None:
    connections = [_Connection() for _ in range(6)]
    deputy = Deputy(0.05)
    with ExitStack() as stack:
        for connection in connections:
            connection.fails = connection is not connections[-1]
            stack.enter_context(_watched(deputy, connection)).send(b"x")
        for connection in connections:
            assert connection.served.wait(_LIMIT_S)
            assert connection.aborted.wait(_LIMIT_S if connection.fails else 0) == connection.fails
        last = connections[-1]
        last.served.clear()
        assert last.served.wait(_LIMIT_S)
    assert [record for record in caplog.records if record.levelno == logging.ERROR]


def test_the_thread_ends_with_the_last_connection_and_another_one_begins() -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    deputy = Deputy(10.0)
    for _ in range(3):
        connection, other = _Connection(), _Connection()
        with _watched(deputy, connection), _watched(deputy, other) as there:
            assert threading.active_count() == threads + 1
            there.send(b"x")
            assert other.served.wait(_LIMIT_S)
        assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_removing_what_is_not_there_changes_nothing() -> None:
    deputy = Deputy(0.05)
    stranger = _Connection()
    deputy.remove(stranger, 0)
    deputy.attend(stranger)
    connection = _Connection()
    with _watched(deputy, connection) as there:
        deputy.remove(stranger, 0)
        there.send(b"x")
        assert connection.served.wait(_LIMIT_S)
