"""What can be registered and how places in it are named; what cannot is refused with a sentence."""

from __future__ import annotations

import array
import mmap
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from host_agent import native_batches
from host_agent.buffers import Buffer, describe, view_of
from host_agent.memory import MemoryTable, RegisteredMemory, registered_buffer


def _address(view: Any) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _register(table: MemoryTable, memory: Any) -> RegisteredMemory:
    registered = RegisteredMemory(registered_buffer(memory), table.remove, None)
    table.add(registered)
    return registered


class _Tensor:
    """As much of a torch tensor as is asked of one."""

    def __init__(self, data: np.ndarray[Any, Any], device: str = "cpu", contiguous: bool = True) -> None:
        self.data, self.device, self._contiguous = data, device, contiguous

    def data_ptr(self) -> int:
        return self.data.ctypes.data

    def element_size(self) -> int:
        return self.data.itemsize

    def numel(self) -> int:
        return self.data.size

    def is_contiguous(self) -> bool:
        return self._contiguous


class _DlpackOnly:
    def __init__(self, data: np.ndarray[Any, Any], device: int | None = None) -> None:
        self._data, self._device = data, device

    def __dlpack__(self) -> Any:
        return self._data.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self._device is None else (self._device, 0)


class _ArrayInterface:
    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.__array_interface__ = data.__array_interface__
        self._data = data


def test_every_kind_of_memory_is_described() -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    with mmap.mmap(-1, 4096) as mapping:
        for memory in (bytearray(100), array.array("d", range(10)), memoryview(bytearray(64))[8:24], mapping):
            buffer = describe(memory)
            assert (buffer.address, buffer.length_bytes) == (_address(memory), memoryview(memory).nbytes)
            del buffer
    for thing in (numbers, _Tensor(numbers), _DlpackOnly(numbers), _ArrayInterface(numbers)):
        buffer = describe(thing)
        assert (buffer.address, buffer.length_bytes) == (numbers.ctypes.data, 96)
        view_of(buffer)[:4] = np.float32(7).tobytes()
        assert numbers[0, 0] == 7
        numbers[0, 0] = 0
    part = describe(_DlpackOnly(numbers[1:3]))
    assert (part.address, part.length_bytes) == (numbers.ctypes.data + 24, 48)


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (b"bytes", "read-only"),
        (memoryview(b"bytes"), "read-only"),
        (np.arange(10)[::2], "contiguous"),
        (np.arange(12).reshape(3, 4).T, "contiguous"),
        (memoryview(bytearray(10))[::2], "contiguous"),
        (np.array([object()]), "objects"),
        (_Tensor(np.arange(4), device="cuda"), "cuda"),
        (_Tensor(np.arange(4), contiguous=False), "contiguous"),
        (_DlpackOnly(np.arange(4), device=2), "device 2"),
        (_DlpackOnly(np.arange(10)[::2]), "contiguous"),
        ("text", "not memory"),
        (17, "not memory"),
    ],
)
def test_what_cannot_be_used_is_refused(memory: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        describe(memory)


def test_read_only_arrays_are_refused() -> None:
    frozen = np.arange(4)
    frozen.flags.writeable = False
    with pytest.raises(UserError, match="read-only"):
        describe(frozen)
    with pytest.raises(UserError, match="zero length"):
        registered_buffer(bytearray())


def test_slices_are_found_in_the_pool_they_belong_to() -> None:
    table = MemoryTable()
    pools = [bytearray(1000) for _ in range(5)]
    registered = [_register(table, pool) for pool in pools]
    inner = _register(table, memoryview(pools[2])[100:200])
    for pool, memory in zip(pools, registered):
        spans = table.resolve([memoryview(pool)[10:20], memoryview(pool)[500:1000]])
        assert spans.memories == (memory,)
        assert (spans.addresses - np.uint64(memory.address)).tolist() == [10, 500]
        assert spans.lengths.tolist() == [10, 500]
    assert table.resolve([memoryview(pools[2])[150:160]]).memories == (inner,)
    assert table.resolve([memoryview(pools[2])[150:250]]).memories == (registered[2],)
    mixed = table.resolve([registered[0], [memoryview(pools[1])[:5], memoryview(pools[3])[5:9]], []])
    assert mixed.starts is not None
    assert mixed.starts.tolist() == [0, 1, 3, 3]
    assert mixed.block_bytes.tolist() == [1000, 9, 0]
    assert [bytes(piece) for piece in mixed.pieces(1)] == [bytes(5), bytes(4)]
    with pytest.raises(UserError, match="not registered"):
        table.resolve([bytearray(10)])
    registered[0].close()
    with pytest.raises(UserError, match="not registered"):
        table.resolve([memoryview(pools[0])[:10]])
    with pytest.raises(UserError, match="closed"):
        table.resolve([registered[0]])


def test_pieces_must_lie_inside() -> None:
    memory = _register(MemoryTable(), bytearray(1000))
    assert memory.blocks([0, 9], 100).addresses.tolist() == [memory.address, memory.address + 900]
    assert len(memory.spans([1, 2, 3], 7)) == 3
    for offsets, lengths in (([0, 901], 100), ([-1], 1), ([0], -1), ([1 << 62], 1 << 62), ([0], 1001), ([1001], 0)):
        with pytest.raises(UserError, match="outside"):
            memory.spans(offsets, lengths)
    with pytest.raises(UserError, match="whole numbers"):
        memory.spans([0.5], 1)


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, np.uint64])
def test_narrow_block_tables_reach_the_whole_pool(kind: Any) -> None:
    """An engine's block table is 32 bits wide; a pool has more bytes than that."""
    pool = RegisteredMemory(Buffer(1 << 40, 8 << 30, None), lambda memory: None, None)
    assert pool.blocks(np.array([4096 + 5], kind), 1 << 20).addresses.tolist() == [(1 << 40) + ((4096 + 5) << 20)]
    with pytest.raises(UserError, match="outside"):
        pool.blocks(np.array([8192], kind), 1 << 20)


