"""Every operation of the client, started here for the blocking and the asyncio face alike.

`start_*` submits and returns a `Call`; the faces wait for it, each in its way, and take `Call.result()`. Statuses for
blocks, exceptions only for misuse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from common import wire
from common.errors import UserError
from common.wire import EntryFlags, Flags, Op
from host_agent import batch, checksums, dispatch, plan, single
from host_agent.batch import Keys
from host_agent.core import AgentCore
from host_agent.memory import LENGTH_BYTES_MAX, Spans
from host_agent.namespace import Namespace
from host_agent.operation import Operation
from host_agent.results import BlockResults, LookupResult

log = logging.getLogger(__name__)
T = TypeVar("T")


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


class Calls:
    """The operations of one client."""

    def __init__(self, core: AgentCore) -> None:
        self._core = core

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
        verify = self._core.settings.verify if verify is None else verify
        flags = int(EntryFlags.HAS_CHECKSUM) if verify else 0
        ttl_s = _u32(ttl_s, "a block's time to live in seconds")
        wire_flags = Flags.UNTIL_FLASH if until_flash else Flags.NONE
        slot_class = self._core.slot_class(namespace)
        key, spans = single.only_key(keys), self._core.memories.resolve(memory)
        place = single.only_span(spans) if key is not None else None
        if key is not None and place is not None:
            operation = self._core.operation(Op.STORE, 1, timeout_s)
            stated = checksums.checksum(spans.pieces(0)) if verify else 0
            link, grants, handle = dispatch.where(namespace, slot_class, key)
            if grants is not None:
                entry = single.block_entry(
                    key, handle, place, spans, grants.domain, wanted=place[1], flags=flags, ttl_s=ttl_s, checksum=stated
                )
                dispatch.submit_one(self._core, operation, link, entry, grants, wire_flags)
            return _results(operation)
        planned = plan.plan_blocks(slot_class, namespace.digest, keys, spans, ttl_s=ttl_s, flags=flags)
        if planned is not None:
            operation = self._core.operation(Op.STORE, len(spans), timeout_s)
            seal, most = _sealed(operation, spans, verify)
            dispatch.submit_plan(self._core, operation, slot_class, planned, wire_flags, capsule_blocks=most, seal=seal)
            return _results(operation)
        pairs = _checked(keys, spans)
        entries = batch.block_entries(pairs, spans, spans.block_bytes, 0, ttl_s, flags)
        operation = self._core.operation(Op.STORE, len(pairs), timeout_s)
        sendable = _refuse(operation, batch.refusals(spans, 0, destination=False))
        seal, most = _sealed(operation, spans, verify)
        self._submit(operation, namespace, pairs, entries, sendable, spans, wire_flags, capsule_blocks=most, seal=seal)
        return _results(operation)

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
        verify = self._core.settings.verify if verify is None else verify
        flags = int(EntryFlags.WANT_CHECKSUM) if verify else 0
        slot_class = self._core.slot_class(namespace)
        key, spans = single.only_key(keys), self._core.memories.resolve(memory)
        place = single.only_span(spans) if key is not None and type(offset) is int and not whole else None
        if key is not None and place is not None and type(offset) is int and 0 <= offset <= LENGTH_BYTES_MAX:
            operation = self._core.operation(Op.RETRIEVE, 1, timeout_s)
            compared = _compared(operation, spans, verify)
            link, grants, handle = dispatch.where(namespace, slot_class, key)
            if grants is not None:
                entry = single.block_entry(
                    key, handle, place, spans, grants.domain, wanted=place[1], offset=offset, flags=flags
                )
                dispatch.submit_one(self._core, operation, link, entry, grants, Flags.NONE)
            return _results(operation, compared)
        most = checksums.capsule_blocks(spans) if verify else wire.MAX_BATCH
        if type(offset) is int and not whole and 0 <= offset <= LENGTH_BYTES_MAX:
            planned = plan.plan_blocks(
                slot_class, namespace.digest, keys, spans, offset=offset, flags=flags, must_be_apart=True
            )
            if planned is not None:
                operation = self._core.operation(Op.RETRIEVE, len(spans), timeout_s)
                compared = _compared(operation, spans, verify)
                dispatch.submit_plan(self._core, operation, slot_class, planned, capsule_blocks=most)
                return _results(operation, compared)
        pairs = _checked(keys, spans)
        offset = _offsets(offset, len(pairs))
        whole_bytes = slot_class.slot_bytes if whole else 0
        operation = self._core.operation(Op.RETRIEVE, len(pairs), timeout_s)
        sendable = _refuse(operation, batch.refusals(spans, offset, destination=True, whole_bytes=whole_bytes))
        compared = _compared(operation, spans, verify)
        wanted = 0 if whole else spans.block_bytes
        entries = batch.block_entries(pairs, spans, wanted, _wire_offset(offset), 0, flags)
        self._submit(operation, namespace, pairs, entries, sendable, spans, Flags.NONE, capsule_blocks=most)
        return _results(operation, compared)

    def start_prefetch(
        self, namespace: Namespace, keys: Keys, memory: Any, offset: npt.ArrayLike, timeout_s: float | None
    ) -> Call[BlockResults]:
        if memory is None:
            pairs = batch.key_pairs(keys)
            offset = _offsets(offset, len(pairs))
            entries = batch.block_entries(pairs, None, 0, _wire_offset(offset), 0, EntryFlags.NONE)
            operation = self._core.operation(Op.PREFETCH, len(pairs), timeout_s)
            self._submit(operation, namespace, pairs, entries, None, None, Flags.NONE)
        else:
            spans = self._core.memories.resolve(memory)
            pairs = _checked(keys, spans)
            offset = _offsets(offset, len(pairs))
            entries = batch.block_entries(pairs, spans, spans.block_bytes, _wire_offset(offset), 0, EntryFlags.NONE)
            operation = self._core.operation(Op.PREFETCH, len(pairs), timeout_s)
            sendable = _refuse(operation, batch.refusals(spans, offset, destination=True))
            self._submit(operation, namespace, pairs, entries, sendable, spans, Flags.TO_HOST)
        return _results(operation)

    def start_lookup(self, namespace: Namespace, keys: Keys, timeout_s: float | None) -> Call[LookupResult]:
        operation = self._start_keys(Op.LOOKUP, namespace, keys, 0, timeout_s)[0]
        return Call(operation, lambda: LookupResult(operation.answers))

    def start_keys(
        self, op: Op, namespace: Namespace, keys: Keys, argument: int, timeout_s: float | None
    ) -> Call[BlockResults]:
        """PIN, UNPIN, TOUCH, DELETE."""
        operation = self._start_keys(op, namespace, keys, argument, timeout_s)[0]
        return _results(operation)

    def start_lease(
        self, namespace: Namespace, keys: Keys, duration_ms: int, timeout_s: float | None
    ) -> tuple[Operation, list[dispatch.Share]]:
        """LEASE, and which link each block's answer came from."""
        return self._start_keys(Op.LEASE, namespace, keys, duration_ms, timeout_s)

    def _submit(
        self,
        operation: Operation,
        namespace: Namespace,
        pairs: batch.Pairs,
        entries: wire.Entries,
        sendable: npt.NDArray[np.intp] | None,
        spans: Spans | None,
        flags: Flags,
        **cut: Any,
    ) -> list[dispatch.Share]:
        """`cut`: of `dispatch.submit`."""
        slot_class = self._core.slot_class(namespace)
        return dispatch.submit(
            self._core, operation, namespace, slot_class, pairs, entries, sendable, spans, flags, **cut
        )

    def _start_keys(
        self, op: Op, namespace: Namespace, keys: Keys, argument: int, timeout_s: float | None
    ) -> tuple[Operation, list[dispatch.Share]]:
        argument = _u32(argument, "a time in ms for LEASE, in seconds for PIN,") if argument else 0
        slot_class = self._core.slot_class(namespace)
        key = single.only_key(keys)
        if key is not None:
            operation = self._core.operation(op, 1, timeout_s)
            link, grants, handle = dispatch.where(namespace, slot_class, key)
            if grants is not None:
                entry = single.key_entry(key, handle, argument)
                dispatch.submit_one(self._core, operation, link, entry, grants, Flags.NONE)
            return operation, [dispatch.Share(link, None, grants)]
        planned = plan.plan_keys(slot_class, namespace.digest, keys, argument)
        if planned is not None:
            operation = self._core.operation(op, planned.blocks, timeout_s)
            dispatch.submit_plan(self._core, operation, slot_class, planned)
            return operation, dispatch.plan_shares(slot_class, planned) if op is Op.LEASE else []
        pairs = batch.key_pairs(keys)
        operation = self._core.operation(op, len(pairs), timeout_s)
        entries = batch.key_entries(pairs, argument)
        return operation, self._submit(operation, namespace, pairs, entries, None, None, Flags.NONE)


