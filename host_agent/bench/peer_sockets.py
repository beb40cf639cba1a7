"""What this machine can do at best, measured beside the benchmark: memory copy, bare socket, message round trip.

Owns one peer process (`python -m host_agent.bench.peer_sockets`), a plain blocking echo of the cheapest form that
Python has: `sendmsg` of the caller's memory, `recv_into` with MSG_WAITALL. Never touches a pod. `host_agent.bench`
takes its readings in turn with its own rounds, so that both see the same machine.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from time import perf_counter_ns
from types import TracebackType
from typing import Final

import numpy as np

from common.errors import DeadlineError, LowerLayerError

_REQUEST: Final = struct.Struct("<BII")
_PULL, _PUSH, _PING = 1, 2, 3
_WINDOW_BYTES: Final = 256 << 20
"""The peer's memory: larger than the caches, like the window of a region."""
_ACCEPT_TIMEOUT_S: Final = 20.0
_IO_TIMEOUT_S: Final = 30.0
_IOV_MAX: Final = 1024


def memmove_s(destination: memoryview, source: memoryview, block_bytes: int, blocks: int) -> float:
    """Seconds to copy `blocks` blocks, one memmove each, between two buffers of at least that size."""
    if min(destination.nbytes, source.nbytes) < block_bytes * blocks:
        raise ValueError(f"{blocks} blocks of {block_bytes} bytes do not fit the buffers")
    to, at = _address(destination), _address(source)
    offsets = range(0, block_bytes * blocks, block_bytes)
    started = perf_counter_ns()
    for offset in offsets:
        ctypes.memmove(to + offset, at + offset, block_bytes)
    return (perf_counter_ns() - started) / 1e9


class SocketPeer:
    """A second process at the other end of a loopback TCP connection and of a Unix socket pair.

    Raises LowerLayerError where the system refuses, DeadlineError where the peer does not answer in time.
    """

    def __init__(self) -> None:
        here, there = socket.socketpair()
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.settimeout(_ACCEPT_TIMEOUT_S)
                port = listener.getsockname()[1]
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "host_agent.bench.peer_sockets", str(there.fileno()), str(port)],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                )
                try:
                    self._tcp, _address = listener.accept()
                except OSError as error:
                    self._process.kill()
                    self._process.wait()
                    raise DeadlineError(f"the socket limit's peer did not connect: {error}") from error
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
        self._unix = here
        for end in (self._tcp, self._unix):
            end.settimeout(_IO_TIMEOUT_S)
        _tune(self._tcp)

    def pull_s(self, memory: memoryview, block_bytes: int, blocks: int) -> float:
        """Seconds from asking until `blocks` blocks have been received into `memory`: the limit of a RETRIEVE."""
        return self._transfer(_PULL, memory, block_bytes, blocks)

    def push_s(self, memory: memoryview, block_bytes: int, blocks: int) -> float:
        """Seconds from asking until the peer has received `blocks` blocks of `memory`: the limit of a STORE."""
        return self._transfer(_PUSH, memory, block_bytes, blocks)

    def ping_s(self, message_bytes: int = 64, rounds: int = 200) -> list[float]:
        """Seconds of each of `rounds` round trips of so small a message over the Unix socket."""
        message = bytes(message_bytes)
        answer = bytearray(message_bytes)
        times_s: list[float] = []
        try:
            self._unix.sendall(_REQUEST.pack(_PING, message_bytes, rounds))
            for _ in range(rounds):
                started = perf_counter_ns()
                self._unix.sendall(message)
                self._unix.recv_into(answer, message_bytes, socket.MSG_WAITALL)
                times_s.append((perf_counter_ns() - started) / 1e9)
        except OSError as error:
            raise LowerLayerError("unix ping-pong", error.errno or 0, str(error)) from error
        return times_s

    def close(self) -> None:
        """Idempotent; the peer ends when its sockets close."""
        self._tcp.close()
        self._unix.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> SocketPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _transfer(self, op: int, memory: memoryview, block_bytes: int, blocks: int) -> float:
        view = memory.cast("B")[: block_bytes * blocks]
        if view.nbytes < block_bytes * blocks:
            raise ValueError(f"{blocks} blocks of {block_bytes} bytes do not fit the buffer")
        try:
            started = perf_counter_ns()
            self._tcp.sendall(_REQUEST.pack(op, block_bytes, blocks))
            if op == _PULL:
                _receive(self._tcp, view)
            else:
                _send(self._tcp, _blocks(view, block_bytes))
                _receive(self._tcp, memoryview(bytearray(1)))
            return (perf_counter_ns() - started) / 1e9
        except OSError as error:
            raise LowerLayerError("bare socket transfer", error.errno or 0, str(error)) from error


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:  # bbr, the default on some systems, paces loopback: reno and cubic measured 18 % faster
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    except OSError:
        return


def _blocks(view: memoryview, block_bytes: int) -> list[memoryview]:
    return [view[start : start + block_bytes] for start in range(0, view.nbytes, block_bytes)]


def _send(sock: socket.socket, parts: list[memoryview]) -> None:
    """sendmsg of all of `parts`, continuing after short writes."""
    while parts:
        sent = sock.sendmsg(parts[:_IOV_MAX])
        whole = 0
        while whole < len(parts) and sent >= parts[whole].nbytes:
            sent -= parts[whole].nbytes
            whole += 1
        parts = parts[whole:]
        if sent:
            parts[0] = parts[0][sent:]


def _receive(sock: socket.socket, view: memoryview) -> None:
    at = 0
    while at < view.nbytes:
        count = sock.recv_into(view[at:], view.nbytes - at, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the peer closed")
        at += count


def _serve_tcp(sock: socket.socket) -> None:
    window = np.zeros(_WINDOW_BYTES, np.uint8).data
    header = memoryview(bytearray(_REQUEST.size))
    while True:
        _receive(sock, header)
        op, block_bytes, blocks = _REQUEST.unpack(header)
        left = block_bytes * blocks
        parts: list[memoryview] = []
        while left:
            parts.append(window[: min(left, _WINDOW_BYTES)])
            left -= parts[-1].nbytes
        if op == _PULL:
            _send(sock, [piece for part in parts for piece in _blocks(part, block_bytes)])
        else:
            for part in parts:
                _receive(sock, part)
            sock.sendall(b"\1")


def _serve_until_closed(serve: Callable[[socket.socket], None], sock: socket.socket) -> None:
    try:
        serve(sock)
    except (ConnectionResetError, BrokenPipeError):
        sock.close()


def _serve_unix(sock: socket.socket) -> None:
    header = memoryview(bytearray(_REQUEST.size))
    while True:
        _receive(sock, header)
        _op, message_bytes, rounds = _REQUEST.unpack(header)
        message = memoryview(bytearray(message_bytes))
        for _ in range(rounds):
            _receive(sock, message)
            sock.sendall(message)


def main(arguments: list[str]) -> None:
    """The peer process. Ends when the benchmark closes its sockets, or dies."""
    unix = socket.socket(fileno=int(arguments[0]))
    tcp = socket.create_connection(("127.0.0.1", int(arguments[1])), timeout=_ACCEPT_TIMEOUT_S)
    tcp.settimeout(None)
    _tune(tcp)
    threading.Thread(target=_serve_until_closed, args=(_serve_unix, unix), daemon=True).start()
    _serve_until_closed(_serve_tcp, tcp)


if __name__ == "__main__":
    main(sys.argv[1:])