def test_sums_of_narrow_numbers_do_not_wrap() -> None:
    memory = RegisteredMemory(Buffer(1 << 40, 250, None), lambda memory: None, None)
    with pytest.raises(UserError, match="outside"):
        memory.spans(np.array([200], np.uint8), np.array([100], np.uint8))
    with pytest.raises(UserError, match="outside"):
        memory.blocks([1 << 62], 4)


def test_no_blocks_are_no_error() -> None:
    memory = _register(MemoryTable(), bytearray(1000))
    assert len(memory.blocks([], 100)) == len(memory.spans([], 100)) == 0


def test_closing_twice_is_fine() -> None:
    table = MemoryTable()
    with _register(table, bytearray(10)) as memory:
        assert len(memory) == 10
        memory.view[0:2] = b"ab"
        assert bytes(memory.array()[:2]) == b"ab"
        memory.close()
    assert table.all() == []


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint32, np.uint64])
def test_blocks_of_every_form_are_the_same_places(kind: Any) -> None:
    memory = RegisteredMemory(Buffer(1 << 40, 1000, None), lambda _memory: None, None)
    expected = memory.spans([200, 400, 600], 100)
    forms: list[Any] = [
        range(2, 7, 2),
        [2, 4, 6],
        (2, 4, 6),
        np.array([2, 4, 6], kind),
        np.arange(8, dtype=kind)[2::2][:3],
    ]
    for form in forms:
        spans = memory.blocks(form, 100)
        assert spans.addresses.tolist() == expected.addresses.tolist()
        assert spans.lengths.tolist() == expected.lengths.tolist()
        assert spans.addresses.dtype == spans.lengths.dtype == np.dtype(np.uint64)
    assert memory.blocks(3, 100).addresses.tolist() == memory.spans(300, 100).addresses.tolist()
    outside: list[Any] = [[10], [-1], -1, range(8, 11), range(-1, 2), [1 << 63], np.array([2, 10], kind)]
    if np.dtype(kind).kind == "i":
        outside.append(np.array([0, -1], kind))
    for form in outside:
        with pytest.raises(UserError, match="outside"):
            memory.blocks(form, 100)
    with pytest.raises(UserError, match="row"):
        memory.blocks(np.zeros((2, 2), kind), 100)
    for size in (0, 1001, -1, 1 << 33):
        with pytest.raises(UserError):
            memory.blocks([1001], size)


def test_one_piece_by_two_numbers_keeps_within_the_memory() -> None:
    memory = RegisteredMemory(Buffer(1 << 40, 1000, None), lambda _memory: None, None)
    assert memory.spans(900, 100).addresses.tolist() == [(1 << 40) + 900]
    assert memory.spans(1000, 0).lengths.tolist() == [0]
    for offset, length in ((901, 100), (-1, 10), (0, 1001), (1001, 0), (0, -1), (0, 1 << 32)):
        with pytest.raises(UserError, match=r"outside|longer"):
            memory.spans(offset, length)


def test_buffers_of_every_form_are_found_alike_with_and_without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = np.zeros(4096, np.uint8)
    words: Any = np.zeros(64, np.uint64)
    other = bytearray(512)
    table = MemoryTable()
    registered = [_register(table, memory) for memory in (pool, other, words)]
    view = memoryview(pool)
    batches: list[Any] = [
        [view[:100], view[300:400], view[100:200]],
        [pool[:100], view[100:105], memoryview(pool.view(np.int8))[7:9]],
        [view[:100], memoryview(other)[5:], words[:3]],
        [other, other],
        [view[0:0], view[5:6]],
        [words],
        [memoryview(words)[2:4]],
        [[view[:10], view[20:30]], view[40:50]],
        (view[:10], view[10:20]),
        [registered[0], view[:10]],
        [],
    ]
    for places in batches:
        found = []
        for module in (native_batches.MODULE, None):
            monkeypatch.setattr(native_batches, "MODULE", module)
            spans = table.resolve(places)
            starts = None if spans.starts is None else spans.starts.tolist()
            which = None if spans.which is None else spans.which.tolist()
            found.append((spans.memories, which, spans.addresses.tolist(), spans.lengths.tolist(), starts))
            monkeypatch.undo()
        assert found[0] == found[1]


def test_buffers_that_cannot_be_used_are_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = np.zeros(4096, np.uint8)
    table = MemoryTable()
    memory = _register(table, pool)
    read_only = pool[:10].view()
    read_only.flags.writeable = False
    released = memoryview(pool)[:4]
    released.release()
    stray = np.zeros(16, np.uint8)
    for bad in (read_only, pool[::2], bytes(4), stray, "text", 7, None):
        reasons = []
        for module in (native_batches.MODULE, None):
            monkeypatch.setattr(native_batches, "MODULE", module)
            with pytest.raises(UserError) as refused:
                table.resolve([pool[:4], bad])
            reasons.append(str(refused.value))
            monkeypatch.undo()
        assert reasons[0] == reasons[1]
    with pytest.raises(ValueError, match="released"):
        table.resolve([released])
    memory.close()
    with pytest.raises(UserError, match="not registered"):
        table.resolve([pool[:4], pool[4:8]])