def _refuse(operation: Operation, statuses: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp] | None:
    """Answer what is refused; the positions of the rest, None for all."""
    failed = statuses != batch.NOT_FAILED
    if not failed.any():
        return None
    operation.answers["status"][failed] = statuses[failed]
    return np.flatnonzero(~failed)


def _u32(value: int, what: str) -> int:
    """Raises UserError for what the wire cannot carry."""
    if not isinstance(value, (int, np.integer)) or not 0 <= value <= 0xFFFFFFFF:
        raise UserError(f"{what} is a whole number from 0 to 2**32 - 1, not {value!r}")
    return int(value)


def _offsets(offset: npt.ArrayLike, count: int) -> npt.ArrayLike:
    """Raises UserError for what is neither one whole number nor one for each block."""
    if isinstance(offset, int):
        return offset
    offsets = np.asarray(offset)
    if offsets.dtype.kind not in "iu" and offsets.size:
        raise UserError(f"offsets are whole numbers of 64 bits, not {offsets.dtype}")
    if offsets.shape not in ((), (count,)):
        raise UserError(f"offsets of shape {offsets.shape} for {count} blocks: give one, or one for each")
    return offsets


def _wire_offset(offset: npt.ArrayLike) -> npt.ArrayLike:
    """Offsets that the wire can carry; those that it cannot were refused before."""
    if isinstance(offset, int):
        return offset & 0xFFFFFFFF
    return np.asarray(offset).astype(np.uint32)


def _sealed(operation: Operation, spans: Spans, verify: bool) -> tuple[dispatch.Seal | None, int]:
    """What writes checksums into a STORE's capsules, and how many blocks one of them takes."""
    if not verify:
        return None, wire.MAX_BATCH
    return checksums.Checksums(operation, spans).seal, checksums.capsule_blocks(spans)


def _compared(operation: Operation, spans: Spans, verify: bool) -> checksums.Checksums | None:
    if not verify:
        return None
    compared = checksums.Checksums(operation, spans)
    compared.compare_as_they_come()
    return compared


def _results(operation: Operation, compared: checksums.Checksums | None = None) -> Call[BlockResults]:
    if compared is None:
        return Call(operation, lambda: BlockResults(operation.answers))

    def finish() -> BlockResults:
        while compared.step():  # what came last, and all of it where another thread took the answers
            continue
        return BlockResults(operation.answers)

    return Call(operation, finish, heavy=True)


def _checked(keys: Keys, spans: Spans) -> batch.Pairs:
    pairs = batch.key_pairs(keys)
    if len(spans) != len(pairs):
        raise UserError(f"{len(pairs)} keys, but memory for {len(spans)} blocks")
    return pairs
