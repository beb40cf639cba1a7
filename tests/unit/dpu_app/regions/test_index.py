"""The index against a dictionary, whatever the order of operations; and the rules of a slot's life."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpu_app.regions import index as index_module
from dpu_app.regions import key_hash
from dpu_app.regions.eviction import POLICIES, create
from dpu_app.regions.index import FREE, NAMESPACES_MAX, RESERVED, USED, SlotIndex
from dpu_app.regions.key_hash import LOAD_MAX, KeyHash

Key = tuple[int, int, int]


def _insert(index: SlotIndex, key: Key, length: int = 1) -> int:
    slot = index.allocate()
    index.insert(slot, *key, length, 0, 1, 2, 0)
    return slot


class IndexMachine(RuleBasedStateMachine):
    """Few slots and few keys, so that the index is often full and keys often come back."""

    @initialize(slots=st.integers(min_value=64, max_value=150), seed=st.integers(0, 1 << 63))
    def start(self, slots: int, seed: int) -> None:
        self.index = SlotIndex(slots, seed=seed)
        self.namespaces = [self.index.namespace_id(bytes([n]) * 16) for n in range(3)]
        self.present: dict[Key, int] = {}
        self.reserved: set[int] = set()
        self.lengths: dict[int, int] = {}

    keys = st.tuples(
        st.sampled_from([0, 1, 2, 1 << 63, (1 << 64) - 1]), st.integers(0, 40), st.integers(min_value=0, max_value=2)
    )

    @rule()
    def allocate(self) -> None:
        slot = self.index.allocate()
        if slot < 0:
            assert len(self.present) + len(self.reserved) == self.index.slots
        else:
            assert slot not in self.reserved
            assert slot not in self.present.values()
            self.reserved.add(slot)

    @rule(key=keys, length=st.integers(1, 1 << 30))
    def insert(self, key: Key, length: int) -> None:
        if key in self.present:
            return
        slot = self.reserved.pop() if self.reserved else self.index.allocate()
        if slot >= 0:
            self.index.insert(slot, *key, length, length * 3, 7, 8, 9)
            self.present[key] = slot
            self.lengths[slot] = length

    @rule(many=st.integers(1, 200), seed=st.integers(0, 1000))
    def fill(self, many: int, seed: int) -> None:
        for number in range(many):
            self.insert((seed, number, number % 3), 1 + number)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.present)))
        slot = self.present.pop(key)
        self.index.remove(slot)
        del self.lengths[slot]
        self.reserved.add(slot)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        self.reserved.remove(slot)
        self.index.release(slot)

    @rule(asked=st.lists(keys, max_size=20))
    def find(self, asked: list[Key]) -> None:
        columns = [np.array([key[part] for key in asked], dtype) for part, dtype in enumerate((np.uint64,) * 2)]
        namespaces = np.array([key[2] for key in asked], np.int64)
        found = self.index.find(columns[0], columns[1], namespaces)
        expected = [self.present.get(key, -1) for key in asked]
        assert found.tolist() == expected
        assert [self.index.find_one(*key) for key in asked] == expected

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        index = self.index
        assert index.used == len(self.present)
        assert index.used + index.free + len(self.reserved) == index.slots
        for key, slot in self.present.items():
            assert index.find_one(*key) == slot
            assert index.flags[slot] == USED
            assert index.length[slot] == self.lengths[slot]
        assert all(index.flags[slot] == RESERVED for slot in self.reserved)
        assert np.count_nonzero(index.flags == FREE) == index.free
        totals = [sum(self.lengths[s] for k, s in self.present.items() if k[2] == n) for n in self.namespaces]
        assert index.namespace_bytes[: len(totals)].tolist() == totals


class CrowdedIndexMachine(IndexMachine):
    """The same where no insertion may displace another: keys often stay without a cell."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(key_hash, "_KICKS_MAX", 1)

    def teardown(self) -> None:
        self._patch.undo()


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestCrowdedIndex = CrowdedIndexMachine.TestCase
TestCrowdedIndex.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_a_full_index_finds_every_key_and_no_other() -> None:
    index = SlotIndex(5000, seed=3)
    namespace = index.namespace_id(b"n" * 16)
    numbers = random.Random(5)
    keys = [(numbers.getrandbits(64), numbers.getrandbits(64), namespace) for _ in range(5000)]
    for key in keys:
        _insert(index, key)
    assert index.allocate() == -1
    lo = np.array([key[0] for key in keys], np.uint64)
    hi = np.array([key[1] for key in keys], np.uint64)
    ids = np.full(5000, namespace, np.uint32)
    assert (index.find(lo, hi, ids) == np.arange(5000)).all()
    assert (index.find(hi, lo, ids) == -1).all()
    assert index.find(lo[:0], hi[:0], ids[:0]).shape == (0,)
    assert (index.find(lo, hi, ids + 1) == -1).all()


