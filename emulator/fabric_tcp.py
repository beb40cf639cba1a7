"""emu-tcp: an RDMA device over TCP, between hosts and network namespaces.

An address is ``host:port`` or ``[host]:port``; port 0 takes a free one. There is no secret but the rkeys and
whatever the application puts into `private_data`: listen only where that is enough.
Options: `rnr_timeout_s` (1.0), `transport_timeout_s` (4.0).
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from doca_shims.api import Fabric, ProtectionDomain, QueueLimits, RecvRequest, ShimError
from emulator.fabric_core import Device, Endpoint, Timeouts
from emulator.fabric_options import read_seconds
from emulator.fabric_tcp_connection import TcpConnection
from emulator.fabric_tcp_deputy import Deputy
from emulator.fabric_tcp_domain import TcpDomain
from emulator.fabric_tcp_frame import (
    GREETING_BYTES,
    REASON_BYTES_MAX,
    FrameError,
    GreetingKind,
    pack_greeting,
    unpack_greeting,
)

API_VERSION = (1, 0)

_BACKLOG = 64
_GREETING_LIMIT_S = 5.0
_BUFFER_BYTES = 4 << 20
_BUFFER_BYTES_MIN = 2 << 20


def create(options: Mapping[str, str]) -> TcpFabric:
    """Open the device. Raises ShimError EINVAL for an unknown or bad option."""
    seconds = read_seconds(options, {"rnr_timeout_s": 1.0, "transport_timeout_s": 4.0})
    return TcpFabric(Timeouts(seconds["rnr_timeout_s"], seconds["transport_timeout_s"]))


class TcpFabric(Device):
    """`doca_shims.api.Fabric`."""

    def __init__(self, timeouts: Timeouts) -> None:
        super().__init__(one_sided_initiator=True)
        self.timeouts = timeouts
        self.deputy = Deputy(min(0.25, timeouts.rnr_s / 4, timeouts.transport_s / 4))

    def alloc_pd(self) -> TcpDomain:
        domain = TcpDomain(self)
        self.domains.add(domain)
        return domain

    def listen(self, address: str) -> TcpListener:
        listener = TcpListener(self, address)
        self.listeners.add(listener)
        return listener

    def connect(
        self,
        address: str,
        pd: ProtectionDomain,
        limits: QueueLimits,
        recvs: Sequence[RecvRequest] = (),
        private_data: bytes = b"",
        timeout_s: float = 5.0,
    ) -> TcpConnection:
        self.check_limits(limits, private_data)
        domain = self.own_domain(pd)
        family, sockaddr = _resolve(address, passive=False)
        deadline_s = time.monotonic() + timeout_s
        sock = _socket(family, self.timeouts)
        connection = TcpConnection(domain, limits, self.timeouts, self.deputy)
        try:
            connection.post_recv(recvs)
            sock.settimeout(timeout_s)
            sock.connect(sockaddr)
            sock.sendall(pack_greeting(GreetingKind.HELLO, connection.greeting_credit(), private_data))
            kind, text, posted = _read_greeting(sock, deadline_s)
            if kind is not GreetingKind.READY:
                reason = text.decode(errors="replace")
                raise ShimError(errno.ECONNREFUSED, "rdma_connect", f"{address}: rejected: {reason}")
            connection.start(sock, posted, text)
        except OSError as error:
            connection.close()
            sock.close()
            if isinstance(error, ShimError):
                raise
            number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno or errno.ECONNREFUSED
            raise ShimError(number, "rdma_connect", f"{address}: {error}") from error
        except FrameError as error:
            connection.close()
            sock.close()
            raise ShimError(errno.ECONNREFUSED, "rdma_connect", f"{address}: {error}") from error
        return connection

    def own_domain(self, pd: ProtectionDomain) -> TcpDomain:
        """The domain as this device made it. Raises ShimError EINVAL for another device's."""
        if not isinstance(pd, TcpDomain) or pd.device is not self:
            raise ShimError(errno.EINVAL, "ibv_create_qp", "the protection domain belongs to another device")
        return pd


class TcpRequest:
    """`doca_shims.api.ConnectionRequest`. Owns the socket until it is answered."""

    def __init__(self, device: TcpFabric, sock: socket.socket, posted: int, private_data: bytes) -> None:
        self._device = device
        self._socket: socket.socket | None = sock
        self._posted = posted
        self.private_data = private_data
        self.peer = "{}:{}".format(*sock.getpeername()[:2])

    def accept(
        self, pd: ProtectionDomain, limits: QueueLimits, recvs: Sequence[RecvRequest] = (), private_data: bytes = b""
    ) -> TcpConnection:
        self._device.check_limits(limits, private_data)
        domain = self._device.own_domain(pd)
        sock = self._take()
        connection = TcpConnection(domain, limits, self._device.timeouts, self._device.deputy)
        try:
            connection.post_recv(recvs)
            sock.settimeout(_GREETING_LIMIT_S)
            sock.sendall(pack_greeting(GreetingKind.READY, connection.greeting_credit(), private_data))
            connection.start(sock, self._posted, self.private_data)
        except OSError as error:
            connection.close()
            sock.close()
            if isinstance(error, ShimError):
                raise
            raise ShimError(errno.ECONNRESET, "rdma_accept", f"{self.peer} went away: {error}") from error
        return connection

    def reject(self, reason: str) -> None:
        sock = self._take()
        with suppress(OSError):  # the peer may have gone
            sock.sendall(pack_greeting(GreetingKind.REJECTED, 0, reason.encode()[:REASON_BYTES_MAX]))
        sock.close()

    def _take(self) -> socket.socket:
        sock, self._socket = self._socket, None
        if sock is None:
            raise ShimError(errno.EINVAL, "rdma_accept", "this request has been answered already")
        return sock


