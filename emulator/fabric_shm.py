"""emu-shm: an RDMA device between processes of one user on one machine.

An address is the path of a Unix socket. Connecting exchanges control pages, region tables and events as
descriptors; see `fabric_shm_connection` for the data path and FIDELITY.md for what is not as on hardware.
Options: `rnr_timeout_s` (1.0), `transport_timeout_s` (4.0).
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from doca_shims.api import Fabric, ProtectionDomain, QueueLimits, RecvRequest, ShimError
from emulator.fabric_core import MAX_PRIVATE_DATA_BYTES, Device, Timeouts
from emulator.fabric_endpoint import Endpoint
from emulator.fabric_options import read_seconds
from emulator.fabric_shm_connection import ShmConnection
from emulator.fabric_shm_domain import ShmDomain

API_VERSION = (1, 0)

_HELLO = b"entresol-shm-1 hello"
_READY = b"entresol-shm-1 ready"
_REJECTED = b"entresol-shm-1 no   "
_GREETING_BYTES = len(_HELLO)
_HALF = 3  # descriptors of one half of a connection
_SOCKET_BUFFER_BYTES = 1 << 20
_BACKLOG = 64
_GREETING_LIMIT_S = 5.0
_PATH_BYTES_MAX = 107


def create(options: Mapping[str, str]) -> ShmFabric:
    """Open the device. Raises ShimError EINVAL for an unknown or bad option."""
    seconds = read_seconds(options, {"rnr_timeout_s": 1.0, "transport_timeout_s": 4.0})
    return ShmFabric(Timeouts(seconds["rnr_timeout_s"], seconds["transport_timeout_s"]))


class ShmFabric(Device):
    """`doca_shims.api.Fabric`."""

    def __init__(self, timeouts: Timeouts) -> None:
        super().__init__(one_sided_initiator=True)
        self.timeouts = timeouts

    def alloc_pd(self) -> ShmDomain:
        domain = ShmDomain(self)
        self.domains.add(domain)
        return domain

    def listen(self, address: str) -> ShmListener:
        listener = ShmListener(self, address)
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
    ) -> ShmConnection:
        self.check_limits(limits, private_data)
        domain = own_domain(self, pd)
        _check_path(address)
        sock = _socket()
        sock.settimeout(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            refused = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
            number = errno.ECONNREFUSED if refused else error.errno or errno.ETIMEDOUT
            raise ShimError(number, "rdma_connect", f"{address}: {error}") from error
        connection = ShmConnection(domain, limits, sock, self.timeouts)
        try:
            connection.post_recv(recvs)
            socket.send_fds(sock, [_HELLO + private_data], connection.half())
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            message, descriptors = _receive_greeting(sock)
            if message[:_GREETING_BYTES] != _READY or len(descriptors) != _HALF:
                for descriptor in descriptors:
                    os.close(descriptor)
                text = message[_GREETING_BYTES:].decode(errors="replace")
                reason = f"rejected: {text}" if message.startswith(_REJECTED) else "the listener went away"
                raise ShimError(errno.ECONNREFUSED, "rdma_connect", f"{address}: {reason}")
            connection.attach(descriptors, _peer_pid(sock), message[_GREETING_BYTES:])
        except TimeoutError as error:
            connection.close()
            detail = f"{address}: no answer in {timeout_s} s"
            raise ShimError(errno.ETIMEDOUT, "rdma_connect", detail) from error
        except ShimError:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            raise ShimError(errno.ECONNREFUSED, "rdma_connect", f"{address}: {error}") from error
        return connection


class ShmRequest:
    """`doca_shims.api.ConnectionRequest`. Owns the socket and the peer's descriptors until it is answered."""

    def __init__(self, device: ShmFabric, sock: socket.socket, descriptors: list[int], private_data: bytes) -> None:
        self._device = device
        self._socket: socket.socket | None = sock
        self._descriptors = descriptors
        self._pid = _peer_pid(sock)
        self.private_data = private_data
        self.peer = f"process {self._pid}"

    def accept(
        self, pd: ProtectionDomain, limits: QueueLimits, recvs: Sequence[RecvRequest] = (), private_data: bytes = b""
    ) -> ShmConnection:
        self._device.check_limits(limits, private_data)
        domain = own_domain(self._device, pd)
        sock, descriptors = self._take()
        connection = ShmConnection(domain, limits, sock, self._device.timeouts)
        try:
            connection.post_recv(recvs)
            socket.send_fds(sock, [_READY + private_data], connection.half())
            half, descriptors = descriptors, []
            connection.attach(half, self._pid, self.private_data)
        except OSError as error:
            connection.close()
            if isinstance(error, ShimError):
                raise
            raise ShimError(errno.ECONNRESET, "rdma_accept", f"{self.peer} went away: {error}") from error
        finally:
            for descriptor in descriptors:
                _close_quietly(descriptor)
        return connection

    def reject(self, reason: str) -> None:
        sock, descriptors = self._take()
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(OSError):  # the peer may have gone
            sock.send(_REJECTED + reason.encode()[:1024])
        sock.close()

    def _take(self) -> tuple[socket.socket, list[int]]:
        sock, self._socket = self._socket, None
        if sock is None:
            raise ShimError(errno.EINVAL, "rdma_accept", "this request has been answered already")
        descriptors, self._descriptors = self._descriptors, []
        return sock, descriptors


