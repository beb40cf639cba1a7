"""The gRPC server of the control plane: services, health, reflection, and where it listens.

Health is told for the whole ("" and each service) and for each region as ``region/NAME``. Made and closed by the
supervisor; knows nothing of what the services do.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import UserError
from common.proto.entresol.v1 import control_pb2, control_pb2_grpc

SERVICES = tuple(service.full_name for service in control_pb2.DESCRIPTOR.services_by_name.values())
REGION_PREFIX = "region/"
MESSAGE_BYTES_MAX = 32 << 20
"""A session may bring many namespace records, of up to 16 KiB each."""
CONCURRENT_CALLS_MAX = 4096
"""More are answered RESOURCE_EXHAUSTED."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers on one port would share its calls by chance
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)


class ControlServer:
    def __init__(
        self,
        sessions: control_pb2_grpc.SessionsServicer,
        regions: control_pb2_grpc.RegionsServicer,
        dpu: control_pb2_grpc.DpuServicer,
    ) -> None:
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        control_pb2_grpc.add_SessionsServicer_to_server(sessions, self._server)
        control_pb2_grpc.add_RegionsServicer_to_server(regions, self._server)
        control_pb2_grpc.add_DpuServicer_to_server(dpu, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, address: str) -> str:
        """Listen at host:port or unix:PATH; where clients connect (the real port for 0). Raises UserError."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise UserError(f"cannot listen at {address}: {error}") from error
        await self._server.start()
        if address.startswith("unix:"):
            return address
        return f"{address.rpartition(':')[0]}:{port}"

    async def set_health(self, services: Sequence[str], serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in services:
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Calls under way may end within `grace_s`. Idempotent."""
        await self._server.stop(grace_s)
