"""The native way of plain batches against the numpy way: the same capsules, byte for byte, and the same answers."""

from __future__ import annotations

import random
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import wire
from common.placement import PlacedRegion, PodMap
from common.status import Status
from common.wire import EntryFlags, Flags, Op
from host_agent import batch, dispatch, native_batches, plan
from host_agent.buffers import Buffer
from host_agent.memory import RegisteredMemory, Spans
from host_agent.namespace import Namespace
from host_agent.operation import LAYOUT, Operation, Request
from tests.unit.host_agent.scripted_dpu import key, record

pytestmark = pytest.mark.skipif(native_batches.MODULE is None, reason="the native module is not built")
BASE = 1 << 30
DIGEST = b"d" * 32
NAMESPACE = Namespace(record(), DIGEST, None)
Sent = list[tuple[str, Op, int, int, int, int, bytes]]


class Regions:
    """A slot class whose links note what is submitted to them. Region i is down where `up[i]` is not set."""

    def __init__(self, weights: list[float], seed: int, up: list[bool] | None = None) -> None:
        rng = random.Random(seed)
        self.sent: Sent = []
        self.slot_bytes = 65536
        self.pod_map = PodMap(1, tuple(PlacedRegion(rng.randbytes(16), weight) for weight in weights))
        self.regions = [
            SimpleNamespace(link=self._link(f"r{i}", rng.randrange(1, 1 << 32), up is None or up[i]))
            for i in range(len(weights))
        ]

    def _link(self, name: str, rkey: int, up: bool) -> Any:
        domain = SimpleNamespace(region=lambda _memory: SimpleNamespace(rkey=rkey))
        link: Any = SimpleNamespace(name=name)
        link.grants = SimpleNamespace(domain=domain, handles={DIGEST: rkey & 0xFFFF | 1}) if up else None
        link.submit = lambda requests, grants: self.sent.extend(
            (name, r.op, int(r.flags), r.first, r.count, r.sge_count, bytes(r.body)) for r in requests
        )
        return link


CORE: Any = SimpleNamespace(progress=None)


def _operation(op: Op, count: int) -> Operation:
    answer = np.zeros(1, LAYOUT[op])
    answer["status"] = Status.DISCONNECTED
    return Operation(op, bytearray(answer.tobytes() * count), 1)


def _spans(offsets: list[int], length: int) -> Spans:
    memory = RegisteredMemory(Buffer(BASE, 1 << 40, None), lambda _memory: None, None)
    return memory.spans(np.array(offsets, np.int64), length)


def _both(regions: Any, op: Op, keys: Any, spans: Spans | None, most: int, **numbers: int) -> tuple[Sent, Sent, bytes]:
    """What is submitted natively, what by numpy, and which blocks the answers of both went to."""
    pairs = batch.key_pairs(keys)
    operations = [_operation(op, len(pairs)) for _ in range(2)]
    if spans is None:
        planned = plan.plan_keys(regions, DIGEST, keys, numbers.get("argument", 0))
        entries = batch.key_entries(pairs, numbers.get("argument", 0))
    else:
        planned = plan.plan_blocks(regions, DIGEST, keys, spans, **numbers, must_be_apart=op is Op.RETRIEVE)
        offset, ttl_s, flags = (numbers.get(name, 0) for name in ("offset", "ttl_s", "flags"))
        entries = batch.block_entries(pairs, spans, spans.block_bytes, offset, ttl_s, flags)
    assert planned is not None
    dispatch.submit_plan(CORE, operations[0], regions, planned, Flags.UNTIL_FLASH, capsule_blocks=most)
    native, regions.sent = regions.sent, []
    dispatch.submit(
        CORE, operations[1], NAMESPACE, regions, pairs, entries, None, spans, Flags.UNTIL_FLASH, capsule_blocks=most
    )
    numpy, regions.sent = regions.sent, []
    for operation in operations:
        for request in operation.pending:
            answers = np.zeros(request.count, LAYOUT[op])
            answers["length"] = np.arange(request.first, request.first + request.count)
            assert operation.answer(request, Status.OK, 0, memoryview(answers.tobytes()))
    assert operations[0].raw == operations[1].raw
    return native, numpy, bytes(operations[0].raw)


