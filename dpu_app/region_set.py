"""The regions of this DPU and their workers: configured ones, and those made, deleted and formatted by RPC.

Owns which regions there are; remembers the dynamic ones in the state directory. Speaks for all workers at once
(`sessions.SessionPeers`). Called by the supervisor and by `dpu_app.rpc`. Never touches what Entresol did not format.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common.errors import (
    AlreadyExistsError,
    DeadlineError,
    EntresolError,
    LowerLayerError,
    NotFoundError,
    PreconditionError,
    UserError,
)
from common.wire import StatId
from doca_shims.api import Clock
from dpu_app.config import DpuConfig, RegionSettings, worker_config
from dpu_app.region_worker import CALL_TIMEOUT_S, RegionState, RegionWorker, WorkerHooks
from dpu_app.regions import superblock
from dpu_app.sessions import NamespaceGrant, Session
from dpu_app.state_dir import DynamicRegion, StateDir

OPEN_TIMEOUT_S = 60.0
"""How long Create and Format wait for the region to serve. Create then undoes itself; Format goes on."""
REGIONS_MAX = 256
_LOG = logging.getLogger(__name__)

T = TypeVar("T")
WorkerFactory = Callable[[RegionSettings, WorkerHooks], RegionWorker]


@dataclass
class Region:
    """One region; `dynamic` where it was made by RPC."""

    worker: RegionWorker
    dynamic: DynamicRegion | None = None

    @property
    def settings(self) -> RegionSettings:
        return self.worker.config.region

    @property
    def weight(self) -> float:
        """In placement: as configured, else its capacity; 0 until that is known."""
        if self.settings.weight is not None:
            return self.settings.weight
        facts = self.worker.facts
        return float(facts.slots * facts.slot_bytes) if facts is not None else 0.0


class Surroundings(Protocol):
    """Whom the regions ask and tell: the supervisor."""

    def open_sessions(self) -> Sequence[Session]: ...
    def connection_lost(self, session_id: int, reason: str) -> None:
        """A worker saw the agent's connection break."""
        ...

    def region_changed(self, region: Region) -> None:
        """Its state, its facts, or why it is in that state."""
        ...


