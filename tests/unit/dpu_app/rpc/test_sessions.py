"""The Sessions service as an agent meets it: over gRPC, with region workers on the other side."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from common import rpc_errors
from common.errors import DeadlineError, NotFoundError, PermissionDeniedError, PreconditionError, UserError
from common.identity import UNKNOWN, NamespaceRecord
from common.proto.entresol.v1 import control_pb2
from dpu_app import region_worker
from dpu_app.region_worker import RegionState

if TYPE_CHECKING:
    from tests.unit.dpu_app.conftest import Dpu


def record(tenant: str, model_id: str) -> bytes:
    texts = dict.fromkeys(
        ("weights_revision", "lora_id", "lora_revision", "kv_dtype", "quantisation", "layout"), UNKNOWN
    )
    counts = dict.fromkeys(
        (
            *("page_tokens", "block_tokens", "layers", "kv_heads", "head_size"),
            *("tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size"),
        ),
        UNKNOWN,
    )
    return NamespaceRecord(tenant=tenant, salt=b"", model_id=model_id, **texts, **counts).to_bytes()


async def serving(dpu: Dpu) -> Dpu:
    for name in ("r0", "r1"):
        await dpu.until_state(name, RegionState.SERVING)
    return dpu


async def test_a_session_is_told_all_it_needs_and_so_are_the_workers(start_dpu: Any) -> None:
    dpu = await serving(await start_dpu(session_ttl="3s"))
    records = [record("acme", "a"), record("acme", "b")]
    session = await dpu.open(namespaces=records, wire_version_max=7)
    assert session.session_id > 0
    assert len(session.token) == 16
    assert (session.wire_version, session.ttl_ms) == (1, 3000)
    assert [grant.handle for grant in session.namespaces] == [1, 2]
    assert [grant.digest for grant in session.namespaces] == [
        NamespaceRecord.from_bytes(encoded).digest() for encoded in records
    ]
    assert (session.dpu.name, len(session.dpu.id)) == ("dpu-t", 32)
    assert [region.name for region in session.regions] == ["r0", "r1"]
    for region in session.regions:
        assert len(region.uuid) == 16
        assert (region.slot_bytes, region.slots, region.weight) == (4096, 64, 64 * 4096)
        assert region.state == control_pb2.REGION_STATE_SERVING
        [fabric] = region.fabrics
        assert (fabric.name, fabric.address, dict(fabric.options)) == ("fake", f"fake:{region.name}", {"key": "value"})
        [told] = dpu.told(region.name, "session_open")
        assert told["params"] == {
            "session_id": session.session_id,
            "token": session.token.hex(),
            "tenant": "acme",
            "namespaces": [{"handle": grant.handle, "digest": grant.digest.hex()} for grant in session.namespaces],
        }


async def test_renewing_tells_of_regions_only_when_they_changed(start_dpu: Any) -> None:
    dpu = await serving(await start_dpu())
    session = await dpu.open()
    request = control_pb2.KeepAliveRequest(
        session_id=session.session_id, token=session.token, regions_epoch=session.regions_epoch
    )
    response = await dpu.call(dpu.sessions.KeepAlive, request)
    assert (response.regions_epoch, list(response.regions)) == (session.regions_epoch, [])
    os.kill(dpu.region("r0").worker.pid, signal.SIGKILL)
    await dpu.until(lambda: dpu.region("r0").worker.restarts == 1)
    await dpu.until_state("r0", RegionState.SERVING)
    response = await dpu.call(dpu.sessions.KeepAlive, request)
    assert response.regions_epoch > session.regions_epoch
    assert [region.name for region in response.regions] == ["r0", "r1"]


async def test_no_version_in_common_is_a_failed_precondition(start_dpu: Any) -> None:
    dpu = await start_dpu({})
    with pytest.raises(PreconditionError, match="upgrade the DPU"):
        await dpu.open(wire_version_min=8, wire_version_max=9)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await dpu.sessions.OpenSession(
            control_pb2.OpenSessionRequest(tenant="acme", wire_version_min=8, wire_version_max=9), timeout=10
        )
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    metadata: Any = caught.value.trailing_metadata()
    assert dict(metadata)[rpc_errors.KIND_KEY] == "precondition"


async def test_what_is_not_the_sessions_own_is_refused(start_dpu: Any) -> None:
    dpu = await start_dpu({}, tenants=[{"name": "acme"}], other_tenants=False)
    with pytest.raises(PermissionDeniedError, match="not served"):
        await dpu.open(tenant="rival")
    with pytest.raises(PermissionDeniedError, match="another tenant"):
        await dpu.open(namespaces=[record("rival", "a")])
    with pytest.raises(UserError):
        await dpu.open(namespaces=[b"\x00" * 40])
    session = await dpu.open()
    for token in (b"", bytes(16)):
        with pytest.raises(PermissionDeniedError):
            await dpu.call(
                dpu.sessions.KeepAlive, control_pb2.KeepAliveRequest(session_id=session.session_id, token=token)
            )


async def test_a_namespace_registered_later_reaches_the_workers(start_dpu: Any) -> None:
    dpu = await serving(await start_dpu())
    session = await dpu.open(namespaces=[record("acme", "a")])
    request = control_pb2.RegisterNamespaceRequest(
        session_id=session.session_id, token=session.token, record=record("acme", "b")
    )
    grants = [(await dpu.call(dpu.sessions.RegisterNamespace, request)).namespace for _ in range(2)]
    assert [grant.handle for grant in grants] == [2, 2]
    told = dpu.told("r1", "session_namespace")[0]["params"]
    assert told == {"session_id": session.session_id, "handle": 2, "digest": grants[0].digest.hex()}


async def test_closing_reaches_every_worker_and_may_be_repeated(start_dpu: Any) -> None:
    dpu = await serving(await start_dpu())
    session = await dpu.open()
    request = control_pb2.CloseSessionRequest(session_id=session.session_id, token=session.token)
    await dpu.call(dpu.sessions.CloseSession, request)
    for name in ("r0", "r1"):
        assert dpu.told(name, "session_close")[0]["params"] == {"session_id": session.session_id}
    await dpu.call(dpu.sessions.CloseSession, request)
    with pytest.raises(NotFoundError):
        await dpu.call(
            dpu.sessions.KeepAlive,
            control_pb2.KeepAliveRequest(session_id=session.session_id, token=session.token),
        )


async def test_a_session_that_is_not_renewed_ends_on_every_worker(start_dpu: Any) -> None:
    dpu = await serving(await start_dpu(session_ttl="200ms"))
    session = await dpu.open()
    await dpu.until(lambda: bool(dpu.told("r0", "session_close")) and bool(dpu.told("r1", "session_close")))
    with pytest.raises(NotFoundError):
        await dpu.call(
            dpu.sessions.KeepAlive,
            control_pb2.KeepAliveRequest(session_id=session.session_id, token=session.token),
        )


async def test_a_broken_connection_halves_the_time_to_show_life(start_dpu: Any) -> None:
    dpu = await serving(await start_dpu({"r0": {}, "r1": {}}, session_ttl="1h"))
    await dpu.open(tenant="lossy")
    session = dpu.supervisor.open_sessions()[0]
    await dpu.until(lambda: session.expires_ns - session.opened_ns < 1900 * 10**9)


async def test_a_restarted_worker_learns_of_the_sessions_that_are_open(start_dpu: Any) -> None:
    dpu = await serving(await start_dpu())
    gone = await dpu.open()
    kept = await dpu.open(namespaces=[record("acme", str(number)) for number in range(300)])
    await dpu.call(
        dpu.sessions.CloseSession, control_pb2.CloseSessionRequest(session_id=gone.session_id, token=gone.token)
    )
    before = len(dpu.told("r1"))
    os.kill(dpu.region("r1").worker.pid, signal.SIGKILL)
    await dpu.until(lambda: len(dpu.told("r1", "session_namespace")) == 2 * (300 - 256))
    told = dpu.told("r1")[before:]
    assert {message["params"]["session_id"] for message in told} == {kept.session_id}
    opening = told[0]["params"]
    handles = [item["handle"] for item in opening["namespaces"]]
    handles += [message["params"]["handle"] for message in told if message["method"] == "session_namespace"]
    assert handles == list(range(1, 301))


async def test_a_worker_that_does_not_answer_is_said_within_the_time(
    start_dpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_worker, "CALL_TIMEOUT_S", 0.1)
    dpu = await serving(await start_dpu({"r0": {"deaf": "session_close"}, "r1": {}}))
    session = await dpu.open()
    with pytest.raises(DeadlineError):
        await dpu.call(
            dpu.sessions.CloseSession,
            control_pb2.CloseSessionRequest(session_id=session.session_id, token=session.token),
        )
    assert dpu.told("r1", "session_close")


async def test_one_worker_that_does_not_answer_does_not_keep_agents_out(
    start_dpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_worker, "CALL_TIMEOUT_S", 0.1)
    dpu = await serving(await start_dpu({"r0": {"deaf": "session_open"}, "r1": {}}))
    session = await dpu.open()
    assert dpu.told("r0", "session_open")[0]["params"]["session_id"] == session.session_id
    assert dpu.told("r1", "session_open")


async def test_a_session_can_be_opened_while_no_region_serves(start_dpu: Any) -> None:
    dpu = await start_dpu({"r0": {"fail": "user", "message": "bad superblock"}})
    await dpu.until_state("r0", RegionState.FAILED)
    session = await dpu.open()
    [region] = session.regions
    assert (region.state, region.message) == (control_pb2.REGION_STATE_FAILED, "bad superblock")
    assert (region.uuid, list(region.fabrics)) == (b"", [])
