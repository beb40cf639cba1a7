"""The `Dpu` service: status of the whole application, and drain."""

from __future__ import annotations

import os
from typing import Any

from common.errors import UserError
from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from doca_shims.api import Clock
from dpu_app.config import DpuConfig
from dpu_app.region_set import RegionSet
from dpu_app.region_worker import RegionState
from dpu_app.rpc.answering import answering
from dpu_app.rpc.regions import region_message
from dpu_app.sessions import SessionTable

DRAIN_TIMEOUT_MAX_S = 3600.0


class DpuService(control_pb2_grpc.DpuServicer):
    def __init__(
        self,
        config: DpuConfig,
        identity: control_pb2.Identity,
        sessions: SessionTable,
        regions: RegionSet,
        clock: Clock,
    ) -> None:
        self._config = config
        self._identity = identity
        self._sessions = sessions
        self._regions = regions
        self._clock = clock
        self._started_ns = clock.monotonic_ns()

    @answering
    async def GetStatus(self, _: control_pb2.GetStatusRequest) -> control_pb2.GetStatusResponse:
        statistics = await self._regions.statistics()
        now_ns = self._clock.monotonic_ns()
        regions = self._regions.regions
        response = control_pb2.GetStatusResponse(
            dpu=self._identity,
            uptime_ms=(now_ns - self._started_ns) // 10**6,
            draining=any(region.worker.state is RegionState.DRAINING for region in regions),
            pid=os.getpid(),
        )
        for region in regions:
            response.regions.add(
                region=region_message(region, self._config),
                stats=statistics.get(region.settings.name, {}),
                worker_pid=region.worker.pid,
                worker_restarts=region.worker.restarts,
            )
        for session in self._sessions.sessions:
            response.sessions.add(
                session_id=session.session_id,
                agent_name=session.agent_name,
                tenant=session.tenant,
                namespaces=len(session.namespaces),
                age_ms=(now_ns - session.opened_ns) // 10**6,
                expires_in_ms=self._sessions.remaining_ns(session) // 10**6,
                client_version=session.client_version,
            )
        return response

    @answering
    async def GetPauses(self, _: control_pb2.GetPausesRequest) -> control_pb2.GetPausesResponse:
        told = await self._regions.pauses()
        response = control_pb2.GetPausesResponse()
        for region in self._regions.regions:
            pauses = told.get(region.settings.name)
            if pauses:
                response.regions.append(_pauses_message(region.settings.name, region.worker.pid, pauses))
        return response

    @answering
    async def Drain(self, request: control_pb2.DrainRequest) -> control_pb2.DrainResponse:
        timeout_s = request.timeout_ms / 1000
        if not 0 < timeout_s <= DRAIN_TIMEOUT_MAX_S:
            raise UserError(f"a drain needs a timeout of more than 0 and at most {DRAIN_TIMEOUT_MAX_S:g} s")
        regions = await self._regions.drain(list(request.regions), timeout_s)
        return control_pb2.DrainResponse(regions=[region_message(region, self._config) for region in regions])


def _pauses_message(name: str, worker_pid: int, pauses: dict[str, Any]) -> control_pb2.RegionPauses:
    """From what `turn_times.TurnTimes.report` says."""
    message = control_pb2.RegionPauses(
        region=name,
        worker_pid=worker_pid,
        bounds_ns=pauses["bounds_ns"],
        turns=pauses["turns"],
        own=pauses["own"],
        longest=[control_pb2.LongPause(**pause) for pause in pauses["longest"]],
    )
    for cause, counts in pauses["parts"].items():
        message.parts.add(cause=cause, counts=counts, total_ns=pauses["total_ns"][cause])
    return message
