"""A whole DPU application in this process, on a Unix socket, with fake region workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common import config as configuration
from common import rpc_errors
from common.clock import SystemClock
from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from dpu_app.config import DpuConfig, RegionSettings, worker_config
from dpu_app.region_set import Region
from dpu_app.region_worker import BackOff, RegionState, RegionWorker, WorkerHooks
from dpu_app.regions import hot_path
from dpu_app.supervisor import Supervisor

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
WAIT_S = 20.0


class Dpu:
    """The application, and calls to it."""

    def __init__(self, config: DpuConfig) -> None:
        self.config = config
        self.supervisor = Supervisor(config, make_worker=self._make_worker)
        self.running = asyncio.ensure_future(self.supervisor.run())

    def _make_worker(self, settings: RegionSettings, hooks: WorkerHooks) -> RegionWorker:
        command = (sys.executable, "-W", "error", str(FAKE_WORKER))
        return RegionWorker(worker_config(self.config, settings), SystemClock(), hooks, BackOff(0.01, 0.05), command)

    async def start(self) -> None:
        started = asyncio.ensure_future(self.supervisor.started.wait())
        await asyncio.wait({started, self.running}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if self.running.done():
            started.cancel()
            self.running.result()
        self.channel = grpc.aio.insecure_channel(self.supervisor.address)
        self.sessions: control_pb2_grpc.SessionsAsyncStub = control_pb2_grpc.SessionsStub(self.channel)  # type: ignore[assignment]
        self.regions: control_pb2_grpc.RegionsAsyncStub = control_pb2_grpc.RegionsStub(self.channel)  # type: ignore[assignment]
        self.dpu: control_pb2_grpc.DpuAsyncStub = control_pb2_grpc.DpuStub(self.channel)  # type: ignore[assignment]

    async def call(self, method: Callable[..., Any], request: Any) -> Any:
        """The response; raises the error that an agent would."""
        try:
            return await method(request, timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            raise rpc_errors.from_rpc_error(error) from None

    async def open(self, **fields: Any) -> control_pb2.OpenSessionResponse:
        """A session of tenant acme, or as `fields` say."""
        request = control_pb2.OpenSessionRequest(
            **{"agent_name": "node-1", "tenant": "acme", "wire_version_min": 1, "wire_version_max": 1, **fields}
        )
        response: control_pb2.OpenSessionResponse = await self.call(self.sessions.OpenSession, request)
        return response

    def region(self, name: str) -> Region:
        if self.supervisor._regions is None:
            raise RuntimeError("not started")
        return self.supervisor._regions.get(name)

    async def until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        await asyncio.wait_for(wait(), WAIT_S)

    async def until_state(self, name: str, *states: RegionState) -> None:
        await self.until(lambda: self.region(name).worker.state in states)

    def told(self, name: str, method: str | None = None) -> list[dict[str, Any]]:
        """What the region's worker was told, from the first."""
        log = self.region(name).settings.path.with_suffix(".log")
        messages = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [message for message in messages if method is None or message["method"] == method]

    async def stop(self) -> int:
        with contextlib.suppress(AttributeError):
            await self.channel.close(None)
        self.supervisor.stop()
        return await asyncio.wait_for(self.running, 60)


@pytest.fixture(params=["native", "python"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made in a test have the native hot path, or are without it."""
    if request.param == "python":
        monkeypatch.setattr(hot_path, "LIBRARY", None)
    elif hot_path.LIBRARY is None:
        pytest.skip("the native hot path was not built")


StartDpu = Callable[..., Any]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Short enough for the path of a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="ent") as name:
        yield Path(name)


@pytest_asyncio.fixture
async def start_dpu(short_dir: Path) -> AsyncIterator[StartDpu]:
    """``await start_dpu(regions, **settings)``; `regions` maps names to flash options of the fake worker."""
    running: list[Dpu] = []

    async def start(regions: dict[str, dict[str, str]] | None = None, **settings: Any) -> Dpu:
        values: dict[str, Any] = {
            "name": "dpu-t",
            "state_dir": str(short_dir / "state"),
            "fabric": {"name": "fake", "listen": "fake:{region}", "client_options": {"key": "value"}},
            "regions": [
                {
                    "name": name,
                    "path": str(short_dir / f"{name}.flash"),
                    "slot": "4KiB",
                    "window": "64KiB",
                    "flash": {"options": options},
                }
                for name, options in (regions if regions is not None else {"r0": {}, "r1": {}}).items()
            ],
            **settings,
        }
        dpu = Dpu(configuration.from_plain(DpuConfig, values))
        running.append(dpu)
        await dpu.start()
        return dpu

    yield start
    for dpu in running:
        if not dpu.running.done():
            await dpu.stop()
        else:
            with contextlib.suppress(AttributeError):
                await dpu.channel.close(None)