class ShmListener(Endpoint):
    """`doca_shims.api.Listener`. Owns the socket file."""

    def __init__(self, device: ShmFabric, address: str) -> None:
        super().__init__()
        _check_path(address)
        self.address = address
        self._device = device
        self._socket: socket.socket = _bind(address)
        self._inode = os.stat(address).st_ino
        self._socket.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._greeting: deque[tuple[float, socket.socket]] = deque()  # connected, not yet heard from
        self._closed = False

    def fileno(self) -> int:
        return self._epoll.fileno()

    def accept(self) -> ShmRequest | None:
        while len(self._greeting) < _BACKLOG:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                break
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            self._greeting.append((time.monotonic() + _GREETING_LIMIT_S, sock))
            self._epoll.register(sock, select.EPOLLIN)
        for _ in range(len(self._greeting)):
            deadline_s, sock = self._greeting.popleft()
            request = self._hear(sock, deadline_s)
            if request is not None:
                return request
        return None

    def _hear(self, sock: socket.socket, deadline_s: float) -> ShmRequest | None:
        """Read a greeting if it is there; otherwise keep the socket in the queue until its time is over."""
        sock.setblocking(False)
        descriptors: list[int] = []
        message = b""
        try:
            message, descriptors = _receive_greeting(sock)
        except BlockingIOError:
            if time.monotonic() < deadline_s:
                self._greeting.append((deadline_s, sock))
                return None
        except OSError:
            message = b""
        self._epoll.unregister(sock)
        private_data = message[_GREETING_BYTES:]
        good = message[:_GREETING_BYTES] == _HELLO and len(descriptors) == _HALF
        if not good or len(private_data) > MAX_PRIVATE_DATA_BYTES:
            for descriptor in descriptors:
                os.close(descriptor)
            sock.close()
            return None
        return ShmRequest(self._device, sock, descriptors, private_data)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(FileNotFoundError):
            if os.stat(self.address).st_ino == self._inode:
                os.unlink(self.address)
        self._epoll.close()
        self._socket.close()
        for _, sock in self._greeting:
            sock.close()
        self._device.forget(self)


def own_domain(device: ShmFabric, pd: ProtectionDomain) -> ShmDomain:
    """The domain as this device made it. Raises ShimError EINVAL for another device's."""
    if not isinstance(pd, ShmDomain) or pd.device is not device:
        raise ShimError(errno.EINVAL, "ibv_create_qp", "the protection domain belongs to another device")
    return pd


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return sock


def _check_path(address: str) -> None:
    if not address or len(os.fsencode(address)) > _PATH_BYTES_MAX or "\0" in address:
        detail = f"{address!r} is no path of 1 to {_PATH_BYTES_MAX} bytes, the kernel's limit for a Unix socket"
        raise ShimError(errno.EINVAL, "rdma_bind_addr", detail)


def _bind(address: str) -> socket.socket:
    """Bind and listen, for this user only. The file that a dead listener left behind is replaced."""
    directory = os.path.dirname(address) or "."
    sock = _socket()
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two starting at once must not remove each other's file
            if _is_socket(address) and not _is_served(address):
                os.unlink(address)
            old_mask = os.umask(0o177)
            try:
                sock.bind(address)
            finally:
                os.umask(old_mask)
            sock.listen(_BACKLOG)
        finally:
            os.close(lock)
    except OSError as error:
        sock.close()
        raise ShimError(error.errno or errno.EINVAL, "rdma_listen", f"{address}: {error.strerror}") from error
    return sock


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _is_served(address: str) -> bool:
    with _socket() as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _receive_greeting(sock: socket.socket) -> tuple[bytes, list[int]]:
    message, descriptors, _, _ = socket.recv_fds(sock, 4096, _HALF + 1, socket.MSG_CMSG_CLOEXEC)
    return message, list(descriptors)


def _peer_pid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[0])


def _close_quietly(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)


_: type[Fabric] = ShmFabric
