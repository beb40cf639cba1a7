"""The Dpu service, health and reflection."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import NotFoundError, UserError
from common.proto.entresol.v1 import control_pb2
from dpu_app import region_set
from dpu_app.region_worker import RegionState

if TYPE_CHECKING:
    from tests.unit.dpu_app.conftest import Dpu

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status(dpu: Dpu) -> control_pb2.GetStatusResponse:
    response: control_pb2.GetStatusResponse = await dpu.call(dpu.dpu.GetStatus, control_pb2.GetStatusRequest())
    return response


async def health(dpu: Dpu, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(dpu.channel)
    return int((await dpu.call(stub.Check, health_pb2.HealthCheckRequest(service=service))).status)


async def test_status_shows_regions_counters_and_sessions(start_dpu: Any) -> None:
    dpu = await start_dpu({"r0": {"hold": "2"}, "r1": {"fail": "user", "message": "wrong disk"}})
    await dpu.until_state("r0", RegionState.SERVING)
    await dpu.until_state("r1", RegionState.FAILED)
    opened = await dpu.open(client_version="0.9")
    answer = await status(dpu)
    assert (answer.dpu.name, answer.pid, answer.draining) == ("dpu-t", os.getpid(), False)
    serving, failed = answer.regions
    assert dict(serving.stats) == {"LEASES": 2, "PINS": 0, "SLOTS": 64}
    assert serving.worker_pid > 0
    assert (dict(failed.stats), failed.region.message, failed.worker_pid) == ({}, "wrong disk", 0)
    [session] = answer.sessions
    assert (session.session_id, session.tenant, session.client_version) == (opened.session_id, "acme", "0.9")
    assert 0 < session.expires_in_ms <= 6000


async def test_a_stopped_worker_delays_status_and_no_more(start_dpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_set, "CALL_TIMEOUT_S", 0.2)
    dpu = await start_dpu({"r0": {"deaf": "status"}, "r1": {}})
    for name in ("r0", "r1"):
        await dpu.until_state(name, RegionState.SERVING)
    deaf, other = (await status(dpu)).regions
    assert dict(deaf.stats) == {}
    assert other.stats["SLOTS"] == 64


async def test_pauses_are_of_the_workers_that_answer(start_dpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_set, "CALL_TIMEOUT_S", 0.2)
    dpu = await start_dpu({"r0": {}, "r1": {"deaf": "pauses"}, "r2": {"fail": "user"}})
    await dpu.until_state("r0", RegionState.SERVING)
    await dpu.until_state("r1", RegionState.SERVING)
    answer = await dpu.call(dpu.dpu.GetPauses, control_pb2.GetPausesRequest())
    [pauses] = answer.regions
    assert (pauses.region, pauses.worker_pid > 0) == ("r0", True)
    assert (list(pauses.bounds_ns), list(pauses.turns), list(pauses.own)) == ([1000, 2000], [1, 2, 3], [3, 2, 1])
    assert [(part.cause, list(part.counts), part.total_ns) for part in pauses.parts] == [("gc", [0, 0, 1], 9)]
    [longest] = pauses.longest
    assert (longest.duration_ns, longest.waited_ns, longest.ago_ns, dict(longest.parts_ns)) == (9, 4, 5, {"gc": 9})


async def test_draining_reaches_the_workers_named_and_survives_their_restart(start_dpu: Any) -> None:
    dpu = await start_dpu({"r0": {}, "r1": {}})
    for name in ("r0", "r1"):
        await dpu.until_state(name, RegionState.SERVING)
    answer = await dpu.call(dpu.dpu.Drain, control_pb2.DrainRequest(regions=["r1"], timeout_ms=1500))
    assert [(region.name, region.state) for region in answer.regions] == [("r1", control_pb2.REGION_STATE_DRAINING)]
    assert dpu.told("r1", "drain")[0]["params"] == {"timeout_s": 1.5}
    assert dpu.told("r0", "drain") == []
    assert await health(dpu, "region/r1") == NOT_SERVING
    assert (await status(dpu)).draining
    os.kill(dpu.region("r1").worker.pid, 9)
    await dpu.until(lambda: len(dpu.told("r1", "drain")) == 2)
    assert dpu.region("r1").worker.state is RegionState.DRAINING
    with pytest.raises(NotFoundError):
        await dpu.call(dpu.dpu.Drain, control_pb2.DrainRequest(regions=["r9"], timeout_ms=1))
    with pytest.raises(UserError, match="timeout"):
        await dpu.call(dpu.dpu.Drain, control_pb2.DrainRequest())


async def test_health_is_told_for_the_whole_and_for_each_region(start_dpu: Any) -> None:
    dpu = await start_dpu({"good": {}, "bad": {"fail": "user"}})
    await dpu.until_state("good", RegionState.SERVING)
    await dpu.until_state("bad", RegionState.FAILED)
    for service in ("", "entresol.v1.Sessions", "entresol.v1.Regions", "entresol.v1.Dpu", "region/good"):
        assert await health(dpu, service) == SERVING
    assert await health(dpu, "region/bad") == NOT_SERVING


async def test_a_deleted_region_is_not_healthy_any_more(start_dpu: Any, short_dir: Path) -> None:
    dpu = await start_dpu({})
    assert await health(dpu, "") == SERVING
    made = await dpu.call(
        dpu.regions.CreateRegion,
        control_pb2.CreateRegionRequest(
            name="r9",
            path=str(short_dir / "r9.flash"),
            settings={"slot": "4KiB", "window": "64KiB", "capacity": "1MiB"},
        ),
    )
    assert await health(dpu, "region/r9") == SERVING
    await dpu.call(dpu.regions.DeleteRegion, control_pb2.DeleteRegionRequest(name="r9", uuid=made.uuid))
    assert await health(dpu, "region/r9") == NOT_SERVING


async def test_with_no_region_serving_the_whole_is_not_healthy(start_dpu: Any) -> None:
    dpu = await start_dpu({"bad": {"fail": "user"}})
    await dpu.until_state("bad", RegionState.FAILED)
    assert await health(dpu, "") == NOT_SERVING


async def test_reflection_lists_the_services(start_dpu: Any) -> None:
    dpu = await start_dpu({})
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(dpu.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    listed = [service.name async for answer in call for service in answer.list_services_response.service]
    assert {"entresol.v1.Sessions", "entresol.v1.Regions", "entresol.v1.Dpu", "grpc.health.v1.Health"} <= set(listed)