def test_churn_at_full_load_does_not_degrade() -> None:
    index = SlotIndex(512, seed=4)
    namespace = index.namespace_id(b"n" * 16)
    numbers = random.Random(6)
    present = [_insert(index, (numbers.getrandbits(64), numbers.getrandbits(64), namespace)) for _ in range(512)]
    for _ in range(5000):
        slot = present.pop(numbers.randrange(512))
        index.remove(slot)
        index.insert(slot, numbers.getrandbits(64), numbers.getrandbits(64), namespace, 1, 0, 1, 2, 0)
        present.append(slot)
    hashed = index.key_hash
    assert int(np.count_nonzero(hashed.tags8)) + len(hashed.homeless) == 512


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16])
def test_namespaces_that_are_unknown_match_nothing(dtype: type[np.signedinteger[np.typing.NBitBase]]) -> None:
    index = SlotIndex(64)
    namespace = index.namespace_id(b"n" * 16)
    _insert(index, (1, 2, namespace))
    ids = np.array([-1, namespace, 1, 77], dtype)
    ones, twos = np.full(4, 1, np.uint64), np.full(4, 2, np.uint64)
    assert index.find(ones, twos, ids).tolist() == [-1, 0, -1, -1]
    assert index.find(ones[:1], twos[:1], np.array([65536 + namespace])).tolist() == [-1]
    assert index.find_one(1, 2, -1) == -1


def test_namespace_ids() -> None:
    index = SlotIndex(64)
    digests = [number.to_bytes(16, "little") for number in range(300)]
    assert [index.namespace_id(digest) for digest in digests] == list(range(300))
    assert index.namespace_id(digests[7]) == 7
    assert index.find_namespace(digests[299]) == 299
    assert index.find_namespace(b"x" * 16) == -1
    assert index.namespace_digest(299) == digests[299]
    with pytest.raises(KeyError):
        index.namespace_digest(300)
    with pytest.raises(ValueError):
        index.namespace_id(b"short")


def test_namespace_ids_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "NAMESPACES_MAX", 2)
    index = SlotIndex(64)
    assert [index.namespace_id(bytes([n]) * 16) for n in range(3)] == [0, 1, -1]
    assert index.namespace_id(bytes([1]) * 16) == 1
    assert NAMESPACES_MAX < 1 << 16


def test_ids_of_empty_namespaces_are_given_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "NAMESPACES_MAX", 3)
    index = SlotIndex(64)
    digests = [bytes([n]) * 16 for n in range(5)]
    assert [index.namespace_id(digest) for digest in digests] == [0, 1, 2, -1, -1]
    slot = _insert(index, (1, 1, 0))
    assert index.take_back_namespaces(np.array([0, 0, 1])) == [1]
    assert index.take_back_namespaces(np.array([0, 0, 1])) == []  # it has been taken back
    assert index.find_namespace(digests[1]) == -1
    assert index.namespace_id(digests[3]) == 1
    assert index.namespace_digest(1) == digests[3]
    assert index.namespace_id(digests[1]) == -1
    index.remove(slot)
    assert index.take_back_namespaces(np.array([0, 2, 1])) == [0]


def test_allocation_keeps_to_a_page_of_the_table() -> None:
    index = SlotIndex(200)
    assert [index.allocate() for _ in range(200)] == list(range(200))
    for slot in (150, 3, 151, 149):
        index.release(slot)
    assert sorted(index.allocate() for _ in range(3)) == [3, 149, 150] or index.free == 1
    assert index.allocate() >= 0
    assert index.allocate() == -1


