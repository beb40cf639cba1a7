"""The DPU application's composition root: control plane, sessions and one worker process per region, from start to end.

Makes everything from a `DpuConfig` and closes it in order; decides when the application is healthy and when it goes.
No block passes through this process. Run by `dpu_app.cli`; the file `run.json` tells where it is reached.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import signal
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from common.clock import SystemClock
from common.errors import EntresolError
from common.proto.entresol.v1 import control_pb2
from doca_shims.api import Clock
from dpu_app.config import DpuConfig
from dpu_app.region_set import Region, RegionSet, WorkerFactory
from dpu_app.region_worker import RegionState
from dpu_app.rpc.dpu import DpuService
from dpu_app.rpc.regions import RegionsService
from dpu_app.rpc.server import REGION_PREFIX, SERVICES, ControlServer
from dpu_app.rpc.sessions import SessionsService
from dpu_app.sessions import Session, SessionTable
from dpu_app.state_dir import RunFile, StateDir

EXIT_CLEAN = 0
EXIT_UNCLEAN = 1
"""Everything was closed, but a worker had to be killed or not all blocks reached flash."""
SERVER_GRACE_S = 1.0
_LOG = logging.getLogger(__name__)


def version() -> str:
    return importlib.metadata.version("entresol")


class Supervisor:
    """One DPU application. `run` is called once; `stop` from a signal handler or another task."""

    def __init__(self, config: DpuConfig, clock: Clock | None = None, make_worker: WorkerFactory | None = None) -> None:
        """`make_worker` makes other workers than the product's, in tests."""
        self._config = config
        self._clock = clock or SystemClock()
        self._make_worker = make_worker
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sessions: SessionTable | None = None
        self._regions: RegionSet | None = None
        self._server: ControlServer | None = None
        self.address = ""
        """Where gRPC is reached, once it is."""
        self.started = asyncio.Event()

    def stop(self) -> None:
        """Go down: drain, then close. Called again: do not wait for the drain."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT stop; for the process's main thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    async def run(self) -> int:
        """Serve until stopped. The exit code. Raises UserError, LowerLayerError where it cannot start."""
        with StateDir(self._config.state_dir) as state:
            identity = control_pb2.Identity(
                id=state.dpu_id(), name=self._config.name, version=version(), incarnation=uuid.uuid4().hex
            )
            regions = self._regions = RegionSet(self._config, state, self._clock, self._make_worker)
            sessions = self._sessions = self._make_sessions(regions)
            server = self._server = ControlServer(
                SessionsService(self._config, identity, sessions, regions),
                RegionsService(self._config, regions),
                DpuService(self._config, identity, sessions, regions, self._clock),
            )
            try:
                self.address = await server.start(self._config.listen_address())
                await server.set_health(SERVICES, serving=True)
                regions.start(self)
                self._tell_whole_health()
                state.write_run_file(
                    RunFile(
                        pid=os.getpid(),
                        address=self.address,
                        dpu_id=identity.id,
                        name=identity.name,
                        incarnation=identity.incarnation,
                        version=identity.version,
                    )
                )
                _LOG.info("serving the control plane", extra={"address": self.address, "dpu": self._config.name})
                self.started.set()
                self._spawn(self._expire_sessions(sessions))
                await self._stopping.wait()
            finally:
                clean = await self._close(sessions, regions, server)
                state.remove_run_file()
            return EXIT_CLEAN if clean else EXIT_UNCLEAN

    def _make_sessions(self, regions: RegionSet) -> SessionTable:
        config = self._config
        listed = None if config.other_tenants else frozenset(tenant.name for tenant in config.tenants)
        return SessionTable(self._clock, regions, config.session_ttl_s, config.sessions_max, listed)

    async def _close(self, sessions: SessionTable, regions: RegionSet, server: ControlServer) -> bool:
        """Drain, end sessions, stop workers and server. Whether all went well."""
        _LOG.info("going down")
        sessions.accepting = False
        await server.set_health((*SERVICES, ""), serving=False)
        clean = await self._drain(regions)
        await sessions.close_all("the DPU goes down")
        clean = await regions.stop() and clean
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.stop(SERVER_GRACE_S)
        if clean:
            _LOG.info("closed cleanly")
        else:
            _LOG.error("closed, but not everything reached flash; what was acknowledged as on flash is there")
        return clean

    async def _drain(self, regions: RegionSet) -> bool:
        drain = asyncio.ensure_future(regions.drain((), self._config.drain_timeout_s))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not drain.done():
            _LOG.warning("told twice to go down: not waiting for the drain")
            drain.cancel()
        try:
            await drain
        except asyncio.CancelledError:
            return False
        except EntresolError as error:
            _LOG.error("the drain is not complete", extra={"why": str(error)})
            return False
        return True

    async def _expire_sessions(self, sessions: SessionTable) -> None:
        while True:
            await asyncio.sleep(sessions.ttl_ms / 1000 / 10)
            self._spawn(sessions.expire())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a task of the supervisor failed", exc_info=error)

    # --------------------------------------------------------------------------------- region_set.Surroundings

    def open_sessions(self) -> Sequence[Session]:
        return self._sessions.sessions if self._sessions is not None else ()

    def connection_lost(self, session_id: int, reason: str) -> None:
        if self._sessions is not None:
            self._sessions.connection_lost(session_id, reason)

    def region_changed(self, region: Region) -> None:
        healthy = region.worker.state is RegionState.SERVING
        self._tell_health(REGION_PREFIX + region.settings.name, healthy)
        self._tell_whole_health()

    def _tell_whole_health(self) -> None:
        """The whole is healthy while any region serves, or there is none."""
        regions = self._regions.regions if self._regions is not None else ()
        serving = [region.worker.state is RegionState.SERVING for region in regions]
        self._tell_health("", not regions or any(serving))

    def _tell_health(self, service: str, healthy: bool) -> None:
        if self._server is not None:
            self._spawn(self._server.set_health((service,), healthy and not self._stopping.is_set()))
