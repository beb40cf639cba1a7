"""What bare sockets between two processes do: bulk over loopback TCP, messages over a Unix socket.

Owns one peer process (`python -m host_agent.bench.peer_sockets`), a plain blocking server of the cheapest form that
Python has: `sendall` of a memoryview, `recv_into` with MSG_WAITALL. Never touches a pod.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from time import perf_counter_ns
from types import TracebackType
from typing import Final

from common.errors import DeadlineError, LowerLayerError

CONGESTION: Final = ("", "cubic")
"""Of the TCP connections: the system's own, and one that does not pace. bbr, which some systems have as their own,
paces loopback."""
_REQUEST: Final = struct.Struct("<BII")
_PULL, _PUSH, _PING = 1, 2, 3
_WINDOW_BYTES: Final = 256 << 20
"""The peer's memory: larger than the caches, like a region's window. Of shared 4 KiB pages, all of them touched."""
_RECEIVE_BYTES: Final = 1 << 20
"""Of one recv_into: where tried, 16 MiB in 16 calls were as fast as in one or faster, up to three times."""
_WARM_BYTES: Final = 64 << 20
_ACCEPT_TIMEOUT_S: Final = 20.0
_IO_TIMEOUT_S: Final = 30.0


class SocketPeer:
    """A second process at the other end of warm loopback TCP connections, one for each of `CONGESTION`, and of a Unix
    socket pair.

    Raises LowerLayerError where the system refuses, DeadlineError where the peer does not answer in time.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as stack:
            self._unix, there = socket.socketpair()
            stack.callback(self._unix.close)
            self._tcp: dict[str, socket.socket] = {}
            with there, socket.create_server(("127.0.0.1", 0)) as listener:
                listener.settimeout(_ACCEPT_TIMEOUT_S)
                port = listener.getsockname()[1]
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "host_agent.bench.peer_sockets", str(there.fileno()), str(port)],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                )
                stack.callback(self._end_process)
                for congestion in CONGESTION:
                    self._tcp[congestion] = stack.enter_context(_accept(listener))
            for end in (*self._tcp.values(), self._unix):
                end.settimeout(_IO_TIMEOUT_S)
            for congestion, end in self._tcp.items():
                _tune(end, congestion)
            self._warm()
            self._stack = stack.pop_all()

    @property
    def pid(self) -> int:
        """Of the peer process."""
        return self._process.pid

    def congestion(self, name: str) -> str:
        """What the connection `name` of `CONGESTION` really uses."""
        text = self._tcp[name].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return text.rstrip(b"\0").decode()

    def pull_s(self, memory: memoryview, block_bytes: int, blocks: int, congestion: str = "") -> float:
        """Seconds from asking until `blocks` blocks have been received into `memory`: the limit of a RETRIEVE."""
        return self._transfer(_PULL, memory, block_bytes, blocks, congestion)

    def push_s(self, memory: memoryview, block_bytes: int, blocks: int, congestion: str = "") -> float:
        """Seconds from asking until the peer has received `blocks` blocks of `memory`: the limit of a STORE."""
        return self._transfer(_PUSH, memory, block_bytes, blocks, congestion)

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
        self._stack.close()

    def __enter__(self) -> SocketPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _warm(self) -> None:
        """Both directions of each connection, so that its windows have grown."""
        with mmap.mmap(-1, _WARM_BYTES) as memory, memoryview(memory) as view:
            for congestion in CONGESTION:
                self.pull_s(view, _RECEIVE_BYTES, _WARM_BYTES // _RECEIVE_BYTES, congestion)
                self.push_s(view, _RECEIVE_BYTES, _WARM_BYTES // _RECEIVE_BYTES, congestion)

    def _transfer(self, op: int, memory: memoryview, block_bytes: int, blocks: int, congestion: str) -> float:
        sock = self._tcp[congestion]
        with memory.cast("B") as whole, whole[: block_bytes * blocks] as view:
            if view.nbytes < block_bytes * blocks:
                raise ValueError(f"{blocks} blocks of {block_bytes} bytes do not fit the buffer")
            try:
                started = perf_counter_ns()
                sock.sendall(_REQUEST.pack(op, block_bytes, blocks))
                if op == _PULL:
                    _receive(sock, view)
                else:
                    sock.sendall(view)
                    _receive(sock, memoryview(bytearray(1)))
                return (perf_counter_ns() - started) / 1e9
            except OSError as error:
                raise LowerLayerError("bare socket transfer", error.errno or 0, str(error)) from error

    def _end_process(self) -> None:
        self._unix.close()  # the last of its sockets, so that it ends
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _accept(listener: socket.socket) -> socket.socket:
    try:
        return listener.accept()[0]
    except OSError as error:
        raise DeadlineError(f"the socket limit's peer did not connect: {error}") from error


def _tune(sock: socket.socket, congestion: str) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion:
        with contextlib.suppress(OSError):  # a kernel without it: `congestion` of the peer says what is used
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def _receive(sock: socket.socket, view: memoryview) -> None:
    at = 0
    while at < view.nbytes:
        wanted = min(view.nbytes - at, _RECEIVE_BYTES)
        count = sock.recv_into(view[at:], wanted, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the peer closed")
        at += count


def _serve_tcp(sock: socket.socket, window: memoryview) -> None:
    """What is pulled and pushed goes round in the window, so that it comes from memory and not from a cache."""
    header = memoryview(bytearray(_REQUEST.size))
    places = {_PULL: 0, _PUSH: 0}
    while True:
        _receive(sock, header)
        op, block_bytes, blocks = _REQUEST.unpack(header)
        left = block_bytes * blocks
        while left:
            part = window[places[op] : places[op] + left]
            places[op] = (places[op] + part.nbytes) % window.nbytes
            left -= part.nbytes
            if op == _PULL:
                sock.sendall(part)
            else:
                _receive(sock, part)
        if op == _PUSH:
            sock.sendall(b"\1")


def _serve_unix(sock: socket.socket) -> None:
    header = memoryview(bytearray(_REQUEST.size))
    while True:
        _receive(sock, header)
        _op, message_bytes, rounds = _REQUEST.unpack(header)
        message = memoryview(bytearray(message_bytes))
        for _ in range(rounds):
            _receive(sock, message)
            sock.sendall(message)


def _serve_until_closed(serve: Callable[[], None]) -> None:
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        serve()


def main(arguments: list[str]) -> None:
    """The peer process. Ends when the benchmark closes its sockets, or dies."""
    unix = socket.socket(fileno=int(arguments[0]))
    window = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
    for start in range(0, _WINDOW_BYTES, mmap.PAGESIZE):
        window[start] = 1
    serving: list[Callable[[], None]] = [lambda: _serve_unix(unix)]
    for congestion in CONGESTION:
        tcp = socket.create_connection(("127.0.0.1", int(arguments[1])), timeout=_ACCEPT_TIMEOUT_S)
        tcp.settimeout(None)
        _tune(tcp, congestion)
        serving.append(lambda tcp=tcp: _serve_tcp(tcp, window))  # type: ignore[misc]
    threads = [threading.Thread(target=_serve_until_closed, args=(serve,)) for serve in serving]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
