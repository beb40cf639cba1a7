"""The agent against real pods: killed in mid-transfer, a worker that is stopped, a DPU that dies and returns; and what
must be as before afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from common.errors import EntresolError, PermissionDeniedError
from common.identity import UNKNOWN, NamespaceRecord, block_key
from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from common.status import Status
from common.wire import StatId
from dpu_app.control_client import ControlClient
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from host_agent.client import Client
from host_agent.memory import RegisteredMemory
from host_agent.namespace import Namespace

if TYPE_CHECKING:
    from tests.system.conftest import Place

BLOCK = 64 << 10
BLOCKS = 64
TTL_S = 1.5
WAIT_S = 40.0
FABRICS = ("emu-shm", "emu-tcp")

MOVER = """
import sys, numpy as np
from host_agent.client import Client
from tests.system.test_agent_faults import BLOCK, BLOCKS, keys_of, record
with Client(sys.argv[1:], tenant="acme", timeout_s=20.0) as client:
    namespace = client.namespace(record("acme"))
    memory = client.allocate(BLOCKS * BLOCK)
    places = memory.blocks(np.arange(BLOCKS), BLOCK)
    print("moving", flush=True)
    for turn in range(1 << 30):
        client.store(namespace, keys_of(namespace, turn), places)
        client.retrieve(namespace, keys_of(namespace, turn), places)
        client.core.progress.wait(client.calls.start_lease(namespace, keys_of(namespace, turn), 30000, None)[0])
