"""The native hot path beside the Python that it stands in for: two engines in the same state are given the same
capsules, plain, unusual, malformed, and must answer, post, count and hold the same, byte by byte."""

from __future__ import annotations

import random
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from common import native as native_modules
from common import wire
from common.wire import HEADER_BYTES, EntryFlags, Flags, Op, StatId
from doca_shims.api import RDMA_REQUEST
from dpu_app.regions import hot_path
from dpu_app.regions.context import EngineSettings, Posting
from dpu_app.regions.index import SlotIndex
from tests.unit.dpu_app.regions.engine_world import RKEY, SLOT_BYTES, World, key

pytestmark = pytest.mark.skipif(hot_path.LIBRARY is None, reason="the native hot path was not built")

KEYS = [key(i) for i in range(96)]
OTHER = b"o" * 16


class Recorded(World):
    """Writes down what the engine asks for, with the window's addresses counted from its start."""

    def __init__(self, native: bool, seed: int, **options: Any) -> None:
        self.posted: list[tuple[int, int, bytes]] = []
        self.answered: list[tuple[int, Any]] = []
        self._next_connection = 1
        library = hot_path.LIBRARY if native else None
        with (
            mock.patch.object(hot_path, "LIBRARY", library),
            mock.patch("dpu_app.regions.index.secrets.randbits", return_value=seed * 0x9E3779B97F4A7C15 % (1 << 64)),
        ):
            super().__init__(**options)
        self.engine.add_namespace(1, 3, OTHER)
        self.engine.open_session(2, "u", {2: OTHER})
        self.engine.connected(2, 2, window_lkey=6)

    def carry_out(self) -> None:
        outbox = self.engine.outbox
        while not outbox.empty:
            flash, outbox.flash = outbox.flash, []
            fabric, outbox.fabric = outbox.fabric, []
            responses, outbox.responses = outbox.responses, []
            broken, outbox.broken = outbox.broken, []
            if flash:
                self.flash.submit(flash)
            for posting in fabric:
                self._write_down(posting)
                if self.hold_fabric:
                    self.held.append(posting)
                else:
                    self.engine.on_fabric(posting.connection_id, self.perform(*posting[1:5]))
            for connection_id, response in responses:
                lease = response[3] == Op.LEASE  # names addresses and keys
                answer = wire.decode_response(response).entries["status"].tolist() if lease else response
                self.answered.append((connection_id, answer))
                if self.hold_fabric:
                    self.unsent.append(connection_id)
                else:
                    self.engine.on_sent(connection_id, 1)
            for connection_id in set(broken):
                self.engine.disconnected(connection_id)
                self.engine.connected(connection_id, connection_id, 4 + connection_id)

    def _write_down(self, posting: Posting) -> None:
        for local, *rest in RDMA_REQUEST.iter_unpack(posting.requests):
            packed = RDMA_REQUEST.pack(local - self.memory.address, *rest)
            self.posted.append((posting.connection_id, posting.opcode, packed))

    def observed(self) -> dict[str, Any]:
        """All that must be the same, the log since the last call included."""
        window, policy = self.window, self.region.policy
        order, frame = [], window._clean.tail
        while frame >= 0:
            order.append(frame)
            frame = window._clean.newer(frame)
        counters = policy.hit_counters
        out = {
            "posted": self.posted,
            "answered": self.answered,
            "stats": self.engine.stats(),
            "references": window.references.tolist(),
            "states": bytes(window.state),
            "order of use": order,
            "hits": None if counters is None else bytes(counters[0]),
            "rooms": [self.engine._context.connections[number].room for number in (1, 2)],
        }
        self.posted, self.answered = [], []
        return out


