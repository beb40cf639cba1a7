"""The client against a scripted DPU on the real emulated fabric: what callers get, and what happens to their memory."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from common import wire
from common.errors import PermissionDeniedError, UnavailableError, UserError
from common.status import Status
from common.wire import Op
from host_agent.client import Client
from host_agent.namespace import Namespace
from tests.unit.host_agent.conftest import MakeClient, MakeDpu
from tests.unit.host_agent.scripted_dpu import SLOT_BYTES, ScriptedRegion, Silence, key, record

BLOCK = 4096
KEYS = [key(number) for number in range(40)]


def _filled(client: Client, blocks: int, seed: int = 1) -> Any:
    memory = client.allocate(blocks * BLOCK)
    memory.array()[:] = np.random.default_rng(seed).integers(0, 256, blocks * BLOCK, np.uint8)
    return memory


def _names(results: Any) -> set[str]:
    return {status.name for status in results.counts()}


def _silent(_region: ScriptedRegion, _capsule: wire.Capsule) -> None:
    raise Silence


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("verify", [False, True])
def test_blocks_come_back_from_several_regions(make_dpu: MakeDpu, make_client: MakeClient, verify: bool) -> None:
    dpus = [make_dpu(regions=2), make_dpu(regions=2)]
    client = make_client(*dpus, verify=verify)
    namespace = client.namespace(record())
    source, target = _filled(client, 40), client.allocate(40 * BLOCK)
    places = target.blocks(np.arange(40), BLOCK)
    assert client.lookup(namespace, KEYS).prefix_blocks == 0
    assert _names(client.retrieve(namespace, KEYS, places)) == {"MISS"}
    assert client.store(namespace, KEYS, source.blocks(np.arange(40), BLOCK)).all_ok
    assert all(region.blocks for dpu in dpus for region in dpu.regions)
    assert _names(client.store(namespace, KEYS[:3], source.blocks(range(3), BLOCK))) == {"EXISTS"}
    assert client.retrieve(namespace, KEYS, places).all_ok
    assert bytes(source.view) == bytes(target.view)
    client.delete(namespace, KEYS[7:8])
    found = client.lookup(namespace, KEYS)
    assert found.prefix_blocks == 7
    assert int(found.present.sum()) == 39


@pytest.mark.usefixtures("both_ways")
def test_memory_of_every_kind_is_read_and_written(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    client = make_client(make_dpu())
    namespace = client.namespace(record())
    pool = np.arange(8 * BLOCK, dtype=np.uint8)
    destination = bytearray(8 * BLOCK)
    with client.register(pool), client.register(destination):
        assert client.store(namespace, KEYS[:2], [pool[:BLOCK], pool[BLOCK : 3 * BLOCK]]).all_ok
        view = memoryview(destination)
        results = client.retrieve(namespace, KEYS[:2], [view[:BLOCK], view[BLOCK : 3 * BLOCK]], verify=True)
        assert results.all_ok
        assert results.length.tolist() == [BLOCK, 2 * BLOCK]
        assert bytes(view[: 3 * BLOCK]) == pool[: 3 * BLOCK].tobytes()
    with pytest.raises(UserError, match="not registered"):
        client.store(namespace, KEYS[2:3], [pool[:BLOCK]])


@pytest.mark.usefixtures("both_ways")
def test_scatter_lists_and_ranges(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    client = make_client(make_dpu())
    namespace = client.namespace(record())
    source, target = _filled(client, 4), client.allocate(8 * BLOCK)
    pieces = [source[i * 1000 : i * 1000 + 700] for i in range(5)]
    whole = b"".join(bytes(piece) for piece in pieces)
    assert client.store(namespace, KEYS[:2], [pieces, source[:BLOCK]], verify=True).all_ok
    view = target.view
    results = client.retrieve(namespace, KEYS[:1], [[view[:1], view[100:2000], view[4000:5599]]], verify=True)
    assert results.all_ok
    assert bytes(view[:1]) + bytes(view[100:2000]) + bytes(view[4000:5599]) == whole
    results = client.retrieve(namespace, KEYS[:2], target.spans([0, 100], [50, 60]), offset=[10, 4000], verify=True)
    assert results.all_ok
    assert bytes(view[:50]) == whole[10:60]
    assert bytes(view[100:160]) == bytes(source[4000:4060])
    beyond = client.retrieve(namespace, KEYS[:1], target.spans(0, 50), offset=3490)
    assert (beyond[0].status, beyond[0].length) == (Status.BAD_RANGE, 3500)


def test_scatter_lists_that_fill_many_capsules(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu(regions=2, credits=2)
    client = make_client(dpu)
    namespace = client.namespace(record())
    keys = [key(number) for number in range(300)]
    source, target = _filled(client, 300), client.allocate(300 * BLOCK)
    parts = [slice(0, 1), slice(1, 40)] + [slice(40 + n * 64, 104 + n * 64) for n in range(62)] + [slice(4008, BLOCK)]

    def scattered(memory: Any) -> list[list[memoryview]]:
        blocks = [memory[n * BLOCK : (n + 1) * BLOCK] for n in range(300)]
        return [[block[part] for part in (parts[:64] if n % 3 else parts[:1])] for n, block in enumerate(blocks)]

    assert client.store(namespace, keys, scattered(source)).all_ok
    assert client.retrieve(namespace, keys, scattered(target), verify=True).all_ok
    for got, wanted in zip(scattered(target), scattered(source)):
        assert [bytes(piece) for piece in got] == [bytes(piece) for piece in wanted]
    assert max(len(capsule.entries) for region in dpu.regions for capsule in region.seen) < 200
    too_many = client.store(namespace, KEYS[:1], [[source[n : n + 1] for n in range(65)]])
    assert _names(too_many) == {"BAD_REQUEST"}


def test_whole_blocks_of_unknown_length(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    client = make_client(make_dpu())
    namespace = client.namespace(record())
    source, target = _filled(client, 4), client.allocate(2 * SLOT_BYTES)
    client.store(namespace, KEYS[:1], source.spans(0, 5000))
    results = client.retrieve(namespace, KEYS[:1], target.spans(0, SLOT_BYTES), whole=True, verify=True)
    assert (results[0].status, results[0].length) == (Status.OK, 5000)
    assert bytes(target[:5000]) == bytes(source[:5000])
    small = client.retrieve(namespace, KEYS[:1], target.spans(0, SLOT_BYTES - 1), whole=True)
    assert _names(small) == {"BAD_RANGE"}


def test_nothing_lands_beyond_a_destination_of_no_length(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    source, target = _filled(client, 2), client.allocate(2 * BLOCK)
    client.store(namespace, KEYS[:2], source.blocks([0, 1], BLOCK))
    results = client.retrieve(namespace, KEYS[:2], target.spans([0, BLOCK], [0, BLOCK]))
    assert results.status.tolist() == [Status.BAD_RANGE, Status.OK]
    assert not any(target[:BLOCK])
    assert _names(client.store(namespace, KEYS[3:4], source.spans(0, 0))) == {"BAD_LENGTH"}
    assert _names(client.retrieve(namespace, KEYS[:1], target.spans(0, 8), offset=1 << 32)) == {"BAD_RANGE"}
    assert _names(client.retrieve(namespace, KEYS[:1], target.spans(0, 8), offset=-1)) == {"BAD_RANGE"}


def test_empty_batches_and_mismatched_arguments(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    client = make_client(make_dpu())
    namespace = client.namespace(record())
    memory = client.allocate(BLOCK)
    assert len(client.store(namespace, [], [])) == 0
    assert client.lookup(namespace, []).prefix_blocks == 0
    assert client.delete(namespace, []).all_ok
    assert client.prefetch(namespace, []).result().all_ok
    with pytest.raises(UserError, match="2 keys"):
        client.store(namespace, KEYS[:2], memory.spans(0, 8))
    with pytest.raises(UserError, match="16 bytes"):
        client.lookup(namespace, [b"short"])
    with pytest.raises(UserError, match="timeout"):
        client.lookup(namespace, KEYS, timeout_s=0)


@pytest.mark.parametrize("count", [1, 3])
def test_numbers_that_the_wire_cannot_carry_are_misuse(make_dpu: MakeDpu, make_client: MakeClient, count: int) -> None:
    client = make_client(make_dpu())
    namespace = client.namespace(record())
    keys, places = KEYS[:count], client.allocate(count * BLOCK).blocks(range(count), BLOCK)
    bad_offset: Any
    ttl_s: Any
    for ttl_s in (-1, 1 << 32, 1.5):
        with pytest.raises(UserError, match="whole number"):
            client.store(namespace, keys, places, ttl_s=ttl_s)
        with pytest.raises(UserError, match="whole number"):
            client.pin(namespace, keys, ttl_s=ttl_s)
    for seconds in (-1.0, 1e9):
        with pytest.raises(UserError, match="whole number"):
            client.lease(namespace, keys, duration_s=seconds)
    for bad_offset in ([0] * (count + 1), 1.5, [1 << 65] * count):
        with pytest.raises(UserError, match="offsets"):
            client.retrieve(namespace, keys, places, offset=bad_offset)
        with pytest.raises(UserError, match="offsets"):
            client.prefetch(namespace, keys, offset=bad_offset)
    assert _names(client.retrieve(namespace, keys, places, offset=1 << 65)) == {"BAD_RANGE"}
    assert _names(client.retrieve(namespace, keys, places, offset=np.int32(0))) == {"MISS"}


def test_batches_larger_than_capsule_and_credits(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu(regions=2, credits=2)
    client = make_client(dpu)
    namespace = client.namespace(record())
    keys = [key(number) for number in range(5000)]
    memory = client.allocate(BLOCK)
    assert client.store(namespace, keys, memory.spans(np.zeros(5000, int), 8)).all_ok
    assert client.lookup(namespace, keys).prefix_blocks == 5000
    for region in dpu.regions:
        assert region.outstanding_max <= 2
        assert max(len(capsule.entries) for capsule in region.seen) <= wire.MAX_BATCH


def test_the_dpu_is_given_less_time_than_the_caller(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    client.lookup(client.namespace(record()), KEYS, timeout_s=5)
    assert 1e6 < dpu.regions[0].seen[-1].deadline_us <= 4.5e6


def test_silence_is_answered_by_the_deadline_and_nothing_lands_later(
    make_dpu: MakeDpu, make_client: MakeClient
) -> None:
    dpu = make_dpu(regions=2)
    client = make_client(dpu)
    namespace = client.namespace(record())
    source, target = _filled(client, 40), client.allocate(40 * BLOCK)
    client.store(namespace, KEYS, source.blocks(np.arange(40), BLOCK))
    quiet, other = dpu.regions
    quiet.script = _silent
    results = client.retrieve(namespace, KEYS, target.blocks(np.arange(40), BLOCK), timeout_s=0.2)
    assert _names(results) == {"OK", "DEADLINE"}
    late = results.status == Status.DEADLINE
    assert {KEYS[index] for index in np.flatnonzero(late)} == set(quiet.blocks)
    before = bytes(target.view)
    quiet.script = None
    assert not any(quiet.release_held())  # the fabric refuses: the connection was destroyed
    assert bytes(target.view) == before
    assert not target.array().reshape(40, BLOCK)[late].any()
    assert client.lookup(namespace, sorted(other.blocks)).prefix_blocks == len(other.blocks)


def _until(condition: Any) -> None:
    """Wait for the agent's control thread, which nothing else tells of."""
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to pass")


