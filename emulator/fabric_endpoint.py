"""What a forked child must let go of: the sockets of the emulated fabrics' listeners and connections."""

from __future__ import annotations

import os
import socket
import weakref


class Endpoint:
    """Something with a socket of its own. A forked child lets go of it: otherwise the peer of a dead process would
    see a living connection, and a dead listener's address would stay in use, for as long as the child lives."""

    _socket: socket.socket | None = None

    def __init__(self) -> None:
        _endpoints.add(self)

    def abandon(self) -> None:
        """Called in a forked child only. Nothing but the descriptor is touched."""
        if self._socket is not None:
            self._socket.close()


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _abandon_all() -> None:
    for endpoint in list(_endpoints):
        endpoint.abandon()


os.register_at_fork(after_in_child=_abandon_all)