class Twins:
    """The two worlds, and capsules made for both: their clients' memory is one."""

    def __init__(self, seed: int, eviction: str) -> None:
        settings = EngineSettings(send_wrs_max=256, dirty_fraction=1.0)
        options: dict[str, Any] = {"slots": 128, "frames": 64, "settings": settings, "eviction": eviction}
        self.native, self.python = (Recorded(native, seed, **options) for native in (True, False))
        assert self.native.engine._hot_path is not None
        assert self.python.engine._hot_path is None
        self.python.client = self.native.client
        self.random = random.Random(seed)
        self.request_id = 100

    @property
    def both(self) -> tuple[Recorded, Recorded]:
        return self.native, self.python

    def receive(self, capsule: bytes, connection_id: int = 1) -> None:
        for world in self.both:
            world.engine.receive(connection_id, capsule)
            world.carry_out()

    def check(self, what: str) -> None:
        native, python = (world.observed() for world in self.both)
        for name in native:
            assert native[name] == python[name], f"{name} after {what}"

    def encode(self, op: Op, entries: Any, **options: Any) -> bytes:
        self.request_id += 1
        return wire.encode(op, self.request_id, entries, **options)

    # what may happen

    def store(self) -> None:
        count = self.random.randrange(1, 16)
        entries = self.native.block_entries(self.random.sample(KEYS, count), SLOT_BYTES)
        entries["length"] = [self.random.choice((1, 4096, 6000, SLOT_BYTES)) for _ in range(count)]
        entries["namespace"] = [self.random.choice((1, 1, 1, 3)) for _ in range(count)]
        if self.random.random() < 0.2:
            entries["ttl_s"] = self.random.randrange(1, 4)
        self.receive(self.encode(Op.STORE, entries))

    def _handles(self, count: int) -> list[int]:
        usual = self.random.random() < 0.85
        return [
            self.random.choice((1, 1, 1, 3)) if usual else self.random.choice((1, 2, 3, 4000)) for _ in range(count)
        ]

    def _known(self, count: int) -> list[bytes]:
        """Keys, most of which are there."""
        index = self.native.region.index
        there = [
            index.key_lo[slot].tobytes() + index.key_hi[slot].tobytes() for slot in np.flatnonzero(index.flags == 1)
        ]
        sure = self.random.random() < 0.6
        return [self.random.choice(there) if there and sure else self.random.choice(KEYS) for _ in range(count)]

    def lookup(self) -> bytes:
        count = self.random.choice((1, 2, 16, 17, 100, 512))
        entries = self.native.key_entries(self._known(count))
        entries["namespace"] = self._handles(count)
        return self.encode(Op.LOOKUP, entries)

    def retrieve(self, op: Op = Op.RETRIEVE) -> bytes:
        source = self.random
        count = source.choice((1, 1, 2, 5, 16, 17, 40, 300))
        entries = self.native.block_entries(self._known(count), 0, at=[0] * count)
        step = 256 if count > 64 else SLOT_BYTES
        places = np.arange(count) * step
        if source.random() < 0.1:
            places = np.array(source.sample(places.tolist(), count))
        if source.random() < 0.1:
            places[source.randrange(count)] += source.choice((-1, 1))
        entries["address"] += np.maximum(places, 0).astype(np.uint64)
        entries["namespace"] = self._handles(count)
        if count > 64 or source.random() < 0.3:
            entries["length"] = source.choice((1, 100, 256, 4096))
        if source.random() < 0.3:
            entries["offset"] = [source.choice((0, 0, 0, 1, 4095, 6000, SLOT_BYTES, 2**32 - 1)) for _ in range(count)]
        if source.random() < 0.1:
            entries["flags"] = int(EntryFlags.WANT_CHECKSUM)
        if source.random() < 0.05:
            entries["rkey"][source.randrange(count)] = RKEY + 1
        if source.random() < 0.05:
            entries["address"][source.randrange(count)] = 2**64 - source.choice((1, SLOT_BYTES))
        sges = None
        if source.random() < 0.1:
            entries["sge_count"][source.randrange(count)] = source.choice((0, 2, 3))
            sges = np.zeros(source.randrange(4), wire.SGE)
            sges["address"] = self.native.client.address
            sges["length"] = source.choice((0, 100, SLOT_BYTES))
            sges["rkey"] = RKEY
        return self.encode(op, entries, sges=sges)

    def by_key(self, op: Op) -> bytes:
        return self.encode(op, self.native.key_entries(self._known(self.random.randrange(1, 4)), argument=1))

    def cancel(self) -> bytes:
        entries = np.zeros(2, wire.CANCEL_ENTRY)
        entries["request_id"] = [self.request_id, self.request_id - self.random.randrange(3)]
        return self.encode(Op.CANCEL, entries)

    def damaged(self) -> bytes:
        """A capsule that a hostile or broken peer might send."""
        capsule = bytearray(self.random.choice((self.lookup, self.retrieve))())
        kind = self.random.randrange(4)
        if kind == 0:
            return bytes(capsule[: self.random.randrange(len(capsule))])
        if kind == 1:
            return bytes(capsule) + bytes(self.random.randrange(1, 70))
        reach = HEADER_BYTES if kind == 2 else len(capsule)
        for _ in range(self.random.randrange(1, 4)):
            capsule[self.random.randrange(reach)] ^= 1 << self.random.randrange(8)
        return bytes(capsule)

    def step(self) -> str:
        source = self.random
        choice = source.random()
        if choice < 0.12:
            self.store()
            return "STORE"
        if choice < 0.55:
            self.receive(self.lookup() if source.random() < 0.4 else self.retrieve())
            return "LOOKUP or RETRIEVE"
        if choice < 0.75:
            self.receive(self.damaged(), source.choice((1, 2)))
            return "a damaged capsule"
        if choice < 0.82:
            op = source.choice((Op.DELETE, Op.LEASE, Op.TOUCH, Op.PIN))
            self.receive(self.by_key(op))
            return op.name
        if choice < 0.85:
            self.receive(self.retrieve(Op.PREFETCH), 1)
            return "PREFETCH"
        if choice < 0.87:
            self.receive(self.cancel())
            return "CANCEL"
        if choice < 0.90:
            capsule = self.lookup()
            self.receive(capsule)
            self.receive(capsule)
            return "the same LOOKUP twice"
        if choice < 0.97:
            for world in self.both:
                world.settle()
            return "settling"
        for world in self.both:
            world.pass_ms(source.choice((5, 150, 1100)) if world is self.native else self._passed(world))
        return "time"

    def _passed(self, world: Recorded) -> int:
        return (self.native.clock.now_ns - world.clock.now_ns) // 1_000_000