def test_a_lost_region_costs_its_blocks_only_and_comes_back(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu(regions=2)
    client = make_client(dpu)
    namespace = client.namespace(record())
    memory = _filled(client, 40)
    client.store(namespace, KEYS, memory.blocks(np.arange(40), BLOCK))
    lost, _other = dpu.regions

    def drop_and_hold(region: ScriptedRegion, _capsule: wire.Capsule) -> None:
        raise Silence

    lost.script = drop_and_hold
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(client.lookup(namespace, KEYS)))
    thread.start()
    _until(lambda: lost.held)
    lost.drop()
    thread.join()
    assert {Status(int(status)) for status in results[0].status} == {Status.OK, Status.DISCONNECTED}
    lost.script = None
    lost.held.clear()
    _until(lambda: all(region.link.up for region in client.regions))
    assert client.lookup(namespace, KEYS).prefix_blocks == 40
    assert dpu.opened == 1
    assert lost.connections == 2


def test_an_ended_session_is_opened_again_with_its_namespaces_and_memory(
    make_dpu: MakeDpu, make_client: MakeClient
) -> None:
    dpu = make_dpu(regions=2)
    client = make_client(dpu)
    namespaces = [client.namespace(record(model_id=f"m{number}")) for number in range(3)]
    memory = _filled(client, 2)
    dpu.forget_sessions()
    _until(lambda: dpu.opened == 2 and all(region.link.up for region in client.regions))
    for number, namespace in enumerate(namespaces):
        assert client.store(namespace, [key(100 + number)], memory.spans(0, BLOCK), verify=True).all_ok
    assert {int(c.entries["namespace"][0]) for r in dpu.regions for c in r.seen if c.op is Op.STORE} == {1, 2, 3}


