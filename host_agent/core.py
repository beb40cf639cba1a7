"""The client's one implementation: every operation is started here, for the blocking and the asyncio face alike.

Owns the sessions with all DPUs, the registered memory and the topology. `start_*` submits and returns a `Call`; the
faces wait for it, each in its way, and take `Call.result()`. Statuses for blocks, exceptions only for misuse.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from common import wire
from common.errors import EntresolError, LowerLayerError, UnavailableError, UserError
from common.identity import NamespaceRecord
from common.status import Status
from common.wire import EntryFlags, Flags, Op
from doca_shims.api import Clock, ShimError
from host_agent import batch
from host_agent.batch import Keys
from host_agent.buffers import Buffer
from host_agent.config import AgentSettings
from host_agent.link import RegionLink
from host_agent.memory import MemoryTable, RegisteredMemory, Spans, registered_buffer
from host_agent.namespace import Namespace
from host_agent.operation import Operation, Positions, Request
from host_agent.progress import Progress
from host_agent.registration import Fabrics, Grants
from host_agent.results import BlockResults, LookupResult
from host_agent.session import DpuSession
from host_agent.topology import SlotClass, Topology

log = logging.getLogger(__name__)
T = TypeVar("T")


class Share(NamedTuple):
    """The blocks of one region, and what its connection let them name; None where it was down."""

    link: RegionLink
    positions: Positions
    grants: Grants | None


ALL: Final = slice(None)
TIMEOUT_MAX_S: Final = 3600.0


class Call(Generic[T]):
    """An operation under way. `result` is valid once `operation.done`, and computes checksums where asked for."""

    __slots__ = ("_finish", "heavy", "operation")

    def __init__(self, operation: Operation, finish: Callable[[], T], heavy: bool = False) -> None:
        self.operation = operation
        self.heavy = heavy
        """Whether `result` takes long enough to keep it off an event loop."""
        self._finish = finish

    def result(self) -> T:
        return self._finish()


class AgentCore:
    """Opens sessions with all DPUs of `settings`; at least one must answer within `connect_timeout_s`.

    Raises UnavailableError (none answers), UserError (the DPU refuses this tenant, or speaks another version).
    """

    def __init__(self, settings: AgentSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.progress = Progress(clock)
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

    # ------------------------------------------------------------------------------------ data

    def start_store(
        self,
        namespace: Namespace,
        keys: Keys,
        memory: Any,
        until_flash: bool,
        ttl_s: int,
        verify: bool | None,
        timeout_s: float | None,
    ) -> Call[BlockResults]:
        pairs, spans = self._checked(keys, memory)
        verify = self.settings.verify if verify is None else verify
        flags = EntryFlags.HAS_CHECKSUM if verify else EntryFlags.NONE
        entries = batch.block_entries(pairs, spans, spans.block_bytes, 0, ttl_s, flags)
        if verify:
            entries["checksum"] = [_checksum(spans.pieces(index)) for index in range(len(spans))]
        operation = self.operation(Op.STORE, len(pairs), timeout_s)
        sendable = _refuse(operation, batch.refusals(spans, 0, destination=False))
        wire_flags = Flags.UNTIL_FLASH if until_flash else Flags.NONE
        self._submit(operation, namespace, self._class_of(namespace), pairs, entries, sendable, spans, wire_flags)
        return Call(operation, lambda: BlockResults(operation.answers))

    def start_retrieve(
        self,
        namespace: Namespace,
        keys: Keys,
        memory: Any,
        offset: npt.ArrayLike,
        whole: bool,
        verify: bool | None,
        timeout_s: float | None,
    ) -> Call[BlockResults]:
        pairs, spans = self._checked(keys, memory)
        verify = self.settings.verify if verify is None else verify
        flags = EntryFlags.WANT_CHECKSUM if verify else EntryFlags.NONE
        slot_class = self._class_of(namespace)
        whole_bytes = slot_class.slot_bytes if whole else 0
        operation = self.operation(Op.RETRIEVE, len(pairs), timeout_s)
        sendable = _refuse(operation, batch.refusals(spans, offset, destination=True, whole_bytes=whole_bytes))
        wanted = 0 if whole else spans.block_bytes
        entries = batch.block_entries(pairs, spans, wanted, _wire_offset(offset), 0, flags)
        self._submit(operation, namespace, slot_class, pairs, entries, sendable, spans, Flags.NONE)
        if not verify:
            return Call(operation, lambda: BlockResults(operation.answers))
        return Call(operation, lambda: _verified(operation, spans), heavy=True)

    def start_prefetch(
        self, namespace: Namespace, keys: Keys, memory: Any, offset: npt.ArrayLike, timeout_s: float | None
    ) -> Call[BlockResults]:
        if memory is None:
            pairs = batch.key_pairs(keys)
            entries = batch.block_entries(pairs, None, 0, _wire_offset(offset), 0, EntryFlags.NONE)
            operation = self.operation(Op.PREFETCH, len(pairs), timeout_s)
            self._submit(operation, namespace, self._class_of(namespace), pairs, entries, None, None, Flags.NONE)
        else:
            pairs, spans = self._checked(keys, memory)
            entries = batch.block_entries(pairs, spans, spans.block_bytes, _wire_offset(offset), 0, EntryFlags.NONE)
            operation = self.operation(Op.PREFETCH, len(pairs), timeout_s)
            sendable = _refuse(operation, batch.refusals(spans, offset, destination=True))
            self._submit(
                operation, namespace, self._class_of(namespace), pairs, entries, sendable, spans, Flags.TO_HOST
            )
        return Call(operation, lambda: BlockResults(operation.answers))

    def start_lookup(self, namespace: Namespace, keys: Keys, timeout_s: float | None) -> Call[LookupResult]:
        operation = self._start_keys(Op.LOOKUP, namespace, keys, 0, timeout_s)[0]
        return Call(operation, lambda: LookupResult(operation.answers))

    def start_keys(
        self, op: Op, namespace: Namespace, keys: Keys, argument: int, timeout_s: float | None
    ) -> Call[BlockResults]:
        """PIN, UNPIN, TOUCH, DELETE."""
        operation = self._start_keys(op, namespace, keys, argument, timeout_s)[0]
        return Call(operation, lambda: BlockResults(operation.answers))

    def start_lease(
        self, namespace: Namespace, keys: Keys, duration_ms: int, timeout_s: float | None
    ) -> tuple[Operation, list[Share]]:
        """LEASE, and which link each block's answer came from."""
        return self._start_keys(Op.LEASE, namespace, keys, duration_ms, timeout_s)

    def start_pages(
        self, op: Op, link: RegionLink, entries: wire.Entries, flags: Flags, timeout_s: float | None
    ) -> Operation:
        """LIST and STAT of one region: the answer is in `Operation.pages`."""
        operation = self.operation(op, 1, timeout_s)
        operation.pages = []
        request = Request(operation, entries, ALL, flags=flags)
        operation.pending.add(request)
        link.submit([request], link.grants)
        return operation

    def cancel(self, operation: Operation) -> Operation | None:
        """Ask the DPUs to give up what is outstanding of `operation`; they answer it, CANCELLED where nothing was
        moved yet. Returns the operation of asking, None where nothing is outstanding."""
        asking = self.operation(Op.CANCEL, len(operation.pending), self.settings.timeout_s)
        prepared: list[tuple[RegionLink, Request]] = []
        at = 0
        for link in {request.link for request in list(operation.pending)}:
            ids = link.withdraw(operation) if link is not None else []
            if link is None or not ids:
                continue
            entries = np.zeros(len(ids), wire.CANCEL_ENTRY)
            entries["request_id"] = ids
            prepared.append((link, Request(asking, entries, slice(at, at + len(ids)))))
            at += len(ids)
        asking.pending.update(request for _link, request in prepared)
        for link, request in prepared:
            link.submit([request], link.grants)
        return asking if prepared else None

    # ------------------------------------------------------------------------------------ parts of the above

    def _checked(self, keys: Keys, memory: Any) -> tuple[batch.Pairs, Spans]:
        pairs = batch.key_pairs(keys)
        spans = self.memories.resolve(memory)
        if len(spans) != len(pairs):
            raise UserError(f"{len(pairs)} keys, but memory for {len(spans)} blocks")
        return pairs, spans

    def operation(self, op: Op, count: int, timeout_s: float | None) -> Operation:
        self._check_open()
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        if not 0 < timeout_s <= TIMEOUT_MAX_S:
            raise UserError(f"a timeout lies between 0 and {TIMEOUT_MAX_S:g} s, not {timeout_s:g}")
        answers = np.zeros(count, wire.RESPONSE_LAYOUT[op] if op not in (Op.LIST, Op.STAT) else wire.RESULT)
        answers["status"] = Status.DISCONNECTED
        return Operation(op, answers, self.clock.monotonic_ns() + int(timeout_s * 1e9))

    def _class_of(self, namespace: Namespace) -> SlotClass:
        return self._topology.slot_class(namespace.block_bytes)

    def _start_keys(
        self, op: Op, namespace: Namespace, keys: Keys, argument: int, timeout_s: float | None
    ) -> tuple[Operation, list[Share]]:
        pairs = batch.key_pairs(keys)
        operation = self.operation(op, len(pairs), timeout_s)
        entries = batch.key_entries(pairs, argument)
        return operation, self._submit(
            operation, namespace, self._class_of(namespace), pairs, entries, None, None, Flags.NONE
        )

    def _submit(
        self,
        operation: Operation,
        namespace: Namespace,
        slot_class: SlotClass,
        pairs: batch.Pairs,
        entries: wire.Entries,
        sendable: npt.NDArray[np.intp] | None,
        spans: Spans | None,
        flags: Flags,
    ) -> list[Share]:
        """Send every block, or those at `sendable`, to its region."""
        shares = [share._replace(grants=share.link.grants) for share in _shares(slot_class, pairs, sendable)]
        prepared: list[tuple[RegionLink, list[Request], Grants]] = []
        for link, positions, grants in shares:
            handle = grants.handles.get(namespace.digest) if grants is not None else None
            if grants is not None and handle is not None:  # the others stay DISCONNECTED
                made = batch.requests(
                    operation, entries, positions, handle, spans=spans, domain=grants.domain, flags=flags
                )
                prepared.append((link, made, grants))
        try:
            for link, made, grants in prepared:
                link.submit(made, grants)
        except BaseException:
            self.progress.abandon(operation)
            raise
        return shares

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


