"""What the DPUs of a pod say about themselves over gRPC: whether all regions serve, and their counters.

Asks, never changes anything. Used by `emulator.pod` while it waits, and by `entresol-emu status` and the demo.
"""

from __future__ import annotations

import grpc

from common.errors import EntresolError
from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from common.rpc_errors import from_rpc_error


def dpu_status(address: str, timeout_s: float = 5.0) -> control_pb2.GetStatusResponse:
    """Raises EntresolError: UnavailableError where nobody answers at `address` in time."""
    with grpc.insecure_channel(address) as channel:
        try:
            stub = control_pb2_grpc.DpuStub(channel)
            return stub.GetStatus(control_pb2.GetStatusRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def not_serving(address: str, regions: int, timeout_s: float) -> tuple[str, bool]:
    """Why a DPU that should have `regions` regions is not ready yet, empty when all of them serve; and whether
    waiting is of no use."""
    try:
        status = dpu_status(address, timeout_s)
    except EntresolError as error:
        return f"no answer at {address}: {error}", False
    waiting = [
        f"{entry.region.name} is {state_name(entry.region.state)}: {entry.region.message}".rstrip(": ")
        for entry in status.regions
        if entry.region.state != control_pb2.REGION_STATE_SERVING
    ]
    if len(status.regions) < regions:
        waiting.append(f"{len(status.regions)} of {regions} regions are there")
    failed = any(entry.region.state == control_pb2.REGION_STATE_FAILED for entry in status.regions)
    return "; ".join(waiting), failed


def state_name(state: int) -> str:
    """A region's state for people: "serving"."""
    return control_pb2.RegionState.Name(control_pb2.RegionState.ValueType(state)).removeprefix("REGION_STATE_").lower()
