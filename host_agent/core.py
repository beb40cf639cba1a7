"""What all of a client's calls stand on: sessions with all DPUs, registered memory, namespaces, the topology.

Opened and closed as a whole, by `host_agent.client`. Makes operations but sends nothing: `host_agent.dispatch` does.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

import numpy as np

from common.errors import EntresolError, LowerLayerError, UnavailableError, UserError
from common.identity import NamespaceRecord
from common.status import Status
from common.wire import Op
from doca_shims.api import Clock, ShimError
from host_agent.buffers import Buffer
from host_agent.busy_poll import BusyPolling
from host_agent.config import AgentSettings
from host_agent.memory import MemoryTable, RegisteredMemory, registered_buffer
from host_agent.namespace import Namespace
from host_agent.operation import LAYOUT, Operation
from host_agent.progress import Progress
from host_agent.registration import Fabrics
from host_agent.session import DpuSession
from host_agent.topology import SlotClass, Topology

log = logging.getLogger(__name__)
TIMEOUT_MAX_S: Final = 3600.0


def _unanswered(layout: np.dtype[np.void]) -> bytes:
    answer = np.zeros(1, layout)
    answer["status"] = Status.DISCONNECTED
    return answer.tobytes()


_UNANSWERED: Final = {op: _unanswered(layout) for op, layout in LAYOUT.items()}
"""What one block's answer is before it came, by operation."""


class AgentCore:
    """Opens sessions with all DPUs of `settings`; at least one must answer within `connect_timeout_s`.

    Raises UnavailableError (none answers), UserError (the DPU refuses this tenant, or speaks another version).
    """

    def __init__(self, settings: AgentSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.progress = Progress(clock, BusyPolling(settings.busy_poll_s))
        self.memories = MemoryTable()
        self._fabrics = Fabrics()
        self._records: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._topology = Topology(0, ())
        self._closed = False
        self._sessions = [
            DpuSession(
                address, settings, self._fabrics, self.memories, self._records, self.progress, clock, self._rebuild
            )
            for address in settings.dpus
        ]
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------ sessions and topology

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def sessions(self) -> list[DpuSession]:
        return list(self._sessions)

    def _connect(self) -> None:
        for session in self._sessions:
            session.start()
        deadline_ns = self.clock.monotonic_ns() + int(self.settings.connect_timeout_s * 1e9)
        for session in self._sessions:
            session.first_attempt.wait(max(0.0, (deadline_ns - self.clock.monotonic_ns()) / 1e9))
        errors = [session.error for session in self._sessions if session.error is not None]
        for error in errors:
            if isinstance(error, UserError):
                raise error
        if len(errors) == len(self._sessions):
            reasons = "; ".join(str(error) for error in errors)
            raise UnavailableError(
                f"no DPU answers ({reasons}). Check that entresol-dpu runs there and that `dpus` names its gRPC address"
            )
        links = [region.link for region in self._topology.regions]
        if not any(link.up for link in links):
            reasons = "; ".join(f"{link.name}: {link.down_reason}" for link in links) or "none is ready"
            raise UnavailableError(f"the DPUs answer, but no region can be used ({reasons})")

    def _rebuild(self) -> None:
        with self._lock:
            facts = [region for session in self._sessions for region in session.regions]
            self._topology = Topology(self._topology.epoch + 1, facts)

    def namespace(self, record: NamespaceRecord, block_bytes: int | None) -> Namespace:
        """Raises UserError where a DPU refuses the record."""
        if record.tenant != self.settings.tenant:
            raise UserError(
                f"the namespace record is of tenant {record.tenant!r}, this client of {self.settings.tenant!r}"
            )
        digest, encoded = record.digest(), record.to_bytes()
        with self._lock:
            known = digest in self._records
            self._records[digest] = encoded
        try:
            for session in self._sessions:
                session.add_namespace(digest, encoded)
        except EntresolError:
            if not known:
                self._records.pop(digest, None)
            raise
        return Namespace(record, digest, block_bytes)

    # ------------------------------------------------------------------------------------ memory

    def allocate(self, length_bytes: int, page_bytes: int | None) -> RegisteredMemory:
        """Fabric memory, registered. Raises UserError, LowerLayerError."""
        if length_bytes <= 0:
            raise UserError("allocate at least one byte")
        fabric = next((session.fabric for session in self._sessions if session.fabric is not None), None)
        if fabric is None:
            raise UnavailableError("no DPU has told of a fabric to allocate memory from yet")
        try:
            memory = fabric.allocate(length_bytes, page_bytes or self.settings.page_bytes)
        except ShimError as error:
            raise LowerLayerError(error.operation, error.errno or 0, error.detail) from error
        buffer = Buffer(memory.address, length_bytes, memory)
        try:
            return self._add(RegisteredMemory(buffer, self._release, memory))
        except EntresolError:
            memory.close()
            raise

    def register(self, memory: Any) -> RegisteredMemory:
        """Raises UserError for what cannot be registered, LowerLayerError where the fabric refuses."""
        return self._add(RegisteredMemory(registered_buffer(memory), self._release, None))

    def _add(self, memory: RegisteredMemory) -> RegisteredMemory:
        self._check_open()
        self.memories.add(memory)
        try:
            for session in self._sessions:
                session.add_memory(memory)
        except EntresolError:
            self._release(memory)
            raise
        return memory

    def _release(self, memory: RegisteredMemory) -> None:
        self.memories.remove(memory)
        for session in self._sessions:
            session.remove_memory(memory)

    # ------------------------------------------------------------------------------------ operations

    def operation(self, op: Op, count: int, timeout_s: float | None) -> Operation:
        if self._closed:
            self._check_open()
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        if not 0 < timeout_s <= TIMEOUT_MAX_S:
            raise UserError(f"a timeout lies between 0 and {TIMEOUT_MAX_S:g} s, not {timeout_s:g}")
        deadline_ns = self.clock.monotonic_ns() + int(timeout_s * 1e9)
        return Operation(op, bytearray(_UNANSWERED[op] * count), deadline_ns)

    def slot_class(self, namespace: Namespace) -> SlotClass:
        return self._topology.slot_class(namespace.block_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this client is closed")

    def close(self) -> None:
        """End all sessions and close what is registered. Idempotent. No byte lands afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for session in self._sessions:
            session.close()
        self.progress.close()
        for memory in self.memories.all():
            memory.close()
        self._fabrics.close()
