"""Which keys a session's requests carry: its protection domains, the memory registered in them, namespace handles.

A session has one protection domain on each fabric that it uses; all of that fabric's connections share it, so one
registration serves all regions. Memory registered with the client is registered here when the domain is made and
when it is added later; nothing outlives the session. Owned by `host_agent.session`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from common.errors import LowerLayerError
from doca_shims.api import Access, Fabric, MemoryRegion, ProtectionDomain, ShimError
from doca_shims.registry import create_fabric
from host_agent.memory import RegisteredMemory

_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


class Fabrics:
    """Devices by backend and options, each opened once for a client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, frozenset[tuple[str, str]]], Fabric] = {}

    def get(self, name: str, options: Mapping[str, str]) -> Fabric:
        """Raises ShimError when the backend is not installed or does not work here."""
        key = (name, frozenset(options.items()))
        with self._lock:
            fabric = self._open.get(key)
            if fabric is None:
                fabric = self._open[key] = create_fabric(name, dict(options))
            return fabric

    def close(self) -> None:
        """Everything made from the devices is closed before. Idempotent."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()


class Domain:
    """One protection domain and what is registered in it. Thread-safe."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.pd: ProtectionDomain = fabric.alloc_pd()
        self._lock = threading.Lock()
        self._regions: dict[int, MemoryRegion] = {}
        self._closed = False

    def add(self, memory: RegisteredMemory) -> None:
        """Raises LowerLayerError. Adding again does nothing."""
        with self._lock:
            if self._closed or memory.closed or memory.id in self._regions:
                return
            try:
                self._regions[memory.id] = self.pd.register(memory.address, memory.length_bytes, _ACCESS, memory.owner)
            except ShimError as error:
                raise LowerLayerError(error.operation, error.errno or 0, error.detail) from error

    def remove(self, memory: RegisteredMemory) -> None:
        with self._lock:
            region = self._regions.pop(memory.id, None)
            if region is not None:
                region.close()

    def region(self, memory: RegisteredMemory) -> MemoryRegion | None:
        """None when it is not registered here (any more)."""
        return self._regions.get(memory.id)

    def close(self) -> None:
        """Its connections are closed before. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for region in self._regions.values():
                region.close()
            self._regions.clear()
            self.pd.close()


class Grants:
    """What a request on one connection may name: memory by the domain's keys, namespaces by the session's handles.
    `handles` is the session's own and grows with it."""

    __slots__ = ("domain", "handles")

    def __init__(self, domain: Domain, handles: Mapping[bytes, int]) -> None:
        self.domain = domain
        self.handles = handles


def add_all(domain: Domain, memories: Iterable[RegisteredMemory]) -> None:
    """Raises LowerLayerError for the first that cannot be registered."""
    for memory in memories:
        domain.add(memory)
