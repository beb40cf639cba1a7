"""The agent's library: `Client`, the blocking face. Every operation is a batch and answers one status a block.

    with Client(["dpu0:7010", "dpu1:7010"], tenant="acme") as client:
        namespace = client.namespace(record)
        pool = client.allocate(256 << 20)
        found = client.lookup(namespace, keys).prefix_blocks
        results = client.retrieve(namespace, keys[:found], pool.blocks(range(found), block_bytes))

Thread-safe. The data path never raises for what happens to a block, a region or a DPU: see `common.status`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from common import wire
from common.clock import SystemClock
from common.errors import UnavailableError, UserError
from common.identity import NamespaceRecord
from common.status import BlockState, Status
from common.wire import Flags, Op, StatId
from host_agent import dispatch
from host_agent.batch import Keys
from host_agent.calls import Call, Calls
from host_agent.config import AgentSettings
from host_agent.core import AgentCore
from host_agent.lease import Lease
from host_agent.memory import RegisteredMemory, Spans
from host_agent.namespace import Namespace
from host_agent.operation import Operation
from host_agent.results import BlockResults, ListedBlock, LookupResult
from host_agent.session import RegionFacts

T = TypeVar("T")
Places = Spans | Sequence[Any]
"""Where the blocks of a batch are in registered memory: `RegisteredMemory.blocks` or `.spans` (fastest), or one
buffer, or list of buffers (a scatter list), for each block."""


class Client:
    """Sessions with all DPUs named, kept alive and renewed until `close`. Further settings are the fields of
    `host_agent.config.AgentSettings`.

    Raises UnavailableError when no DPU answers within `connect_timeout_s`; UserError where one refuses the tenant.
    DPUs that do not answer are tried again in the background; their blocks are DISCONNECTED meanwhile.
    """

    def __init__(self, dpus: Sequence[str] | AgentSettings, tenant: str | None = None, **settings: Any) -> None:
        if isinstance(dpus, AgentSettings):
            if tenant is not None or settings:
                raise UserError("give either settings or their fields")
            self.settings = dpus
        else:
            self.settings = AgentSettings(dpus=tuple(dpus), tenant=tenant or "", **settings)
        self.core = AgentCore(self.settings, SystemClock())
        self.calls = Calls(self.core)

    # ------------------------------------------------------------------------------------ set-up

    def namespace(self, record: NamespaceRecord, block_bytes: int | None = None) -> Namespace:
        """The namespace of `record` for this client's calls. `block_bytes`, the size of its largest block, picks the
        regions where several slot sizes exist; every agent must say the same.

        Raises UserError for another tenant's record.
        """
        return self.core.namespace(record, block_bytes)

    def allocate(self, length_bytes: int, page_bytes: int | None = None) -> RegisteredMemory:
        """Zeroed memory of the fabric, registered: the fast path. Close it after use. Raises LowerLayerError."""
        return self.core.allocate(length_bytes, page_bytes)

    def register(self, memory: Any) -> RegisteredMemory:
        """Register memory that exists: a numpy array, writable buffer, host tensor or DLPack object, best a whole
        pool at once. It is kept alive until closed. Raises UserError for read-only or scattered memory."""
        return self.core.register(memory)

    @property
    def regions(self) -> tuple[RegionFacts, ...]:
        """All regions known, those that are down included (`region.link.up`)."""
        return self.core.topology.regions

    # ------------------------------------------------------------------------------------ data

    def store(
        self,
        namespace: Namespace,
        keys: Keys,
        memory: Places,
        *,
        until_flash: bool = False,
        ttl_s: int = 0,
        verify: bool | None = None,
        timeout_s: float | None = None,
    ) -> BlockResults:
        """Store blocks from registered memory, which must not change until this returns.

        OK: stored, EXISTS: there already, nothing moved; both mean staged, or on flash with `until_flash`.
        `verify` sends each block's checksum along, for the DPU to compare.
        """
        return self._wait(self.calls.start_store(namespace, keys, memory, until_flash, ttl_s, verify, timeout_s))

    def retrieve(
        self,
        namespace: Namespace,
        keys: Keys,
        memory: Places,
        *,
        offset: npt.ArrayLike = 0,
        whole: bool = False,
        verify: bool | None = None,
        timeout_s: float | None = None,
    ) -> BlockResults:
        """Load blocks into registered memory. Each destination's size is what is wanted, from byte `offset` (one
        number, or one a block) of its block; with `whole`, blocks of unknown length up to the region's slot size,
        which each destination must hold. MISS: not there. `verify` compares checksums here; CORRUPT where they
        differ. A destination whose status is not OK may hold anything.
        """
        return self._wait(self.calls.start_retrieve(namespace, keys, memory, offset, whole, verify, timeout_s))

    def lookup(self, namespace: Namespace, keys: Keys, *, timeout_s: float | None = None) -> LookupResult:
        """Which blocks are present, and how long the prefix is whose blocks all are."""
        return self._wait(self.calls.start_lookup(namespace, keys, timeout_s))

    def prefetch(
        self,
        namespace: Namespace,
        keys: Keys,
        memory: Places | None = None,
        *,
        offset: npt.ArrayLike = 0,
        timeout_s: float | None = None,
    ) -> Prefetch:
        """Hint that blocks will be needed within `timeout_s`: stage them on the DPU, or deliver them to registered
        `memory`, at lower priority than `retrieve`. Returns at once."""
        call = self.calls.start_prefetch(namespace, keys, memory, offset, timeout_s)
        self.core.progress.watch(call.operation)
        return Prefetch(self.core, call)

    def lease(
        self, namespace: Namespace, keys: Keys, *, duration_s: float = 0.0, timeout_s: float | None = None
    ) -> Lease:
        """Lease the frames of blocks for `duration_s` (0: the region's default), to READ them one-sidedly. Use it as a
        context manager."""
        asked_ns = self.core.clock.monotonic_ns()
        operation, shares = self.calls.start_lease(namespace, keys, int(duration_s * 1000), timeout_s)
        self.core.progress.wait(operation)
        return Lease(self.core, operation, shares, asked_ns)

    def pin(self, namespace: Namespace, keys: Keys, *, ttl_s: int = 0, timeout_s: float | None = None) -> BlockResults:
        """Keep blocks from being evicted for `ttl_s` seconds (0: five minutes), or until unpinned."""
        return self._wait(self.calls.start_keys(Op.PIN, namespace, keys, ttl_s, timeout_s))

    def unpin(self, namespace: Namespace, keys: Keys, *, timeout_s: float | None = None) -> BlockResults:
        return self._wait(self.calls.start_keys(Op.UNPIN, namespace, keys, 0, timeout_s))

    def touch(self, namespace: Namespace, keys: Keys, *, timeout_s: float | None = None) -> BlockResults:
        """Count a use of each block, for eviction."""
        return self._wait(self.calls.start_keys(Op.TOUCH, namespace, keys, 0, timeout_s))

    def delete(self, namespace: Namespace, keys: Keys, *, timeout_s: float | None = None) -> BlockResults:
        return self._wait(self.calls.start_keys(Op.DELETE, namespace, keys, 0, timeout_s))

    # ------------------------------------------------------------------------------------ the pod

    def list(
        self, namespace: Namespace | None = None, *, page_blocks: int = 512, timeout_s: float | None = None
    ) -> Iterator[ListedBlock]:
        """Every block of a namespace, or of all that this client has opened, region by region. Blocks that come or go
        meanwhile may be missed. Raises UnavailableError for a region that does not answer, after the others."""
        failures: list[str] = []
        for region in self.regions:
            cursor = 0
            while True:
                operation = self._list_page(region, namespace, cursor, page_blocks, timeout_s)
                if operation.pages is None or not operation.pages:
                    failures.append(f"{region.link.name}: {Status(int(operation.answers['status'][0])).name}")
                    break
                cursor, entries = operation.pages[0]
                yield from self._listed(region, entries)
                if not cursor:
                    break
        if failures:
            raise UnavailableError(f"the list is not complete: {'; '.join(failures)}")

    def stat(self, *, timeout_s: float | None = None) -> dict[str, dict[StatId, int]]:
        """Counters and gauges by region (``DPU/region``). A region that does not answer is left out."""
        started = [
            (
                region,
                dispatch.submit_page(
                    self.core, Op.STAT, region.link, np.zeros(1, wire.EMPTY_ENTRY), Flags.NONE, timeout_s
                ),
            )
            for region in self.regions
        ]
        stats: dict[str, dict[StatId, int]] = {}
        for region, operation in started:
            self.core.progress.wait(operation)
            for _aux, entries in operation.pages or ():
                known = {int(member) for member in StatId}
                pairs = zip(entries["stat_id"].tolist(), entries["value"].tolist())
                stats[region.link.name] = {StatId(stat_id): value for stat_id, value in pairs if stat_id in known}
        return stats

    def close(self) -> None:
        """End the sessions and close all registered memory. Idempotent; no byte lands afterwards."""
        self.core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ inside

    def _wait(self, call: Call[T]) -> T:
        self.core.progress.wait(call.operation)
        return call.result()

    def _list_page(
        self, region: RegionFacts, namespace: Namespace | None, cursor: int, limit: int, timeout_s: float | None
    ) -> Operation:
        entries = np.zeros(1, wire.LIST_REQUEST)
        entries["cursor"] = cursor
        entries["limit"] = min(limit, wire.MAX_BATCH)
        grants = region.link.grants
        if namespace is not None and grants is not None:
            entries["namespace"] = grants.handles.get(namespace.digest, 0)
        flags = Flags.ALL_NAMESPACES if namespace is None else Flags.NONE
        operation = dispatch.submit_page(self.core, Op.LIST, region.link, entries, flags, timeout_s)
        self.core.progress.wait(operation)
        if operation.answers["status"][0] != Status.OK:
            operation.pages = None
        return operation

    def _listed(self, region: RegionFacts, entries: wire.Entries) -> Iterator[ListedBlock]:
        grants = region.link.grants
        digests = {handle: digest for digest, handle in grants.handles.items()} if grants is not None else {}
        for entry in entries:
            yield ListedBlock(
                key=wire.key_bytes(entry),
                namespace=digests.get(int(entry["namespace"]), b""),
                length=int(entry["length"]),
                state=BlockState(int(entry["state"])),
                pinned=bool(entry["pinned"]),
                age_s=int(entry["age_s"]),
                ttl_s=int(entry["ttl_s"]),
                region=region.link.name,
            )


class Prefetch:
    """A hint under way. Blocks staged or delivered in time are OK, else LATE, DROPPED, MISS or CANCELLED."""

    def __init__(self, core: AgentCore, call: Call[BlockResults]) -> None:
        self._core = core
        self._call = call

    @property
    def done(self) -> bool:
        return self._call.operation.done

    def result(self) -> BlockResults:
        """Wait for the answer; at the latest it comes when the hint's time is over."""
        self._core.progress.wait(self._call.operation)
        return self._call.result()

    def cancel(self) -> BlockResults:
        """Give up what has not been done, and wait for what became of it. Memory is free afterwards."""
        asking = dispatch.cancel(self._core, self._call.operation)
        if asking is not None:
            self._core.progress.wait(asking)
        return self.result()