class RegionSet:
    def __init__(
        self, config: DpuConfig, state: StateDir, clock: Clock, make_worker: WorkerFactory | None = None
    ) -> None:
        """`make_worker` is another than the product's in tests only. Raises UserError for regions that clash."""
        self.epoch = 1
        """Rises whenever a region or its address changes."""
        self._surroundings: Surroundings | None = None
        self._config = config
        self._state = state
        self._clock = clock
        self._make_worker = make_worker or self._default_worker
        self._regions: dict[str, Region] = {}
        self._changing = asyncio.Lock()
        """Create, Delete and Format happen one at a time, and to their end, whatever becomes of the caller."""
        for settings in config.regions:
            self._add(settings, None)
        for dynamic in state.dynamic_regions():
            self._refuse_clash(dynamic.settings)
            self._add(dynamic.settings, dynamic)

    # ------------------------------------------------------------------------------------------------- regions

    def start(self, surroundings: Surroundings) -> None:
        """Start every worker. Before it, none of the rest is called."""
        self._surroundings = surroundings
        for region in self.regions:
            region.worker.start()

    async def stop(self) -> bool:
        """Whether every worker ended cleanly."""
        results = await asyncio.gather(*(region.worker.stop() for region in self.regions))
        return all(results)

    @property
    def regions(self) -> Sequence[Region]:
        return tuple(self._regions.values())

    def get(self, name: str) -> Region:
        """Raises NotFoundError."""
        region = self._regions.get(name)
        if region is None:
            listed = ", ".join(self._regions) or "none"
            raise NotFoundError(f"there is no region {name!r} here; there is: {listed}")
        return region

    async def settled(self, timeout_s: float) -> None:
        """Wait until every region serves, has failed or waits for its next try. Raises DeadlineError."""
        await asyncio.gather(*(region.worker.settled(timeout_s) for region in self.regions))

    async def create(self, settings: RegionSettings) -> Region:
        """Make and serve a region, and remember it. Raises AlreadyExistsError, PreconditionError (the flash holds
        something else), UserError, DeadlineError."""
        return await asyncio.shield(asyncio.ensure_future(self._create(settings)))

    async def _create(self, settings: RegionSettings) -> Region:
        async with self._changing:
            if len(self._regions) >= REGIONS_MAX:
                raise PreconditionError(f"this DPU has {REGIONS_MAX} regions, as many as it may")
            if not settings.path.is_absolute():
                raise UserError(f"the path of a region must be absolute, not {str(settings.path)!r}")
            self._refuse_clash(settings)
            await asyncio.to_thread(_require_ours_or_blank, settings.path)
            makes_file = not settings.path.exists()
            if makes_file and settings.capacity_bytes is None:
                raise UserError(f"{settings.path} does not exist: give a capacity to make it")
            region = self._add(settings, DynamicRegion(settings, makes_file))
            region.worker.start()
            try:
                state = await region.worker.settled(OPEN_TIMEOUT_S)
                if state is not RegionState.SERVING:
                    raise PreconditionError(f"region {settings.name} could not be opened: {region.worker.message}")
                self._state.remember_region(DynamicRegion(settings, makes_file))
            except BaseException:
                await region.worker.stop()
                del self._regions[settings.name]
                if makes_file:
                    settings.path.unlink(missing_ok=True)
                self.epoch += 1
                raise
            return region

    async def delete(self, name: str, uuid: bytes, *, erase: bool, force: bool) -> None:
        """Stop serving a dynamic region and forget it; `erase` removes the file if Entresol made it.

        Raises NotFoundError, PreconditionError (configured; another uuid; in use and not `force`).
        """
        await asyncio.shield(asyncio.ensure_future(self._delete(name, uuid, erase, force)))

    async def _delete(self, name: str, uuid: bytes, erase: bool, force: bool) -> None:
        async with self._changing:
            region = self.get(name)
            dynamic = region.dynamic
            if dynamic is None:
                raise PreconditionError(f"region {name} is in the configuration file: remove it there, and restart")
            await self._require_deliberate(region, uuid, force)
            if erase and not dynamic.made_file:
                raise PreconditionError(f"{dynamic.settings.path} was there before the region: it is not erased")
            await region.worker.stop()
            self._state.forget_region(name)
            del self._regions[name]
            self.epoch += 1
            if erase:
                await asyncio.to_thread(_require_ours_or_blank, dynamic.settings.path)
                dynamic.settings.path.unlink(missing_ok=True)
            _LOG.info("region deleted", extra={"region": name, "erased": erase})

    async def format(self, name: str, uuid: bytes, *, force: bool) -> Region:
        """Make a region empty. Raises as `delete` does, and DeadlineError while it is still at work."""
        return await asyncio.shield(asyncio.ensure_future(self._format(name, uuid, force)))

    async def _format(self, name: str, uuid: bytes, force: bool) -> Region:
        async with self._changing:
            region = self.get(name)
            await self._require_deliberate(region, uuid, force)
            await asyncio.to_thread(_require_ours_or_blank, region.settings.path)
            await region.worker.stop()
            region.worker.start(force_format=True)
            state = await region.worker.settled(OPEN_TIMEOUT_S)
            if state is not RegionState.SERVING:
                raise PreconditionError(f"region {name} could not be opened: {region.worker.message}")
            _LOG.info("region formatted", extra={"region": name})
            return region

    async def drain(self, names: Sequence[str], timeout_s: float) -> list[Region]:
        """Drain the named regions, or all that serve. Raises NotFoundError, DeadlineError, UnavailableError."""
        serving = (RegionState.SERVING, RegionState.DRAINING)
        chosen = [self.get(name) for name in names]
        if not names:
            chosen = [region for region in self.regions if region.worker.state in serving]
        await _all(region.worker.drain(timeout_s) for region in chosen)
        return chosen

    def _default_worker(self, settings: RegionSettings, hooks: WorkerHooks) -> RegionWorker:
        return RegionWorker(worker_config(self._config, settings), self._clock, hooks)

    def _add(self, settings: RegionSettings, dynamic: DynamicRegion | None) -> Region:
        hooks = WorkerHooks(
            sessions=lambda: self._surroundings.open_sessions() if self._surroundings else (),
            changed=lambda worker: self._changed(worker.name),
            connection_lost=self._connection_lost,
        )
        region = self._regions[settings.name] = Region(self._make_worker(settings, hooks), dynamic)
        return region

    def _changed(self, name: str) -> None:
        self.epoch += 1
        region = self._regions.get(name)
        if region is not None and self._surroundings is not None:
            self._surroundings.region_changed(region)

    def _connection_lost(self, session_id: int, reason: str) -> None:
        if self._surroundings is not None:
            self._surroundings.connection_lost(session_id, reason)

    def _refuse_clash(self, settings: RegionSettings) -> None:
        for region in self.regions:
            if region.settings.name == settings.name:
                raise AlreadyExistsError(f"there is a region {settings.name!r} already")
            if _same_flash(region.settings.path, settings.path):
                raise AlreadyExistsError(f"region {region.settings.name} is on {settings.path} already")

    async def _require_deliberate(self, region: Region, uuid: bytes, force: bool) -> None:
        """The caller knows what it destroys, and nobody is reading it just now."""
        facts, name = region.worker.facts, region.settings.name
        if facts is None and uuid:
            raise PreconditionError(f"region {name} was never open, so its uuid is not known; name none")
        if facts is not None and uuid != facts.uuid:
            given = uuid.hex() or "none"
            raise PreconditionError(f"the uuid of region {name} is {facts.uuid.hex()}, and {given} was named")
        if force or region.worker.state not in (RegionState.SERVING, RegionState.DRAINING):
            return
        stats = await region.worker.status()
        leases, pins = stats.get(StatId.LEASES.name, 0), stats.get(StatId.PINS.name, 0)
        if leases or pins:
            raise PreconditionError(f"region {name} has {leases} blocks leased and {pins} pinned; force it, or wait")

    # ------------------------------------------------------------------------------------ sessions.SessionPeers

    async def open_session(self, session: Session) -> None:
        """Does not fail for one region that does not answer: the others serve."""
        await _all(_told(region, region.worker.open_session(session)) for region in self.regions)

    async def add_namespace(self, session: Session, grant: NamespaceGrant) -> None:
        """As `open_session`."""
        await _all(_told(region, region.worker.add_namespace(session, grant)) for region in self.regions)

    async def close_session(self, session_id: int) -> None:
        await _all(region.worker.close_session(session_id) for region in self.regions)

    async def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by region; empty for one that does not answer now."""
        return await self._of_each(lambda worker: worker.status(CALL_TIMEOUT_S / 2))

    async def pauses(self) -> dict[str, dict[str, Any]]:
        """`RegionWorker.pauses` by region; empty for one that does not answer now."""
        return await self._of_each(lambda worker: worker.pauses(CALL_TIMEOUT_S / 2))

    async def _of_each(self, ask: Callable[[RegionWorker], Awaitable[dict[str, T]]]) -> dict[str, dict[str, T]]:
        names = [region.settings.name for region in self.regions]
        answers = await asyncio.gather(*(ask(region.worker) for region in self.regions), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EntresolError):
                raise answer
        return {name: answer if isinstance(answer, dict) else {} for name, answer in zip(names, answers)}


async def _told(region: Region, wait: Awaitable[None]) -> None:
    """A worker that is late has the message all the same, in its channel before any other."""
    try:
        await wait
    except DeadlineError as error:
        _LOG.warning("a region worker is late", extra={"region": region.settings.name, "why": str(error)})


async def _all(waits: Iterable[Awaitable[None]]) -> None:
    """Wait for all, also where one fails; then raise the first failure."""
    for outcome in await asyncio.gather(*waits, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _same_flash(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return os.path.realpath(first) == os.path.realpath(second)


def _require_ours_or_blank(path: Path) -> None:
    """Raises PreconditionError where `path` holds something that is neither blank nor formatted by Entresol,
    whole or damaged; LowerLayerError where it cannot be read."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise PreconditionError(f"{path} is neither a file nor a block device")
        with path.open("rb") as flash:
            preamble = flash.read(superblock.TABLE_OFFSET)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LowerLayerError("read", error.errno or 0, str(path)) from error
    marked = any(preamble[offset:].startswith(superblock.MAGIC) for offset in superblock.SUPERBLOCK_OFFSETS)
    if not marked and not superblock.is_blank(preamble):
        raise PreconditionError(f"{path} holds data that Entresol did not write: choose another, or wipe it yourself")
