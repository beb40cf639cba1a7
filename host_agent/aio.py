"""`AsyncClient`: the asyncio face. The same core and the same semantics as `host_agent.client`, whose docs hold.

Nothing here blocks the event loop: answers are handled by the core's background thread, opening and closing by a
worker thread. A call that is cancelled asks the DPUs to give up and ends once they have answered, so that memory
handed to a cancelled call is free when `CancelledError` comes out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from common.identity import NamespaceRecord
from common.wire import Op, StatId
from host_agent import dispatch
from host_agent.batch import Keys
from host_agent.calls import Call
from host_agent.client import Client, Places
from host_agent.config import AgentSettings
from host_agent.lease import Lease
from host_agent.memory import RegisteredMemory
from host_agent.namespace import Namespace
from host_agent.operation import Operation
from host_agent.results import BlockResults, ListedBlock, LookupResult
from host_agent.session import RegionFacts

T = TypeVar("T")


class AsyncClient:
    """Made by ``await AsyncClient.open(...)``, used as an async context manager. Shares nothing between loops: use it
    from the loop that opened it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._core = client.core
        self._calls = client.calls

    @classmethod
    async def open(cls, dpus: Sequence[str] | AgentSettings, tenant: str | None = None, **settings: Any) -> AsyncClient:
        """Arguments and errors as of `Client`."""
        return cls(await asyncio.to_thread(Client, dpus, tenant, **settings))

    async def namespace(self, record: NamespaceRecord, block_bytes: int | None = None) -> Namespace:
        return await asyncio.to_thread(self._client.namespace, record, block_bytes)

    def allocate(self, length_bytes: int, page_bytes: int | None = None) -> RegisteredMemory:
        return self._client.allocate(length_bytes, page_bytes)

    def register(self, memory: Any) -> RegisteredMemory:
        return self._client.register(memory)

    @property
    def regions(self) -> tuple[RegionFacts, ...]:
        return self._client.regions

    async def store(
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
        return await self._run(self._calls.start_store(namespace, keys, memory, until_flash, ttl_s, verify, timeout_s))

    async def retrieve(
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
        return await self._run(self._calls.start_retrieve(namespace, keys, memory, offset, whole, verify, timeout_s))

    async def lookup(self, namespace: Namespace, keys: Keys, *, timeout_s: float | None = None) -> LookupResult:
        return await self._run(self._calls.start_lookup(namespace, keys, timeout_s))

    async def prefetch(
        self,
        namespace: Namespace,
        keys: Keys,
        memory: Places | None = None,
        *,
        offset: npt.ArrayLike = 0,
        timeout_s: float | None = None,
    ) -> BlockResults:
        """Ends when the hint has been answered: make a task of it to go on meanwhile, and cancel the task to cancel
        the hint."""
        return await self._run(self._calls.start_prefetch(namespace, keys, memory, offset, timeout_s))

    @contextlib.asynccontextmanager
    async def lease(
        self, namespace: Namespace, keys: Keys, *, duration_s: float = 0.0, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncLease]:
        """``async with client.lease(...) as lease:``; released at the end."""
        asked_ns = self._core.clock.monotonic_ns()
        operation, shares = self._calls.start_lease(namespace, keys, int(duration_s * 1000), timeout_s)
        await self._run(Call(operation, lambda: None))
        lease = Lease(self._core, operation, shares, asked_ns)
        try:
            yield AsyncLease(lease)
        finally:
            await asyncio.to_thread(lease.release)

    async def pin(
        self, namespace: Namespace, keys: Keys, *, ttl_s: int = 0, timeout_s: float | None = None
    ) -> BlockResults:
        return await self._run(self._calls.start_keys(Op.PIN, namespace, keys, ttl_s, timeout_s))

    async def unpin(self, namespace: Namespace, keys: Keys, *, timeout_s: float | None = None) -> BlockResults:
        return await self._run(self._calls.start_keys(Op.UNPIN, namespace, keys, 0, timeout_s))

    async def touch(self, namespace: Namespace, keys: Keys, *, timeout_s: float | None = None) -> BlockResults:
        return await self._run(self._calls.start_keys(Op.TOUCH, namespace, keys, 0, timeout_s))

    async def delete(self, namespace: Namespace, keys: Keys, *, timeout_s: float | None = None) -> BlockResults:
        return await self._run(self._calls.start_keys(Op.DELETE, namespace, keys, 0, timeout_s))

    async def list(
        self, namespace: Namespace | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[ListedBlock]:
        blocks = self._client.list(namespace, timeout_s=timeout_s)
        while True:
            page = await asyncio.to_thread(_take, blocks, 512)
            for block in page:
                yield block
            if not page:
                return

    async def stat(self, *, timeout_s: float | None = None) -> dict[str, dict[StatId, int]]:
        return await asyncio.to_thread(lambda: self._client.stat(timeout_s=timeout_s))

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------ inside

    async def _run(self, call: Call[T]) -> T:
        try:
            await self._done(call.operation)
        except asyncio.CancelledError:
            await self._give_up(call.operation)
            raise
        return await asyncio.to_thread(call.result) if call.heavy else call.result()

    async def _done(self, operation: Operation) -> None:
        if operation.done:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        operation.when_done(_setter(loop, future))
        self._core.progress.watch(operation)
        await future

    async def _give_up(self, operation: Operation) -> None:
        """Whatever else cancels meanwhile: both operations end at their deadlines at the latest."""
        asking = dispatch.cancel(self._core, operation)
        for awaited in (asking, operation):
            while awaited is not None and not awaited.done:
                with contextlib.suppress(asyncio.CancelledError):
                    await self._done(awaited)


class AsyncLease:
    """`Lease`, read without blocking the loop."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        return self._lease.status

    @property
    def length(self) -> npt.NDArray[np.uint32]:
        return self._lease.length

    async def read(
        self,
        memory: Places,
        *,
        indices: Sequence[int] | None = None,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> BlockResults:
        """As `Lease.read`."""
        return await asyncio.to_thread(self._lease.read, memory, indices=indices, verify=verify, timeout_s=timeout_s)


def _setter(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> Callable[[], None]:
    def finish() -> None:
        if not future.done():
            future.set_result(None)

    def from_any_thread() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(finish)

    return from_any_thread


def _take(blocks: Any, count: int) -> list[ListedBlock]:
    page: list[ListedBlock] = []
    for block in blocks:
        page.append(block)
        if len(page) == count:
            break
    return page