def test_a_slot_takes_no_step_twice() -> None:
    index = SlotIndex(64)
    namespace = index.namespace_id(b"n" * 16)
    with pytest.raises(ValueError, match="free"):
        index.release(0)
    with pytest.raises(ValueError, match="not allocated"):
        index.insert(0, 1, 1, namespace, 1, 0, 1, 1, 0)
    with pytest.raises(ValueError, match="not in use"):
        index.remove(0)
    slot = index.allocate()
    with pytest.raises(ValueError, match="namespace"):
        index.insert(slot, 1, 1, 9, 1, 0, 1, 1, 0)
    index.insert(slot, 1, 1, namespace, 1, 0, 1, 1, 0)
    with pytest.raises(ValueError, match="in use"):
        index.release(slot)
    with pytest.raises(ValueError):
        index.insert(slot, 1, 1, namespace, 1, 0, 1, 1, 0)
    index.remove(slot)
    index.release(slot)
    assert (index.used, index.free) == (0, 64)


def test_one_and_many_hash_alike() -> None:
    index = SlotIndex(64, seed=99)
    hashed: KeyHash = index.key_hash
    numbers = random.Random(1)
    keys = [(numbers.getrandbits(64), numbers.getrandbits(64), numbers.randrange(65535)) for _ in range(200)]
    keys += [(0, 0, 0), ((1 << 64) - 1, (1 << 64) - 1, 65534)]
    lo, hi = (np.array([key[part] for key in keys], np.uint64) for part in (0, 1))
    many = hashed.hash_many(lo, hi, np.array([key[2] for key in keys], np.uint16))
    assert many.tolist() == [hashed.hash_one(*key) for key in keys]
    assert len(set(many.tolist())) == len(keys)
    assert SlotIndex(64, seed=98).key_hash.hash_one(*keys[0]) != hashed.hash_one(*keys[0])


def test_scan_sees_every_block_of_its_namespaces_once() -> None:
    index = SlotIndex(10_000, seed=2)
    namespaces = [index.namespace_id(bytes([n]) * 16) for n in range(3)]
    slots = [_insert(index, (n, n, namespaces[n % 3])) for n in range(9000)]
    for slot in slots[::7]:
        index.remove(slot)
    seen: list[int] = []
    cursor, rounds = 0, 0
    while True:
        found, cursor = index.scan(cursor, 100, {namespaces[0], namespaces[2]})
        assert len(found) <= 100
        seen += found.tolist()
        rounds += 1
        if cursor == 0:
            break
    expected = [s for n, s in enumerate(slots) if n % 7 and n % 3 != 1]
    assert sorted(seen) == expected
    assert rounds <= len(expected) // 100 + 2
    assert index.scan(0, 10, set())[0].tolist() == []


def test_a_scan_for_rare_blocks_is_bounded_and_goes_on() -> None:
    index = SlotIndex(4 * index_module.SCAN_SLOTS_MAX + 5, seed=2)
    namespace = index.namespace_id(b"n" * 16)
    index.flags[:-1] = USED
    index.namespace[:-1] = namespace + 1
    index.flags[-1] = USED
    index.namespace[-1] = namespace
    cursors: list[int] = []
    found: list[int] = []
    while not cursors or cursors[-1]:
        slots, cursor = index.scan(cursors[-1] if cursors else 0, 10, {namespace})
        found += slots.tolist()
        cursors.append(cursor)
    assert cursors == [*(index_module.SCAN_SLOTS_MAX * n for n in range(1, 5)), 0]
    assert found == [index.slots - 1]


def test_memory_per_slot_at_ten_million_is_at_most_64_bytes() -> None:
    """Arrays are sized, not touched: this takes no memory to speak of. `measure` weighs a real one."""
    slots = 10_000_000
    index_bytes = SlotIndex(slots).memory_bytes
    for name in POLICIES:
        assert index_bytes + create(name, slots, int).bytes_per_slot * slots <= 64 * slots, name
    assert LOAD_MAX < 0.95