@pytest.mark.parametrize("seed", range(8))
def test_both_ways_answer_post_count_and_hold_the_same(seed: int) -> None:
    twins = Twins(seed, ("s3fifo", "sieve", "lru", "fifo")[seed % 4])
    served = mock.Mock(wraps=twins.native.engine._hot_path.serve)  # type: ignore[union-attr]
    plain = [0]

    def serve(*arguments: Any) -> Any:
        answer = served(*arguments)
        plain[0] += answer is not None
        return answer

    with mock.patch.object(twins.native.engine._hot_path, "serve", serve):
        for number in range(120):
            what = twins.step()
            twins.check(f"step {number}: {what}")
    assert plain[0] > 20, "the native way was hardly ever taken"
    for world in twins.both:
        world.settle()
    twins.check("all")


@pytest.mark.parametrize("seed", range(6))
def test_frames_are_held_until_the_answer_is_sent(seed: int) -> None:
    """With completions outstanding, both hold the same frames; afterwards none."""
    twins = Twins(seed, "s3fifo")
    twins.store()
    for world in twins.both:
        world.settle()
        world.hold_fabric = True
    for _ in range(8):
        twins.receive(twins.lookup())
        twins.receive(twins.retrieve())
        held = [world.window.references.tolist() for world in twins.both]
        assert held[0] == held[1]
    twins.receive(twins.by_key(Op.DELETE))
    for world in twins.both:
        world.release_fabric()
        world.settle()
        assert world.engine.stats()[StatId.FRAMES_BUSY] == 0
    assert twins.native.window.state == twins.python.window.state


def test_a_frame_that_is_forgotten_while_it_is_read_is_free_after_the_answer_is_sent() -> None:
    world = World(eviction="s3fifo")
    world.store(KEYS[:2])
    world.hold_fabric = True
    world.submit(Op.RETRIEVE, world.block_entries(KEYS[:1], 0))
    lo, hi = (int.from_bytes(KEYS[0][i : i + 8], "little") for i in (0, 8))
    slot = world.region.index.find_one(lo, hi, 0)
    frame = world.window.frame_of[slot]
    world.engine._context.catalogue.forget(slot)
    free = world.window.free
    assert world.window.references[frame] == 1
    world.release_fabric()
    assert (world.window.references[frame], world.window.free) == (0, free + 1)


