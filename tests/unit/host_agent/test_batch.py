"""From keys and memory to capsules: what is sent where, what is refused unsent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import wire
from common.errors import UserError
from common.status import Status
from common.wire import Op
from host_agent import batch
from host_agent.buffers import Buffer
from host_agent.memory import RegisteredMemory, Spans
from host_agent.operation import Operation
from tests.unit.host_agent.scripted_dpu import key

BASE = 1 << 20


def _memory(length_bytes: int = 1 << 20) -> RegisteredMemory:
    return RegisteredMemory(Buffer(BASE, length_bytes, None), lambda _memory: None, None)


def _domain(rkey: int = 77) -> Any:
    return SimpleNamespace(region=lambda _memory: SimpleNamespace(rkey=rkey))


def _operation(op: Op, count: int) -> Operation:
    return Operation(op, bytearray(count * wire.RESPONSE_LAYOUT[op].itemsize), 1)


def _scattered(pieces: list[list[tuple[int, int]]]) -> Spans:
    """Spans of blocks given as lists of (offset, length)."""
    flat = [piece for block in pieces for piece in block]
    starts = np.cumsum([0, *(len(block) for block in pieces)])
    addresses = np.array([BASE + offset for offset, _ in flat], np.uint64)
    return Spans((_memory(),), None, addresses, np.array([n for _, n in flat], np.uint64), starts)


def test_keys_in_every_form() -> None:
    assert len(batch.key_pairs(np.zeros((0, 16), np.uint8))) == 0
    keys = [key(n) for n in range(5)]
    expected = batch.key_pairs(keys).tolist()
    joined = b"".join(keys)
    as_bytes = np.frombuffer(joined, np.uint8)
    for form in (joined, as_bytes, as_bytes.reshape(5, 16), np.frombuffer(joined, "<u8").reshape(5, 2), tuple(keys)):
        assert batch.key_pairs(form).tolist() == expected
    assert batch.key_pairs([]).shape == (0, 2)
    bad: list[Any] = [[b"short"], [b"x" * 15, b"x" * 17], b"x" * 17, np.zeros(17, np.uint8), np.zeros((2, 8), np.uint8)]
    for form in bad:
        with pytest.raises(UserError, match="16"):
            batch.key_pairs(form)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([[(0, 10)], [(10, 10)], [(20, 5)]], [255, 255, 255]),
        ([[(0, 10)], [(9, 10)], [(19, 5)]], [255, Status.OVERLAP, 255]),
        ([[(50, 10)], [(0, 51)], [(0, 50)]], [255, Status.OVERLAP, 255]),
        ([[(0, 100)], [(10, 5)], [(20, 5)]], [255, Status.OVERLAP, Status.OVERLAP]),
        ([[(0, 10)], [(0, 10)], [(0, 10)]], [255, Status.OVERLAP, Status.OVERLAP]),
        ([[(0, 4), (8, 4)], [(4, 4), (12, 4)]], [255, 255]),
        ([[(0, 4), (8, 4)], [(4, 4), (9, 1)]], [255, Status.OVERLAP]),
        ([[(0, 4), (2, 4)], [(8, 4)]], [Status.OVERLAP, 255]),
        ([[(0, 0)], [(0, 4)]], [Status.BAD_RANGE, 255]),
        ([[(n, 1) for n in range(65)]], [Status.BAD_REQUEST]),
        ([[]], [Status.BAD_RANGE]),
    ],
)
def test_destinations_that_are_refused(pieces: list[list[tuple[int, int]]], expected: list[int]) -> None:
    assert batch.refusals(_scattered(pieces), 0, destination=True).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=25))
def test_what_is_not_refused_never_overlaps(places: list[tuple[int, int]]) -> None:
    statuses = batch.refusals(_scattered([[place] for place in places]), 0, destination=True)
    taken: set[int] = set()
    for (offset, length), status in zip(places, statuses.tolist()):
        touched = set(range(offset, offset + length))
        assert (status == Status.OVERLAP) is bool(touched & taken)
        if status != Status.OVERLAP:
            taken |= touched


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=64), min_size=1, max_size=60),
    st.randoms(use_true_random=False),
)
def test_scatter_lists_survive_the_cutting_into_capsules(sizes: list[list[int]], rng: Any) -> None:
    sizes = sizes * 12
    offsets = iter(range(0, 1 << 30, 10))
    pieces = [[(next(offsets), size) for size in block] for block in sizes]
    spans = _scattered(pieces)
    pairs = batch.key_pairs([key(n) for n in range(len(sizes))])
    blocks = np.array(rng.sample(range(len(sizes)), rng.randint(1, len(sizes))), np.intp)
    operation = _operation(Op.RETRIEVE, len(blocks))
    entries = batch.block_entries(pairs, spans, spans.block_bytes, 0, 0, 0)[blocks]
    made = batch.requests(operation, entries, 0, blocks, 3, spans=spans, domain=_domain())
    at = 0
    for request in made:
        assert request.first == at
        place = memoryview(bytearray(wire.MAX_CAPSULE_BYTES))
        size = wire.write_request(
            place, request.op, 1, request.body, request.count, sge_count=request.sge_count, flags=request.flags
        )
        capsule = wire.decode_request(place[:size])
        assert len(capsule.entries) == request.count
        for entry in capsule.entries:
            wanted = [(BASE + offset, size, 77) for offset, size in pieces[int(blocks[at])]]
            first, count = int(entry["address"]), int(entry["sge_count"])
            found = (
                [(first, int(entry["length"]), int(entry["rkey"]))]
                if count == 1
                else [tuple(sge.tolist()) for sge in capsule.sges[first : first + count]]
            )
            assert found == wanted
            assert (int(entry["namespace"]), int(entry["length"])) == (3, sum(sizes[int(blocks[at])]))
            at += 1
    assert at == len(blocks)
    assert operation.pending == set(made)


def test_answers_are_collected_in_the_callers_order() -> None:
    operation = _operation(Op.LOOKUP, 5)
    operation.answers["status"] = Status.DISCONNECTED
    operation.reorder(np.array([4, 0, 2]))
    entries = batch.key_entries(batch.key_pairs([key(n) for n in range(3)]))
    made = batch.requests(operation, entries, 0, None, 1)
    answers = np.zeros(3, wire.LOOKUP_RESULT)
    answers["length"] = [40, 1, 20]
    assert operation.answer(made[0], Status.OK, 0, memoryview(answers.tobytes()))
    operation.settle(made[0])
    assert operation.done
    assert operation.answers["length"].tolist() == [1, 0, 20, 0, 40]
    assert operation.answers["status"].tolist() == [0, Status.DISCONNECTED, 0, Status.DISCONNECTED, 0]


def test_memory_that_was_closed_is_refused() -> None:
    spans = _memory().spans(0, 8)
    closed: Any = SimpleNamespace(region=lambda _memory: None)
    entries = batch.block_entries(batch.key_pairs([key(1)]), spans, spans.block_bytes, 0, 0, 0)
    with pytest.raises(UserError, match="closed"):
        batch.requests(_operation(Op.STORE, 1), entries, 0, None, 1, spans=spans, domain=closed)