def test_a_dpu_that_restarts_is_found_again(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu, other = make_dpu(), make_dpu()
    client = make_client(dpu, other)
    namespace = client.namespace(record())
    memory = _filled(client, 40)
    client.store(namespace, KEYS, memory.blocks(np.arange(40), BLOCK))
    dpu.stop()
    _until(lambda: sum(region.link.up for region in client.regions) == 1)
    found = client.lookup(namespace, KEYS)
    assert {Status(int(status)) for status in found.status} == {Status.OK, Status.DISCONNECTED}
    results = client.retrieve(namespace, KEYS, memory.blocks(np.arange(40), BLOCK))
    assert _names(results) == {"OK", "DISCONNECTED"}
    dpu.start()
    _until(lambda: all(region.link.up for region in client.regions))
    assert _names(client.store(namespace, KEYS, memory.blocks(np.arange(40), BLOCK))) == {"OK", "EXISTS"}


@pytest.mark.parametrize("nonsense", ["entry count", "request id", "operation"])
def test_an_answer_that_makes_no_sense_costs_the_connection(
    make_dpu: MakeDpu, make_client: MakeClient, nonsense: str
) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    region = dpu.regions[0]

    def script(scripted: ScriptedRegion, capsule: wire.Capsule) -> Any:
        peer = next(iter(scripted._peers.values()))
        good = np.zeros(len(capsule.entries), wire.LOOKUP_RESULT)
        if nonsense == "entry count":
            return good[:-1]
        if nonsense == "request id":
            peer.respond(capsule._replace(request_id=capsule.request_id + 77), good)
        else:
            peer.respond(capsule._replace(op=Op.STORE), np.zeros(len(good), wire.RESULT))
        raise Silence

    region.script = script
    found = client.lookup(namespace, KEYS)
    assert not found.present.any()
    assert {Status(int(s)) for s in found.status} <= {Status.DISCONNECTED, Status.BAD_REQUEST}
    region.script = None
    _until(lambda: client.regions[0].link.up)
    assert _names(client.delete(namespace, KEYS)) == {"MISS"}


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("regions", [1, 2])
def test_destinations_in_no_order_are_asked_for_in_order(
    make_dpu: MakeDpu, make_client: MakeClient, regions: int
) -> None:
    dpu = make_dpu(regions=regions)
    client = make_client(dpu, verify=True)
    namespace = client.namespace(record())
    source, target = _filled(client, 40), client.allocate(40 * BLOCK)
    assert client.store(namespace, KEYS, source.blocks(range(40), BLOCK)).all_ok
    pages = np.random.default_rng(2).permutation(40)
    client.delete(namespace, KEYS[5:6])
    results = client.retrieve(namespace, KEYS, target.blocks(pages, BLOCK))
    assert np.flatnonzero(results.status == Status.MISS).tolist() == [5]
    for block, page in enumerate(pages.tolist()):
        if block != 5:
            assert target[page * BLOCK : (page + 1) * BLOCK] == source[block * BLOCK : (block + 1) * BLOCK]
    for region in dpu.regions:
        for capsule in region.seen:
            if capsule.op is Op.RETRIEVE:
                addresses = capsule.entries["address"].tolist()
                assert addresses == sorted(addresses)


@pytest.mark.usefixtures("both_ways")
def test_corrupt_bytes_are_noticed_when_asked(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    memory = _filled(client, 2)
    client.store(namespace, KEYS[:2], memory.blocks([0, 1], BLOCK))

    def lie(region: ScriptedRegion, capsule: wire.Capsule) -> Any:
        answers = region.answer(next(iter(region._peers.values())), capsule)
        answers["checksum"][0] ^= 1
        return answers

    dpu.regions[0].script = lie
    results = client.retrieve(namespace, KEYS[:2], memory.blocks([0, 1], BLOCK), verify=True)
    assert results.status.tolist() == [Status.CORRUPT, Status.OK]


def test_memory_is_out_of_reach_once_closed(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    source, target = _filled(client, 1), bytearray(BLOCK)
    client.store(namespace, KEYS[:1], source.spans(0, BLOCK))
    registered = client.register(target)
    dpu.regions[0].script = _silent
    hint = client.prefetch(namespace, KEYS[:1], registered.spans(0, BLOCK), timeout_s=30)
    _until(lambda: dpu.regions[0].held)
    registered.close()
    dpu.regions[0].script = lambda region, capsule: region.answer(
        next(iter(region._peers.values())), capsule._replace(op=Op.RETRIEVE)
    )
    dpu.regions[0].release_held()
    assert not any(target)
    assert not hint.result().all_ok
    with pytest.raises(UserError, match="closed"):
        client.retrieve(namespace, KEYS[:1], registered.spans(0, BLOCK))


def test_a_hint_goes_on_while_others_work_and_can_be_cancelled(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    region = dpu.regions[0]
    waiting: list[wire.Capsule] = []

    def hold_hints(scripted: ScriptedRegion, capsule: wire.Capsule) -> Any:
        peer = next(iter(scripted._peers.values()))
        if capsule.op is Op.PREFETCH:
            waiting.append(capsule)
            raise Silence
        if capsule.op is Op.CANCEL:
            assert capsule.entries["request_id"].tolist() == [waiting[0].request_id]
            answers = np.zeros(len(waiting[0].entries), wire.RESULT)
            answers["status"] = Status.CANCELLED
            peer.respond(waiting[0], answers)
        return None

    region.script = hold_hints
    hint = client.prefetch(namespace, KEYS[:5], timeout_s=60)
    for _ in range(20):
        assert client.lookup(namespace, KEYS).prefix_blocks == 0
    assert not hint.done
    assert _names(hint.cancel()) == {"CANCELLED"}
    assert hint.done


@pytest.mark.parametrize("credits_count", [2, 8])
def test_hints_and_stores_leave_room_for_loads_and_for_being_cancelled(
    make_dpu: MakeDpu, make_client: MakeClient, credits_count: int
) -> None:
    """More of them are outstanding than a connection has credits, and the DPU takes its time."""
    dpu = make_dpu(credits=credits_count)
    client = make_client(dpu)
    namespace = client.namespace(record())
    source = _filled(client, 1)
    region = dpu.regions[0]
    region.blocks[KEYS[0]] = bytes(BLOCK)

    def hold(scripted: ScriptedRegion, capsule: wire.Capsule) -> Any:
        if capsule.op in (Op.PREFETCH, Op.STORE):
            raise Silence
        if capsule.op is Op.CANCEL:
            peer = next(iter(scripted._peers.values()))
            for _, held in scripted.held:
                answers = np.zeros(len(held.entries), wire.RESULT)
                answers["status"] = Status.CANCELLED
                peer.respond(held, answers)
            scripted.held.clear()
        return None

    region.script = hold
    hints = [client.prefetch(namespace, KEYS[:5], timeout_s=60) for _ in range(credits_count)]
    for _ in range(credits_count):
        call = client.calls.start_store(namespace, KEYS[:1], source.blocks([0], BLOCK), False, 0, None, 60)
        client.core.progress.watch(call.operation)
    assert client.lookup(namespace, KEYS[:1], timeout_s=2).prefix_blocks == 1
    assert client.retrieve(namespace, KEYS[:1], source.blocks([0], BLOCK), timeout_s=2).all_ok
    assert region.outstanding_max <= credits_count
    assert _names(hints[0].cancel()) == {"CANCELLED"}


def test_a_hint_that_nobody_waits_for_ends_at_its_deadline(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    dpu.regions[0].script = _silent
    hint = client.prefetch(namespace, KEYS[:1], timeout_s=0.1)
    _until(lambda: hint.done)
    assert _names(hint.result()) == {"DEADLINE"}


def test_many_threads_share_one_client(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    client = make_client(make_dpu(regions=2, credits=4))
    namespace = client.namespace(record())
    failures: list[str] = []

    def work(number: int) -> None:
        keys = [key(1000 * number + i) for i in range(20)]
        memory, target = _filled(client, 20, seed=number), client.allocate(20 * BLOCK)
        for _ in range(5):
            client.store(namespace, keys, memory.blocks(np.arange(20), BLOCK))
            results = client.retrieve(namespace, keys, target.blocks(np.arange(20), BLOCK), verify=True)
            if not results.all_ok or bytes(target.view) != bytes(memory.view):
                failures.append(f"{number}: {results}")
            client.delete(namespace, keys)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    hint = client.prefetch(namespace, [key(1)], timeout_s=30)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert hint.done


def test_small_and_large_blocks_use_the_regions_that_fit(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu(regions=4, slot_bytes=(8192, 65536))
    client = make_client(dpu)
    memory = client.allocate(65536)

    def used(namespace: Namespace) -> set[int]:
        for region in dpu.regions:
            region.blocks.clear()
        client.store(namespace, KEYS, memory.spans(np.zeros(40, int), 100))
        return {region.slot_bytes for region in dpu.regions if region.blocks}

    assert used(client.namespace(record(), block_bytes=8192)) == {8192}
    assert used(client.namespace(record(), block_bytes=8193)) == {65536}
    assert used(client.namespace(record())) == {65536}


def test_who_may_not_come_in_is_told_at_once(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu()
    dpu.refusal = PermissionDeniedError("tenant 'acme' is not served here")
    with pytest.raises(PermissionDeniedError, match="not served"):
        make_client(dpu)
    dpu.refusal = None
    client = make_client(dpu)
    with pytest.raises(UserError, match="tenant"):
        client.namespace(record(tenant="other"))


def test_no_dpu_answers(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    absent = make_dpu(start=False)
    with pytest.raises(UnavailableError, match="no DPU answers"):
        make_client(absent)
    dpu = make_dpu()
    client = make_client(dpu, absent)
    assert client.lookup(client.namespace(record()), KEYS).prefix_blocks == 0
    absent.start()
    _until(lambda: len(client.regions) == 2 and all(region.link.up for region in client.regions))


def test_a_closed_client_says_so_and_leaves_nothing(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu(regions=2)
    first = make_client(dpu)
    first.close()
    _until(lambda: not any(region._peers for region in dpu.regions))
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    client = make_client(dpu)
    namespace = client.namespace(record())
    memory = client.allocate(BLOCK)
    client.store(namespace, KEYS[:2], memory.spans([0, 0], 8))
    client.prefetch(namespace, KEYS[:2]).result()
    client.close()
    client.close()
    with pytest.raises(UserError, match="closed"):
        client.lookup(namespace, KEYS)
    _until(lambda: not any(region._peers for region in dpu.regions))
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_statistics_by_region(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    client = make_client(make_dpu(regions=2))
    stats = client.stat()
    assert stats == {f"dpu0/dpu0-r{i}": {wire.StatId.SLOTS_USED: 0} for i in range(2)}


def test_closing_ends_calls_that_are_under_way(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    dpu.regions[0].script = _silent
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(client.lookup(namespace, KEYS))) for _ in range(3)]
    for thread in threads:
        thread.start()
    _until(lambda: len(dpu.regions[0].held) == 3)
    client.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(answers) == 3
    assert all(set(found.status.tolist()) == {Status.DISCONNECTED} for found in answers)


def test_an_interrupted_call_leaves_memory_alone(
    make_dpu: MakeDpu, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    source, target = _filled(client, 1), client.allocate(BLOCK)
    client.store(namespace, KEYS[:1], source.spans(0, BLOCK))
    region = dpu.regions[0]
    region.script = _silent

    def interrupt(_timeout_s: float) -> None:
        _until(lambda: region.held)
        raise KeyboardInterrupt

    monkeypatch.setattr(client.core.progress, "_sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.retrieve(namespace, KEYS[:1], target.spans(0, BLOCK))
    monkeypatch.undo()
    region.script = None
    assert region.release_held() == [False]
    assert not any(target.view)
    _until(lambda: client.regions[0].link.up)
    assert client.retrieve(namespace, KEYS[:1], target.spans(0, BLOCK), verify=True).all_ok
