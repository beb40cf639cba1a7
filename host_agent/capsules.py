"""The registered memory of one connection's capsules: places to receive into and places to send from.

Owned by a `host_agent.link.RegionLink`; allocated once for each connection's life on one fabric and protection domain.
"""

from __future__ import annotations

from common.wire import MAX_CAPSULE_BYTES
from doca_shims.api import Access, Fabric, ProtectionDomain, RecvRequest, Sge

_new = tuple.__new__
"""A named tuple in half the time that its own constructor takes."""


class CapsuleBuffers:
    """`count` receive places and as many send places of MAX_CAPSULE_BYTES each. Close after the connection."""

    def __init__(self, fabric: Fabric, pd: ProtectionDomain, count: int) -> None:
        self.count = count
        self._memory = fabric.allocate(2 * count * MAX_CAPSULE_BYTES)
        try:
            self._region = pd.register(self._memory.address, self._memory.length_bytes, Access.LOCAL_WRITE)
        except OSError:
            self._memory.close()
            raise
        lkey, address, view = self._region.lkey, self._memory.address, self._memory.view
        self._send_address = address + count * MAX_CAPSULE_BYTES
        self._lkey = lkey
        self.recvs = [
            RecvRequest(index, Sge(address + index * MAX_CAPSULE_BYTES, MAX_CAPSULE_BYTES, lkey))
            for index in range(count)
        ]
        """What to post: `wr_id` is the place's number."""
        places = [
            view[at : at + MAX_CAPSULE_BYTES] for at in range(0, 2 * count * MAX_CAPSULE_BYTES, MAX_CAPSULE_BYTES)
        ]
        self._received = places[:count]
        self.sends = places[count:]
        """Send places, to be written to."""

    def received(self, index: int, length_bytes: int) -> memoryview:
        """What arrived in place `index`; valid until the place is posted again."""
        return self._received[index][:length_bytes]

    def sge(self, index: int, length_bytes: int) -> Sge:
        """Of the capsule that was written into send place `index`."""
        return _new(Sge, (self._send_address + index * MAX_CAPSULE_BYTES, length_bytes, self._lkey))

    def close(self) -> None:
        """Idempotent."""
        for views in (self._received, self.sends):
            for view in views:
                view.release()
            views.clear()
        self._region.close()
        self._memory.close()