def test_a_connection_that_ends_gives_back_what_its_answers_hold() -> None:
    world = World()
    world.store(KEYS[:4])
    world.hold_fabric = True
    world.submit(Op.RETRIEVE, world.block_entries(KEYS[:4], 0))
    assert world.engine.stats()[StatId.FRAMES_BUSY] == 4
    world.engine.disconnected(1)
    assert world.engine.stats()[StatId.FRAMES_BUSY] == 0
    world.engine.on_sent(1, 1)  # its completions come late, or never


def test_a_full_send_queue_leaves_it_to_the_general_way() -> None:
    world = World(slots=64, frames=64, settings=EngineSettings(send_wrs_max=256))
    for start in range(0, 40, 8):
        world.store(KEYS[start : start + 8], 4096)
    world.hold_fabric = True
    requests = [world.submit(Op.RETRIEVE, world.block_entries(KEYS[:40], 0)) for _ in range(8)]
    assert sum(len(posting.requests) for posting in world.held) <= 256 * RDMA_REQUEST.size
    assert world.engine.stats()[StatId.PENDING] == 2
    while world.held:
        world.release_fabric()
    assert all(set(world.answer(request).entries["status"].tolist()) == {0} for request in requests)
    assert world.engine.stats()[StatId.FRAMES_BUSY] == 0


def test_keys_without_a_cell_are_found_all_the_same() -> None:
    world = World()
    world.store(KEYS[:4])
    index = world.region.index
    lo, hi = (int.from_bytes(KEYS[0][i : i + 8], "little") for i in (0, 8))
    slot = index.find_one(lo, hi, 0)
    index.key_hash.remove(slot, lo, hi, 0)
    index.key_hash.homeless[lo, hi, 0] = slot
    assert world.lookup(KEYS[:5]) == [0, 0, 0, 0, 2]
    assert len(world.retrieve(KEYS[:4])) == 4


# ------------------------------------------------------------------------------------------------ parts of the library


def test_frames_stand_in_for_a_dict() -> None:
    frames = 64
    links = np.zeros(2 * (frames + 1), np.uint32)
    arrays = (np.zeros(frames, np.uint32), bytearray(frames), np.zeros(frames + 1, np.uint8), links)
    native = hot_path.LIBRARY.Frames(*arrays)
    plain: OrderedDict[int, int] = OrderedDict()
    source = random.Random(3)
    for _ in range(20_000):
        slot = source.randrange(200) * source.choice((1, 1 << 20))
        if slot in plain and source.random() < 0.5:
            del plain[slot], native[slot]
        elif len(plain) < frames or slot in plain:
            plain[slot] = native[slot] = source.randrange(frames)
        probe = source.randrange(200)
        assert native.get(probe, -1) == plain.get(probe, -1)
        assert (len(native), probe in native) == (len(plain), probe in plain)
    assert {slot: native[slot] for slot in plain} == plain
    for missing in (-1, 2**32 - 1, 2**40, 7_777_777):
        assert native.get(missing, -1) == -1
        with pytest.raises(KeyError):
            del native[missing]
        with pytest.raises(KeyError):
            native[missing]
    with pytest.raises(ValueError, match="no such slot or frame"):
        native[1] = frames


def test_a_frame_is_not_released_more_often_than_held() -> None:
    world = World()
    world.store(KEYS[:1])
    with pytest.raises(ValueError, match="more often than held"):
        world.window.unhold_packed(b"\0\0\0\0")
    with pytest.raises(ValueError, match="more often than held"):
        world.window.unhold_packed(b"\xff\xff\xff\xff")


