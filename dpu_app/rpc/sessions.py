"""The `Sessions` service. Between the wire and `dpu_app.sessions` only."""

from __future__ import annotations

from common import wire
from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from dpu_app.config import DpuConfig
from dpu_app.region_set import RegionSet
from dpu_app.rpc.answering import answering
from dpu_app.rpc.regions import region_message
from dpu_app.sessions import NamespaceGrant, SessionTable, negotiate

WIRE_VERSION_MIN = wire.VERSION
WIRE_VERSION_MAX = wire.VERSION


class SessionsService(control_pb2_grpc.SessionsServicer):
    def __init__(
        self, config: DpuConfig, identity: control_pb2.Identity, sessions: SessionTable, regions: RegionSet
    ) -> None:
        self._config = config
        self._identity = identity
        self._sessions = sessions
        self._regions = regions

    @answering
    async def OpenSession(self, request: control_pb2.OpenSessionRequest) -> control_pb2.OpenSessionResponse:
        version = negotiate(request.wire_version_min, request.wire_version_max, WIRE_VERSION_MIN, WIRE_VERSION_MAX)
        session, grants = await self._sessions.open(
            request.tenant, request.agent_name, request.client_version, list(request.namespaces)
        )
        return control_pb2.OpenSessionResponse(
            session_id=session.session_id,
            token=session.token,
            wire_version=version,
            ttl_ms=self._sessions.ttl_ms,
            namespaces=[_grant_message(grant) for grant in grants],
            regions=self._region_messages(),
            dpu=self._identity,
            regions_epoch=self._regions.epoch,
        )

    @answering
    async def KeepAlive(self, request: control_pb2.KeepAliveRequest) -> control_pb2.KeepAliveResponse:
        self._sessions.keep_alive(request.session_id, request.token)
        response = control_pb2.KeepAliveResponse(ttl_ms=self._sessions.ttl_ms, regions_epoch=self._regions.epoch)
        if request.regions_epoch != self._regions.epoch:
            response.regions.extend(self._region_messages())
        return response

    @answering
    async def CloseSession(self, request: control_pb2.CloseSessionRequest) -> control_pb2.CloseSessionResponse:
        await self._sessions.close(request.session_id, request.token)
        return control_pb2.CloseSessionResponse()

    @answering
    async def RegisterNamespace(
        self, request: control_pb2.RegisterNamespaceRequest
    ) -> control_pb2.RegisterNamespaceResponse:
        grant = await self._sessions.add_namespace(request.session_id, request.token, request.record)
        return control_pb2.RegisterNamespaceResponse(namespace=_grant_message(grant))

    def _region_messages(self) -> list[control_pb2.Region]:
        return [region_message(region, self._config) for region in self._regions.regions]


def _grant_message(grant: NamespaceGrant) -> control_pb2.NamespaceGrant:
    return control_pb2.NamespaceGrant(handle=grant.handle, digest=grant.digest)