class _Newcomer:
    """A socket whose greeting is not complete yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.received = bytearray()
        self.deadline_s = time.monotonic() + _GREETING_LIMIT_S


class TcpListener(Endpoint):
    """`doca_shims.api.Listener`."""

    def __init__(self, device: TcpFabric, address: str) -> None:
        super().__init__()
        family, sockaddr = _resolve(address, passive=True)
        self._device = device
        self._socket: socket.socket = _socket(family, device.timeouts)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(sockaddr)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ShimError(error.errno or errno.EINVAL, "rdma_listen", f"{address}: {error.strerror}") from error
        self._socket.setblocking(False)
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._newcomers: deque[_Newcomer] = deque()
        self._closed = False

    def fileno(self) -> int:
        return self._epoll.fileno()

    def accept(self) -> TcpRequest | None:
        while len(self._newcomers) < _BACKLOG:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                break
            sock.setblocking(False)
            _tune(sock, self._device.timeouts)
            self._newcomers.append(_Newcomer(sock))
            self._epoll.register(sock, select.EPOLLIN)
        for _ in range(len(self._newcomers)):
            request = self._hear(self._newcomers.popleft())
            if request is not None:
                return request
        return None

    def _hear(self, newcomer: _Newcomer) -> TcpRequest | None:
        """Read of a greeting what is there; keep the socket in the queue until it is whole or its time is over."""
        sock = newcomer.socket
        received = newcomer.received
        try:
            while (missing := _missing(received)) > 0:
                data = sock.recv(missing)
                if not data:
                    raise FrameError("the peer went away")
                received += data
            kind, _, posted = unpack_greeting(received[:GREETING_BYTES])
            if kind is not GreetingKind.HELLO:
                raise FrameError("not a HELLO")
            request = TcpRequest(self._device, sock, posted, bytes(received[GREETING_BYTES:]))
        except BlockingIOError:
            if time.monotonic() < newcomer.deadline_s:
                self._newcomers.append(newcomer)
                return None
        except (FrameError, OSError):
            received.clear()
        else:
            self._epoll.unregister(sock)
            return request
        self._epoll.unregister(sock)
        sock.close()
        return None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._epoll.close()
        self._socket.close()
        for newcomer in self._newcomers:
            newcomer.socket.close()
        self._device.forget(self)


def _missing(received: bytearray) -> int:
    """Bytes of a greeting that are still to come. Raises FrameError."""
    if len(received) < GREETING_BYTES:
        return GREETING_BYTES - len(received)
    _, length, _ = unpack_greeting(received[:GREETING_BYTES])
    return GREETING_BYTES + length - len(received)


def _read_greeting(sock: socket.socket, deadline_s: float) -> tuple[GreetingKind, bytes, int]:
    received = bytearray()
    while (missing := _missing(received)) > 0:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        data = sock.recv(missing)
        if not data:
            raise FrameError("the listener went away")
        received += data
    kind, _, posted = unpack_greeting(received[:GREETING_BYTES])
    return kind, bytes(received[GREETING_BYTES:]), posted


def _resolve(address: str, passive: bool) -> tuple[int, tuple[str, int]]:
    """(address family, socket address) of ``host:port``. Raises ShimError EINVAL."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ShimError(errno.EINVAL, "rdma_resolve_addr", f"{address!r} is not host:port")
    try:
        flags = socket.AI_PASSIVE if passive else 0
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=flags)
    except OSError as error:
        raise ShimError(errno.EINVAL, "rdma_resolve_addr", f"{address}: {error}") from error
    family, _, _, _, sockaddr = found[0]
    return family, (str(sockaddr[0]), int(sockaddr[1]))


def _socket(family: int, timeouts: Timeouts) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    _tune(sock, timeouts)
    return sock


def _tune(sock: socket.socket, timeouts: Timeouts) -> None:
    """Buffers, congestion control, and a bound on how long a vanished peer goes unnoticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, path in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        # Setting a size switches the kernel's own tuning off, so only where a good size is allowed.
        if _limit_bytes(path) >= _BUFFER_BYTES_MIN:
            sock.setsockopt(socket.SOL_SOCKET, option, min(_BUFFER_BYTES, _limit_bytes(path)))
    with suppress(OSError):  # not allowed or not built in
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(timeouts.transport_s)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeouts.transport_s * 1000) + 1)


def _limit_bytes(name: str) -> int:
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except (OSError, ValueError):
        return 0


_: type[Fabric] = TcpFabric