"""


def record(tenant: str) -> NamespaceRecord:
    unknown = {name: UNKNOWN for name in NamespaceRecord.__dataclass_fields__ if name not in ("tenant", "salt")}
    return NamespaceRecord(tenant=tenant, salt=b"", **unknown)


def keys_of(namespace: Namespace, turn: int) -> list[bytes]:
    return [block_key(namespace.digest, None, [turn, number]) for number in range(BLOCKS)]


def settings(place: Place, fabric: str, dpus: int = 1) -> PodSettings:
    return PodSettings(
        dpus=dpus,
        regions=2,
        fabric=fabric,
        capacity_bytes=64 << 20,
        slot_bytes=BLOCK,
        window_bytes=32 << 20,
        session_ttl_s=TTL_S,
        run_dir=place.run_dir,
        flash_dir=place.flash_dir,
    )


@contextmanager
def running(place: Place, fabric: str, dpus: int = 1) -> Iterator[Pod]:
    place.flash_dir.mkdir(parents=True, exist_ok=True)
    pod = Pod.up(settings(place, fabric, dpus))
    try:
        yield pod
    finally:
        pod.down()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.05)


def connect(pod: Pod, tenant: str = "acme", timeout_s: float = 20.0) -> Client:
    return Client([dpu.control for dpu in pod.state.dpus], tenant=tenant, timeout_s=timeout_s)


def worker_pids(pod: Pod) -> dict[str, int]:
    pids: dict[str, int] = {}
    for dpu in pod.state.dpus:
        with ControlClient(dpu.control, 10.0) as control:
            pids.update({f"{dpu.name}/{r.region.name}": r.worker_pid for r in control.status().regions})
    return pids


def held(client: Client) -> dict[str, tuple[int, ...]]:
    """What sessions can hold, by region."""
    kinds = (StatId.SESSIONS, StatId.LEASES, StatId.PENDING, StatId.FRAMES_BUSY)
    return {name: tuple(stats[kind] for kind in kinds) for name, stats in client.stat().items()}


def descriptors(pids: dict[str, int]) -> dict[str, int]:
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}


def filled(client: Client, seed: int) -> tuple[RegisteredMemory, npt.NDArray[np.uint8]]:
    memory = client.allocate(BLOCKS * BLOCK)
    array = memory.array()
    array[:] = np.random.default_rng(seed).integers(0, 256, BLOCKS * BLOCK, np.uint8)
    return memory, array


@pytest.mark.parametrize("fabric", FABRICS)
def test_an_agent_killed_in_mid_transfer_leaves_nothing_held(place: Place, fabric: str) -> None:
    with running(place, fabric) as pod, connect(pod) as watcher:
        pids = worker_pids(pod)
        watcher.stat()
        until(lambda: len(held(watcher)) == 2, "both regions answer")
        before, descriptors_before = held(watcher), descriptors(pids)
        for _ in range(3):
            addresses = [dpu.control for dpu in pod.state.dpus]
            mover = subprocess.Popen([sys.executable, "-c", MOVER, *addresses], stdout=subprocess.PIPE, text=True)
            with mover:
                assert mover.stdout is not None
                assert mover.stdout.readline() == "moving\n"
                time.sleep(0.3)
                mover.kill()
        until(lambda: held(watcher) == before, f"sessions, leases, work and frames as before, {before}")
        until(lambda: descriptors(pids) == descriptors_before, "descriptors as before")
        assert worker_pids(pod) == pids


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_stopped_worker_costs_its_blocks_a_deadline_and_nothing_lands_later(place: Place, fabric: str) -> None:
    with running(place, fabric) as pod, connect(pod) as client:
        namespace = client.namespace(record("acme"))
        source, _array = filled(client, 1)
        target = client.allocate(BLOCKS * BLOCK)
        keys = keys_of(namespace, 0)
        everything = np.arange(BLOCKS)
        assert client.store(namespace, keys, source.blocks(everything, BLOCK)).all_ok
        stopped = worker_pids(pod)["dpu0/region0"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            started_s = time.monotonic()
            results = client.retrieve(namespace, keys, target.blocks(everything, BLOCK), timeout_s=0.5)
            took_s = time.monotonic() - started_s
            counts = results.counts()
            assert set(counts) == {Status.OK, Status.DEADLINE}
            assert took_s < 0.5 + 1.0, "the statuses came by the deadline"
            late = results.status == Status.DEADLINE
            array = target.array().reshape(BLOCKS, BLOCK)
            array[late] = 0xAA  # the caller may use its memory again
            client.retrieve(namespace, keys, source.blocks(everything, BLOCK), timeout_s=0.5)  # the rest is served
        finally:
            os.kill(stopped, signal.SIGCONT)
        until(lambda: all(region.link.up for region in client.regions), "the region is reached again")
        assert client.retrieve(namespace, keys, source.blocks(everything, BLOCK), verify=True).all_ok
        assert (array[late] == 0xAA).all(), "bytes landed after the deadline's answer"


def test_a_dpu_that_is_killed_costs_its_blocks_and_is_found_again(place: Place) -> None:
    with running(place, "emu-shm", dpus=2) as pod, connect(pod) as client:
        namespace = client.namespace(record("acme"))
        source, array = filled(client, 2)
        keys = keys_of(namespace, 0)
        places = source.blocks(np.arange(BLOCKS), BLOCK)
        assert client.store(namespace, keys, places, until_flash=True).all_ok
        wanted = array.copy()
        os.kill(pod.state.dpus[0].pid, signal.SIGKILL)
        until(lambda: not pod.is_alive(pod.state.dpus[0]), "the DPU is dead")
        found = client.lookup(namespace, keys, timeout_s=5.0)
        assert 0 < int(found.present.sum()) < BLOCKS
        assert {Status(int(s)) for s in found.status} <= {Status.OK, Status.DISCONNECTED, Status.DEADLINE}
        pod.restart("dpu0")
        until(lambda: all(region.link.up for region in client.regions), "its regions are reached again")
        array[:] = 0
        assert client.retrieve(namespace, keys, places, verify=True).all_ok
        assert (array == wanted).all()


@pytest.mark.parametrize("fabric", FABRICS)
def test_tenants_do_not_see_each_other(place: Place, fabric: str) -> None:
    with running(place, fabric) as pod, connect(pod) as ours, connect(pod, "other") as theirs:
        namespace, other = ours.namespace(record("acme")), theirs.namespace(record("other"))
        memory, _array = filled(ours, 3)
        keys = keys_of(namespace, 0)
        places = memory.blocks(np.arange(BLOCKS), BLOCK)
        assert ours.store(namespace, keys, places).all_ok
        assert theirs.lookup(other, keys).prefix_blocks == 0
        assert set(theirs.delete(other, keys).counts()) == {Status.MISS}
        assert list(theirs.list(other)) == []
        assert len(list(ours.list(namespace))) == BLOCKS
        assert ours.lookup(namespace, keys).prefix_blocks == BLOCKS


def test_the_dpu_refuses_another_tenants_record(place: Place) -> None:
    import grpc

    with running(place, "emu-shm") as pod:
        with grpc.insecure_channel(pod.state.dpus[0].control) as channel:
            stub = control_pb2_grpc.SessionsStub(channel)
            request = control_pb2.OpenSessionRequest(
                tenant="other", wire_version_min=1, wire_version_max=1, namespaces=[record("acme").to_bytes()]
            )
            with pytest.raises(grpc.RpcError) as refused:
                stub.OpenSession(request, timeout=10)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with connect(pod) as client, pytest.raises(EntresolError) as error:
            client.namespace(record("other"))
        assert not isinstance(error.value, PermissionDeniedError), "noticed before the DPU is asked"


@pytest.mark.parametrize("fabric", FABRICS)
def test_duplicates_and_overlaps_in_one_batch(place: Place, fabric: str) -> None:
    with running(place, fabric) as pod, connect(pod) as client:
        namespace = client.namespace(record("acme"))
        memory, array = filled(client, 4)
        keys = keys_of(namespace, 0)
        twice = [keys[0], keys[0], keys[1]]
        stored = client.store(namespace, twice, memory.blocks([0, 0, 1], BLOCK))
        assert stored.all_ok
        assert sorted(stored.status[:2].tolist()) in ([Status.OK, Status.EXISTS], [Status.OK, Status.OK])
        results = client.retrieve(namespace, twice, memory.blocks([10, 11, 12], BLOCK), verify=True)
        assert results.all_ok
        blocks = array.reshape(BLOCKS, BLOCK)
        assert (blocks[10] == blocks[0]).all()
        assert (blocks[11] == blocks[0]).all()
        assert (blocks[12] == blocks[1]).all()
        same_place = client.retrieve(namespace, twice[:2], memory.blocks([20, 20], BLOCK))
        assert same_place.status.tolist() == [Status.OK, Status.OVERLAP]
        assert (blocks[20] == blocks[0]).all()


@pytest.mark.parametrize("fabric", FABRICS)
def test_leases_are_read_one_sidedly_where_the_fabric_can(place: Place, fabric: str) -> None:
    with running(place, fabric) as pod, connect(pod) as client:
        namespace = client.namespace(record("acme"))
        memory, array = filled(client, 5)
        keys = keys_of(namespace, 0)[:16]
        client.store(namespace, keys, memory.blocks(np.arange(16), BLOCK))
        before = {name: stats[StatId.LEASES] for name, stats in client.stat().items()}
        with client.lease(namespace, [*keys, b"absent".ljust(16)], duration_s=10) as lease:
            assert lease.status.tolist() == [Status.OK] * 16 + [Status.MISS]
            assert lease.length[:16].tolist() == [BLOCK] * 16
            target = memory.blocks(np.arange(17) + 20, BLOCK)
            results = lease.read(target, verify=True)
            assert results.status.tolist() == [Status.OK] * 16 + [Status.MISS]
            assert (array[20 * BLOCK : 36 * BLOCK] == array[: 16 * BLOCK]).all()
            pieces = [memory[40 * BLOCK + n * 2000 : 40 * BLOCK + n * 2000 + 1000] for n in range(40)]
            assert lease.read([pieces], indices=[3]).all_ok
            assert b"".join(map(bytes, pieces)) == bytes(memory[3 * BLOCK : 3 * BLOCK + 40000])
            assert client.delete(namespace, keys[:1])[0].status is Status.IN_USE
        assert set(lease.read(target).counts()) == {Status.MISS}
        until(lambda: {n: s[StatId.LEASES] for n, s in client.stat().items()} == before, "the leases are given back")


def test_clients_come_and_go_without_a_trace(place: Place) -> None:
    with running(place, "emu-shm") as pod, connect(pod) as watcher:
        pids = worker_pids(pod)
        until(lambda: len(held(watcher)) == 2, "both regions answer")
        before, descriptors_before = held(watcher), descriptors(pids)
        own: list[int] = []
        for seed in range(6):
            with connect(pod) as client:
                namespace = client.namespace(record("acme"))
                memory, _array = filled(client, seed)
                client.store(namespace, keys_of(namespace, seed), memory.blocks(np.arange(BLOCKS), BLOCK))
                client.prefetch(namespace, keys_of(namespace, seed))
            own.append(len(os.listdir("/proc/self/fd")))
        assert own[-1] <= own[1], "gRPC keeps some of its own; it must not grow"
        until(lambda: held(watcher) == before, "sessions, leases, work and frames as before")
        until(lambda: descriptors(pids) == descriptors_before, "descriptors as before")


@pytest.mark.parametrize("fabric", FABRICS)
def test_odd_blocks_have_their_own_answers(place: Place, fabric: str) -> None:
    with running(place, fabric) as pod, connect(pod) as client:
        namespace = client.namespace(record("acme"))
        memory, array = filled(client, 6)
        keys = keys_of(namespace, 0)
        stored = client.store(namespace, keys[:4], memory.spans([0, 0, 0, 0], [0, BLOCK + 1, BLOCK, 1]))
        assert stored.status.tolist() == [Status.BAD_LENGTH, Status.TOO_LARGE, Status.OK, Status.OK]
        where = [BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK]
        loaded = client.retrieve(namespace, [keys[2], keys[3], keys[3], keys[0]], memory.spans(where, [BLOCK, 2, 1, 1]))
        assert loaded.status.tolist() == [Status.OK, Status.BAD_RANGE, Status.OVERLAP, Status.MISS]
        assert loaded[1].length == 1, "the block's own length is told"
        past_end = client.retrieve(namespace, keys[2:3], memory.spans(BLOCK, 10), offset=BLOCK - 9)
        assert past_end[0].status is Status.BAD_RANGE
        whole = client.retrieve(namespace, keys[2:4], memory.blocks([4, 5], BLOCK), whole=True, verify=True)
        assert whole.length.tolist() == [BLOCK, 1]
        assert (array[4 * BLOCK : 5 * BLOCK] == array[:BLOCK]).all()
        tail = client.retrieve(namespace, keys[2:3], memory.spans(6 * BLOCK, 100), offset=BLOCK - 100, verify=True)
        assert tail.all_ok
        assert (array[6 * BLOCK : 6 * BLOCK + 100] == array[BLOCK - 100 : BLOCK]).all()
        assert client.store(namespace, [], []).all_ok
        assert client.lookup(namespace, keys[:4]).present.tolist() == [False, False, True, True]


@pytest.mark.parametrize("fabric", FABRICS)
def test_batches_of_every_size_and_memory_that_was_given(place: Place, fabric: str) -> None:
    with running(place, fabric, dpus=2) as pod, connect(pod) as client:
        namespace = client.namespace(record("acme"))
        source = np.random.default_rng(7).integers(0, 256, 1300 * 1024, np.uint8)
        target = bytearray(1300 * 1024)
        with client.register(source) as here, client.register(target) as there:
            for turn, count in enumerate((1, 2, 511, 512, 513, 1300)):
                keys = [block_key(namespace.digest, None, [1000 + turn, number]) for number in range(count)]
                places = np.arange(count)
                assert client.store(namespace, keys, here.blocks(places, 1024), verify=True).all_ok
                results = client.retrieve(namespace, keys, there.blocks(places, 1024), verify=True)
                assert results.all_ok
                assert target[: count * 1024] == source[: count * 1024].tobytes()
                assert client.lookup(namespace, [*keys, bytes(16)]).prefix_blocks == count
                target[:] = bytes(len(target))
                assert client.delete(namespace, keys).all_ok