weights = st.lists(
    st.one_of(st.just(1.0), st.just(0.0), st.floats(1e-3, 1e6), st.floats(1e-300, 1e300)), min_size=1, max_size=9
).filter(lambda values: any(values))


@settings(max_examples=150, deadline=None)
@given(weights, st.integers(0, 1 << 32), st.integers(1, 700), st.integers(1, 512), st.sampled_from(list(Op)))
def test_keys_make_the_same_capsules(weights: list[float], seed: int, count: int, most: int, op: Op) -> None:
    if wire.REQUEST_LAYOUT[op] is not wire.KEY_ENTRY:
        op = Op.LOOKUP
    rng = random.Random(seed)
    keys = [rng.randbytes(16) for _ in range(count)]
    regions = Regions(weights, seed, [rng.random() < 0.8 for _ in weights])
    native, numpy, _answers = _both(regions, op, rng.choice([keys, b"".join(keys)]), None, most, argument=seed % 1000)
    assert native == numpy


@settings(max_examples=150, deadline=None)
@given(
    weights,
    st.integers(0, 1 << 32),
    st.integers(1, 600),
    st.integers(1, 512),
    st.sampled_from([1, 100, 4096, 65536]),
    st.sampled_from([Op.STORE, Op.RETRIEVE]),
)
def test_blocks_make_the_same_capsules(
    weights: list[float], seed: int, count: int, most: int, length: int, op: Op
) -> None:
    rng = random.Random(seed)
    offsets = rng.sample(range(3 * count), count) if rng.random() < 0.7 else list(range(count))
    spans = _spans([offset * length + seed % 7 for offset in offsets], length)
    regions = Regions(weights, seed)
    numbers = {"offset": seed % 5000, "flags": int(EntryFlags.WANT_CHECKSUM)}
    if op is Op.STORE:
        numbers = {"ttl_s": seed % 77, "flags": int(EntryFlags.HAS_CHECKSUM)}
    native, numpy, _answers = _both(regions, op, [rng.randbytes(16) for _ in range(count)], spans, most, **numbers)
    assert native == numpy


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=20),
    st.integers(0, 12),
    st.integers(0, 32),
)
def test_plain_is_what_nothing_is_refused_of(places: list[tuple[int, int]], length: int, shift: int) -> None:
    """Destinations that overlap, or have no length, are left to the general way, and only those."""
    spans = _spans([(low << shift // 8 * 8) + high for low, high in places], length)
    regions: Any = Regions([1.0, 2.0], 1)
    planned = plan.plan_blocks(regions, DIGEST, [key(n) for n in range(len(places))], spans, must_be_apart=True)
    refused = batch.refusals(spans, 0, destination=True) != batch.NOT_FAILED
    assert (planned is None) is bool(refused.any())


def test_sources_may_overlap() -> None:
    regions: Any = Regions([1.0, 2.0], 1)
    native, numpy, _answers = _both(regions, Op.STORE, [key(n) for n in range(9)], _spans([0] * 9, 100), 4)
    assert native == numpy
    assert native


@pytest.mark.parametrize(
    "keys",
    [
        [],
        b"",
        [b"x" * 15, b"x" * 17],
        [b"x" * 16, "x" * 16],
        [b"x" * 16, bytearray(16)],
        b"x" * 17,
        (b"x" * 16,),
        np.zeros((2, 16), np.uint8),
        None,
    ],
)
def test_other_keys_are_left_to_the_general_way(keys: Any) -> None:
    regions: Any = Regions([1.0, 1.0], 1)
    assert plan.plan_keys(regions, DIGEST, keys, 0) is None
    assert plan.plan_blocks(regions, DIGEST, keys, _spans([0, 100], 100)) is None


def test_memory_that_is_not_plain_is_left_to_the_general_way() -> None:
    regions: Any = Regions([1.0, 1.0], 1)
    memory = RegisteredMemory(Buffer(BASE, 1 << 40, None), lambda _memory: None, None)
    keys = [key(1), key(2)]
    address, size = np.array([BASE, BASE + 100], np.uint64), np.array([100, 100], np.uint64)
    assert plan.plan_blocks(regions, DIGEST, keys, Spans((memory,), None, address, size, None)) is not None
    for spans in (
        Spans((memory,), None, address, size, np.array([0, 1, 2])),
        Spans((memory, memory), np.array([0, 1]), address, size, None),
        Spans((memory,), None, address, np.array([100, 99], np.uint64), None),
        Spans((memory,), None, address, np.array([1 << 32, 1 << 32], np.uint64), None),
        Spans((memory,), None, address[:1], size[:1], None),
    ):
        assert plan.plan_blocks(regions, DIGEST, keys, spans) is None


def test_a_table_of_other_regions_is_refused() -> None:
    module = native_batches.MODULE
    table = PodMap(1, (PlacedRegion(b"a" * 16, 1.0), PlacedRegion(b"b" * 16, 2.0))).table
    assert module.keys([key(1)], table, [1, 1], 0) is not None
    beyond = bytearray(table)
    struct.pack_into("<Q", beyond, 24, 2)
    for bad, handles in (
        (table, [1]),
        (table[:-1], [1, 1]),
        (b"", [1, 1]),
        (bytes(16), [1, 1]),
        (bytes(beyond), [1, 1]),
    ):
        with pytest.raises(ValueError, match="table"):
            module.keys([key(1)], bad, handles, 0)
    no_handles: list[Any] = [[1, -1], [1, 1 << 32], [1, "x"], (1, 1)]
    for handles in no_handles:
        with pytest.raises((ValueError, OverflowError, TypeError)):
            module.keys([key(1)], table, handles, 0)


def _response(op: Op, count: int, **fields: Any) -> bytes:
    return wire.encode(op, 7, np.zeros(count, wire.RESPONSE_LAYOUT[op]), flags=Flags.RESPONSE, **fields)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(Op)), st.integers(0, 5), st.data())
def test_what_the_native_reader_opens_is_what_the_wire_decodes(op: Op, count: int, data: st.DataObject) -> None:
    capsule = bytearray(_response(op, count, status=Status.BUSY, aux=9))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(capsule) - 1))
        capsule[at] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.integers(0, 4)) == 0:
        del capsule[data.draw(st.integers(0, len(capsule))) :]
    opened = native_batches.MODULE.response(memoryview(capsule), native_batches.KNOWN)
    try:
        decoded = wire.decode_response(bytes(capsule))
    except wire.WireError:
        assert opened is None
        return
    whole = (decoded.request_id, decoded.op, decoded.status, decoded.aux, decoded.entries.nbytes)
    assert opened == whole or (opened is None and decoded.flags != Flags.RESPONSE)


