"""What a connection of emu-shm holds: its socket, its event and control page, and the peer's half of each.

`fabric_shm` exchanges the halves; `fabric_shm_connection` is the data path on top of this, and closes it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from doca_shims.api import ConnectionState, QueueLimits, ShimError
from emulator import fabric_shm_pages
from emulator.fabric_core import QueuePair
from emulator.fabric_shm_initiator import Initiator
from emulator.fabric_shm_messages import Messages
from emulator.fabric_shm_pages import ControlPage, RegionTable
from emulator.fabric_shm_peer import Peer

if TYPE_CHECKING:
    from emulator.fabric_shm_domain import ShmDomain


class Attachment(QueuePair):
    """Made in two steps: this side's half first, so that receives can be posted before the peer hears of it; then
    `attach`."""

    def __init__(self, pd: ShmDomain, limits: QueueLimits, sock: socket.socket) -> None:
        super().__init__(pd, limits, "")
        self._domain = pd
        self._socket: socket.socket = sock
        self._page_fd = ControlPage.create()
        self._page = ControlPage(self._page_fd)
        self._own = self._page.words
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._event, select.EPOLLIN)
        self._attached = False
        self._live: Peer | None = None
        self._channel: Any = None  # native code for this connection, or None
        self._initiator: Initiator
        self._messages: Messages
        pd.connections.add(self)

    def half(self) -> list[int]:
        """Descriptors that the peer needs: control page, region table, event. Still owned here."""
        return [self._page_fd, self._domain.table_fd, self._event]

    def attach(self, descriptors: Sequence[int], pid: int, private_data: bytes) -> None:
        """Take the peer's half, whose descriptors become this connection's. Raises ShimError where they are not
        what they should be; `close` then releases them."""
        page_fd, table_fd, self._peer_event = descriptors
        self._attached = True
        self._peer_page: ControlPage | None = None
        self._table: RegionTable | None = None
        self._process: Peer | None = None
        try:
            self._process = Peer(pid)
            self._peer_page = ControlPage(page_fd)
            self._table = RegionTable(table_fd)
        except OSError as error:
            raise ShimError(error.errno or errno.EPROTO, "rdma_connect", f"peer {pid}: {error}") from error
        finally:
            os.close(page_fd)
            os.close(table_fd)
        os.close(self._page_fd)
        self._page_fd = -1
        self._theirs = self._peer_page.words
        self._live = self._process
        if self._domain.native_regions is not None:
            pages = (self._page.address, self._peer_page.address, self._table.address)
            peer = (self._peer_event, pid, self._process.pidfd)
            self._channel = fabric_shm_pages.NATIVE.Channel(self._domain.native_regions, *pages, *peer)
        self._initiator = Initiator(self._domain, self._peer_page, self._table, self._process, self._channel)
        self._messages = Messages(
            self._domain, (self._page, self._peer_page), self._socket, self._peer_event, self._channel
        )
        self.private_data = private_data
        self.peer = f"process {pid}"
        self._socket.setblocking(False)
        self._epoll.register(self._socket, select.EPOLLIN | select.EPOLLRDHUP)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def page(self) -> ControlPage:
        """This side's control page, for the domain that revokes regions."""
        return self._page

    @property
    def process(self) -> Peer | None:
        return self._live if self._attached and self.state != ConnectionState.CLOSED else None

    def _release(self) -> None:
        """Let go of all that this side and the peer gave; for `close`."""
        if self._channel is not None:
            self._channel.detach()
        self._epoll.close()
        self._socket.close()
        os.close(self._event)
        if self._page_fd >= 0:
            os.close(self._page_fd)
        self._page.unmap()
        if not self._attached:
            return
        os.close(self._peer_event)
        if self._peer_page is not None:
            self._peer_page.unmap()
        if self._table is not None:
            self._table.unmap()
        if self._process is not None:
            self._process.close()