def _shares(slot_class: SlotClass, pairs: batch.Pairs, sendable: npt.NDArray[np.intp] | None) -> list[Share]:
    """Which blocks go to which region."""
    if sendable is not None:
        pairs = pairs[sendable]
    if not len(pairs):
        return []
    placed = slot_class.pod_map.place(pairs[:, 0], pairs[:, 1])
    if len(slot_class.regions) == 1 or len(placed) == 1:
        return [Share(slot_class.regions[int(placed[0])].link, ALL if sendable is None else sendable, None)]
    shares: list[Share] = []
    for index, region in enumerate(slot_class.regions):
        chosen = np.flatnonzero(placed == index)
        if len(chosen):
            shares.append(Share(region.link, chosen if sendable is None else sendable[chosen], None))
    return shares


def _refuse(operation: Operation, statuses: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp] | None:
    """Answer what is refused; the positions of the rest, None for all."""
    failed = statuses != batch.NOT_FAILED
    if not failed.any():
        return None
    operation.answers["status"][failed] = statuses[failed]
    return np.flatnonzero(~failed)


def _wire_offset(offset: npt.ArrayLike) -> npt.ArrayLike:
    """Offsets that the wire can carry; those that it cannot were refused before."""
    if isinstance(offset, int):
        return offset & 0xFFFFFFFF
    return np.asarray(offset).astype(np.uint32)


def _checksum(pieces: list[memoryview]) -> int:
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def _verified(operation: Operation, spans: Spans) -> BlockResults:
    """Compare what arrived with the checksums that the DPU states; CORRUPT where they differ."""
    answers = operation.answers
    for index in np.flatnonzero(answers["status"] == Status.OK):
        left = int(answers["length"][index])
        pieces = []
        for piece in spans.pieces(int(index)):
            pieces.append(piece[:left])
            left -= len(pieces[-1])
        if left or _checksum(pieces) != int(answers["checksum"][index]):
            answers["status"][index] = Status.CORRUPT
    return BlockResults(answers)