def test_the_key_table_and_its_twin_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = 512
    native = SlotIndex(slots, seed=9)
    monkeypatch.setattr(hot_path, "LIBRARY", None)
    python = SlotIndex(slots, seed=9)
    source = random.Random(1)
    for index in (native, python):
        index.namespace_id(b"n" * 16)
    held: dict[int, tuple[int, int]] = {}
    for _ in range(4000):
        if held and source.random() < 0.4:
            slot = source.choice(list(held))
            del held[slot]
            for index in (native, python):
                index.remove(slot)
                index.release(slot)
        elif len(held) < slots:
            lo, hi = source.getrandbits(64), source.getrandbits(64)
            for index in (native, python):
                slot = index.allocate()
                index.insert(slot, lo, hi, 0, 1, 2, 3, 4, 0)
            held[slot] = lo, hi
        lo, hi = source.choice(list(held.values())) if held else (1, 2)
        assert native.find_one(lo, hi, 0) == python.find_one(lo, hi, 0) >= -1
        assert native.fingerprint(lo, hi, 0) == python.fingerprint(lo, hi, 0)
        assert native.find_one(lo, hi ^ 1, 0) == native.find_one(lo, hi, -1) == -1
    assert native.key_hash.tags8.tobytes() == python.key_hash.tags8.tobytes()
    assert sorted(held) == [slot for slot, (lo, hi) in sorted(held.items()) if native.find_one(lo, hi, 0) == slot]


@pytest.mark.parametrize("name", ["KeyTable", "Frames", "HotPath"])
def test_columns_that_do_not_belong_together_are_refused(name: str) -> None:
    library = hot_path.LIBRARY
    index = SlotIndex(64, seed=1)
    hashed = index.key_hash
    frames = library.Frames(np.zeros(4, np.uint32), bytearray(4), np.zeros(5, np.uint8), np.zeros(10, np.uint32))
    short = np.zeros(3, np.uint64)
    columns = (index.length, index.checksum, index.expires_s, np.zeros(80, np.int64))
    wrong: dict[str, list[tuple[Any, ...]]] = {
        "KeyTable": [
            (),
            (hashed.cells, hashed.tags8, index.key_lo, short, index.namespace, 1, 2),
            (hashed.cells, hashed.tags8[:8], index.key_lo, index.key_hi, index.namespace, 1, 2),
            (np.zeros(0, np.uint32), hashed.tags8, index.key_lo, index.key_hi, index.namespace, 1, 2),
            (hashed.cells, bytes(len(hashed.cells))) + (index.key_lo, index.key_hi, index.namespace, 1, 2),
        ],
        "Frames": [
            (np.zeros(4, np.uint32), bytearray(3), np.zeros(5, np.uint8), np.zeros(10, np.uint32)),
            (np.zeros(4, np.uint32), bytearray(4), np.zeros(5, np.uint8), np.zeros(9, np.uint32)),
        ],
        "HotPath": [
            (hashed.table, frames, {}, columns[:3], None, None, print, print, 0, 4096),
            (hashed.table, frames, {}, (short, *columns[1:]), None, None, print, print, 0, 4096),
            (hashed.table, frames, {}, columns, bytearray(64), bytes(255), None, print, 0, 4096),
            (frames, frames, {}, columns, None, None, print, print, 0, 4096),
            (hashed.table, SimpleNamespace(), {}, columns, None, None, print, print, 0, 4096),
        ],
    }
    for arguments in wrong[name]:
        with pytest.raises((TypeError, ValueError, BufferError)):
            getattr(library, name)(*arguments)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRESOL_NATIVE", "0")
    assert native_modules.load("dpu_app.regions._hot_path") is None
    monkeypatch.setenv("ENTRESOL_NATIVE", "1")
    assert native_modules.load("dpu_app.regions._hot_path") is hot_path.LIBRARY
    assert native_modules.load("dpu_app.regions._never_built") is None


def test_the_flags_of_a_plain_request_do_not_matter() -> None:
    """Flags of other operations are ignored there, as the general way does."""
    twins = Twins(1, "lru")
    twins.store()
    twins.receive(twins.encode(Op.LOOKUP, twins.native.key_entries(KEYS[:3]), flags=Flags.TO_HOST | Flags.UNTIL_FLASH))
    twins.check("flags")