def test_answers_that_do_not_fit_are_refused() -> None:
    scatter = native_batches.MODULE.scatter
    answers = bytearray(5 * 8)
    order = struct.pack("<3q", 4, 0, 2)
    scatter(answers, 8, order, 1, bytes([1]) * 16)
    assert answers == bytes([1] * 8 + [0] * 8 + [1] * 8 + [0] * 16)
    bad: list[Any] = [
        (8, order, 2, bytes(16)),
        (8, order, 0, bytes(7)),
        (8, order, -1, bytes(8)),
        (8, order, 4, bytes(8)),
        (0, order, 0, bytes(8)),
        (8, struct.pack("<q", 5), 0, bytes(8)),
        (8, struct.pack("<q", -1), 0, bytes(8)),
        (1 << 62, order, 0, bytes(8)),
    ]
    for arguments in bad:
        with pytest.raises(ValueError, match="fit"):
            scatter(answers, *arguments)


def test_answers_go_the_same_way_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (Op.LOOKUP, Op.RETRIEVE, Op.LEASE):
        raws = []
        for module in (native_batches.MODULE, None):
            monkeypatch.setattr(native_batches, "MODULE", module)
            operation = _operation(op, 100)
            operation.reorder(np.arange(99, -1, -1))
            request = Request(operation, b"", 40, 30)
            answers = np.zeros(40, LAYOUT[op])
            answers["length"] = np.arange(40)
            assert operation.answer(request, Status.OK, 0, memoryview(answers.tobytes()))
            raws.append(bytes(operation.raw))
            monkeypatch.undo()
        assert raws[0] == raws[1]


def test_without_it_every_batch_takes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_batches, "MODULE", None)
    regions: Any = Regions([1.0, 1.0], 1)
    assert plan.plan_keys(regions, DIGEST, [key(1), key(2)], 0) is None
    assert plan.plan_blocks(regions, DIGEST, [key(1), key(2)], _spans([0, 100], 100)) is None
