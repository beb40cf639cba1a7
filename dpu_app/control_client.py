"""A client of a running DPU application's control plane, for the command line. Synchronous; knows no output."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc

from common import config, rpc_errors
from common.errors import UserError
from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from dpu_app.config import DpuConfig
from dpu_app.state_dir import read_run_file

ADDRESS_VARIABLE = "ENTRESOL_DPU_ADDRESS"
_OPTIONS = (("grpc.enable_http_proxy", 0),)
Request = TypeVar("Request")
Response = TypeVar("Response")


def find_address(address: str | None, state_dir: Path | None, config_file: Path | None) -> str:
    """Where to reach the DPU application: the address given, or that of the one that runs with a state directory or
    a configuration file, or ENTRESOL_DPU_ADDRESS. Raises UserError, UnavailableError (it does not run)."""
    if address:
        return address
    if config_file is not None:
        state_dir = config.load_file(config_file, DpuConfig).state_dir
    if state_dir is not None:
        return read_run_file(state_dir).address
    found = os.environ.get(ADDRESS_VARIABLE, "")
    if not found:
        raise UserError(f"which DPU? give --address, --state-dir or --config, or set {ADDRESS_VARIABLE}")
    return found


class ControlClient:
    """Calls with a time limit; errors are those of `common.errors`."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._regions = control_pb2_grpc.RegionsStub(self._channel)
        self._dpu = control_pb2_grpc.DpuStub(self._channel)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def list_regions(self) -> list[control_pb2.Region]:
        return list(self._call(self._regions.ListRegions, control_pb2.ListRegionsRequest()).regions)

    def get_region(self, name: str) -> control_pb2.Region:
        return self._call(self._regions.GetRegion, control_pb2.GetRegionRequest(name=name))

    def create_region(self, name: str, path: str, settings: dict[str, str]) -> control_pb2.Region:
        request = control_pb2.CreateRegionRequest(name=name, path=path, settings=settings)
        return self._call(self._regions.CreateRegion, request)

    def delete_region(self, name: str, uuid: bytes, *, erase: bool, force: bool) -> None:
        request = control_pb2.DeleteRegionRequest(name=name, uuid=uuid, erase=erase, force=force)
        self._call(self._regions.DeleteRegion, request)

    def format_region(self, name: str, uuid: bytes, *, force: bool) -> control_pb2.Region:
        request = control_pb2.FormatRegionRequest(name=name, uuid=uuid, force=force)
        return self._call(self._regions.FormatRegion, request)

    def status(self) -> control_pb2.GetStatusResponse:
        return self._call(self._dpu.GetStatus, control_pb2.GetStatusRequest())

    def pauses(self) -> list[control_pb2.RegionPauses]:
        return list(self._call(self._dpu.GetPauses, control_pb2.GetPausesRequest()).regions)

    def drain(self, regions: tuple[str, ...], timeout_s: float) -> list[control_pb2.Region]:
        request = control_pb2.DrainRequest(regions=regions, timeout_ms=max(1, int(timeout_s * 1000)))
        return list(self._call(self._dpu.Drain, request, timeout_s).regions)

    def _call(self, method: Callable[..., Response], request: Any, more_s: float = 0.0) -> Response:
        try:
            return method(request, timeout=self._timeout_s + more_s)
        except grpc.RpcError as error:
            raise rpc_errors.from_rpc_error(error) from error
