"""The `Regions` service, and how a region is told in protobuf. Between the wire and `dpu_app.region_set` only."""

from __future__ import annotations

from pathlib import Path

from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from dpu_app.config import DpuConfig, region_from_text
from dpu_app.region_set import Region, RegionSet
from dpu_app.region_worker import RegionState
from dpu_app.rpc.answering import answering

_STATES = {
    RegionState.STARTING: control_pb2.REGION_STATE_STARTING,
    RegionState.SERVING: control_pb2.REGION_STATE_SERVING,
    RegionState.DRAINING: control_pb2.REGION_STATE_DRAINING,
    RegionState.FAILED: control_pb2.REGION_STATE_FAILED,
    RegionState.RESTARTING: control_pb2.REGION_STATE_RESTARTING,
    RegionState.STOPPED: control_pb2.REGION_STATE_STOPPED,
}


def region_message(region: Region, config: DpuConfig) -> control_pb2.Region:
    worker, facts = region.worker, region.worker.facts
    message = control_pb2.Region(
        name=region.settings.name,
        slot_bytes=region.settings.slot_bytes,
        weight=region.weight,
        state=_STATES[worker.state],
        message=worker.message,
        dynamic=region.dynamic is not None,
    )
    if facts is not None:
        message.uuid = facts.uuid
        message.slot_bytes = facts.slot_bytes
        message.slots = facts.slots
        message.capacity_bytes = facts.capacity_bytes
        message.generation = facts.generation
        if worker.state in (RegionState.SERVING, RegionState.DRAINING):
            message.fabrics.add(name=config.fabric.name, address=facts.address, options=config.fabric.client_options)
    return message


class RegionsService(control_pb2_grpc.RegionsServicer):
    def __init__(self, config: DpuConfig, regions: RegionSet) -> None:
        self._config = config
        self._regions = regions

    @answering
    async def ListRegions(self, _: control_pb2.ListRegionsRequest) -> control_pb2.ListRegionsResponse:
        return control_pb2.ListRegionsResponse(
            regions=[region_message(region, self._config) for region in self._regions.regions],
            regions_epoch=self._regions.epoch,
        )

    @answering
    async def GetRegion(self, request: control_pb2.GetRegionRequest) -> control_pb2.Region:
        return region_message(self._regions.get(request.name), self._config)

    @answering
    async def CreateRegion(self, request: control_pb2.CreateRegionRequest) -> control_pb2.Region:
        settings = region_from_text(request.name, Path(request.path), request.settings)
        return region_message(await self._regions.create(settings), self._config)

    @answering
    async def DeleteRegion(self, request: control_pb2.DeleteRegionRequest) -> control_pb2.DeleteRegionResponse:
        await self._regions.delete(request.name, request.uuid, erase=request.erase, force=request.force)
        return control_pb2.DeleteRegionResponse()

    @answering
    async def FormatRegion(self, request: control_pb2.FormatRegionRequest) -> control_pb2.Region:
        region = await self._regions.format(request.name, request.uuid, force=request.force)
        return region_message(region, self._config)
