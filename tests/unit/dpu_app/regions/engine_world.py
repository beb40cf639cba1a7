"""A region engine with everything around it in memory: simulated flash, client memory, a clock that stands still.

Work requests are carried out at once, in order, unless `hold_fabric` is set; flash completes when `settle` or
`flash_step` says so. Clients speak capsules, as over a real fabric.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from common import wire
from common.status import Status
from common.wire import Capsule, EntryFlags, Flags, Op
from doca_shims.api import RDMA_REQUEST, Completion, Opcode, SendFlags, WcStatus
from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.regions.admission import AdmissionFilter, AdmitAll
from dpu_app.regions.context import EngineSettings, Posting
from dpu_app.regions.engine import RegionEngine
from dpu_app.regions.quota import FixedQuotas
from dpu_app.regions.recovery import close_region, format_region, open_region
from dpu_app.regions.window import Window, WindowLayout
from emulator.sim_flash import NO_FAULTS, FaultPlan, Media, SimFlash

SLOT_BYTES = 8192
RKEY = 77
NAMESPACE = b"n" * 16
START_S = 1_700_000_000


class StillClock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return START_S * 1_000_000_000 + self.now_ns


class LeaseLedger:
    def __init__(self) -> None:
        self.granted: dict[int, tuple[int, int, int]] = {}
        self._next = 1000

    def grant(self, connection_id: int, address: int, length_bytes: int) -> int:
        self._next += 1
        self.granted[self._next] = (connection_id, address, length_bytes)
        return self._next

    def revoke(self, connection_id: int, rkey: int) -> None:
        self.granted.pop(rkey, None)


class World:
    """One region of `slots` slots of SLOT_BYTES with a window of `frames`; session 1 of tenant "t" is connected as
    connection 1, with namespace handle 1."""

    def __init__(
        self,
        slots: int = 64,
        frames: int = 8,
        settings: EngineSettings | None = None,
        quotas: FixedQuotas | None = None,
        admission: AdmissionFilter | None = None,
        plan: FaultPlan = NO_FAULTS,
        eviction: str = "lru",
        media: Media | None = None,
    ) -> None:
        self.clock = StillClock()
        self.settings = settings or EngineSettings()
        self.media = media or Media((2 << 20) + slots * SLOT_BYTES)
        self.flash = SimFlash(self.media, seed=1)
        self._frames = frames
        self._eviction = eviction
        self._quotas = quotas or FixedQuotas({})
        self._admission = admission or AdmitAll()
        self.client = AnonymousMemory(1 << 20)
        self._request_id = 0
        self.hold_fabric = False
        self.held: list[Posting] = []
        self.unsent: list[int] = []
        self.answers: dict[tuple[int, int], Capsule] = {}
        self.broken: set[int] = set()
        self._start(format_new=media is None)
        self.flash.plan = plan

    def _start(self, format_new: bool, order_later: bool = False) -> None:
        layout = WindowLayout.fit(self._frames * SLOT_BYTES, SLOT_BYTES)
        self.memory = AnonymousMemory(layout.memory_bytes)
        self.flash.register_memory(self.memory)
        if format_new:
            format_region(self.flash, self.memory, "r", SLOT_BYTES, now_s=START_S)
        self.region = open_region(
            self.flash,
            self.memory,
            self._eviction,
            now_s=self.clock.wall_ns() // 10**9,
            order_later_above_slots=0 if order_later else None,
        )
        self.slots = self.region.superblock.geometry.slots
        self.window = Window(layout, self.memory.address, self.memory.view)
        self.leases = LeaseLedger()
        self.engine = RegionEngine(
            self.settings,
            self.region,
            self.window,
            self.flash.caps,
            self.clock,
            self.leases,
            self._admission,
            self._quotas,
        )
        self.engine.open_session(1, "t", {1: NAMESPACE})
        self.engine.connected(1, 1, window_lkey=5)

    def restart(self, clean: bool, order_later: bool = False) -> None:
        """Stop (flushing everything) or crash, and open again what is on flash."""
        if clean:
            self.engine.drain()
            self.settle()
            close_region(self.flash, self.memory, self.region)
            self.flash.close()
        else:
            self.flash.crash()
        self.flash = SimFlash(self.media, seed=2)
        self.answers.clear()
        self._start(format_new=False, order_later=order_later)

    # ---------------------------------------------------------------- the driver

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
                if self.hold_fabric:
                    self.held.append(posting)
                else:
                    self.engine.on_fabric(posting.connection_id, self.perform(*posting[1:5]))
            for connection_id, response in responses:
                capsule = wire.decode_response(response)
                key = (connection_id, capsule.request_id)
                if key in self.answers:
                    raise AssertionError("answered twice")
                self.answers[key] = capsule
                if self.hold_fabric:
                    self.unsent.append(connection_id)
                else:
                    self.engine.on_sent(connection_id, 1)
            for connection_id in broken:
                self.broken.add(connection_id)
                self.engine.disconnected(connection_id)

    def release_fabric(self) -> None:
        self.hold_fabric = False
        held, self.held = self.held, []
        for posting in held:
            self.engine.on_fabric(posting.connection_id, self.perform(*posting[1:5]))
        unsent, self.unsent = self.unsent, []
        for connection_id in unsent:
            self.engine.on_sent(connection_id, 1)
        self.carry_out()

    def perform(
        self, wr_id: int, opcode: Opcode, requests: bytes | bytearray | memoryview, flags: SendFlags
    ) -> list[Completion]:
        for local, remote, length, _, rkey, _ in RDMA_REQUEST.iter_unpack(requests):
            inside = self.client.address <= remote and remote + length <= self.client.address + self.client.length_bytes
            if rkey != RKEY or not inside:
                return [Completion(wr_id, WcStatus.REM_ACCESS_ERR, opcode, 0)]
            source, target = local, remote
            if opcode is Opcode.RDMA_READ:
                source, target = target, source
            ctypes.memmove(target, source, length)
        return [Completion(wr_id, WcStatus.SUCCESS, opcode, 0)] if flags & SendFlags.SIGNALED else []

    def flash_step(self) -> None:
        self.engine.on_flash(self.flash.poll())
        self.carry_out()

    def settle(self) -> None:
        """Until nothing moves any more without new input or time."""
        self.carry_out()
        while self.flash.in_flight or self.engine.next_wakeup_ns() == 0:
            if self.engine.next_wakeup_ns() == 0:
                self.pass_ms(0)
            self.flash_step()

    def pass_ms(self, milliseconds: int) -> None:
        self.clock.now_ns += milliseconds * 1_000_000
        self.engine.tick()
        self.carry_out()

    # ---------------------------------------------------------------- the client

    def submit(self, op: Op, entries: Any, connection_id: int = 1, **options: Any) -> int:
        self._request_id += 1
        self.engine.receive(connection_id, wire.encode(op, self._request_id, entries, **options))
        self.carry_out()
        return self._request_id

    def answer(self, request_id: int, connection_id: int = 1) -> Capsule:
        return self.answers[connection_id, request_id]

    def ask(self, op: Op, entries: Any, connection_id: int = 1, **options: Any) -> Capsule:
        """Submit and let everything settle."""
        request_id = self.submit(op, entries, connection_id, **options)
        self.settle()
        return self.answer(request_id, connection_id)

    def block_entries(
        self, keys: Sequence[bytes], length: int, offset: int = 0, at: Sequence[int] | None = None, **fields: Any
    ) -> wire.Entries:
        """Entries whose memory is one stretch each of the client's buffer: number `i` at ``at[i]``, or at
        ``i * SLOT_BYTES``."""
        entries = wire.keys_array(list(keys), wire.BLOCK_ENTRY)
        entries["namespace"] = 1
        entries["length"] = length
        entries["offset"] = offset
        entries["sge_count"] = 1
        places = [i * SLOT_BYTES for i in range(len(keys))] if at is None else list(at)
        entries["address"] = [self.client.address + place for place in places]
        entries["rkey"] = RKEY
        for name, value in fields.items():
            entries[name] = value
        return entries

    def key_entries(self, keys: Sequence[bytes], argument: int = 0, namespace: int = 1) -> wire.Entries:
        entries = wire.keys_array(list(keys))
        entries["namespace"] = namespace
        entries["argument"] = argument
        return entries

    def store(self, keys: Sequence[bytes], length: int = SLOT_BYTES, flags: Flags = Flags.NONE, **fields: Any) -> Any:
        """Store `content(key, length)` under each key; the statuses."""
        for i, key in enumerate(keys):
            self.client.view[i * SLOT_BYTES : i * SLOT_BYTES + length] = content(key, length)
        return statuses(self.ask(Op.STORE, self.block_entries(keys, length, **fields), flags=flags))

    def retrieve(self, keys: Sequence[bytes], length: int = 0) -> list[bytes | Status]:
        """Per key its bytes, or the status."""
        self.client.view[: len(keys) * SLOT_BYTES] = bytes(len(keys) * SLOT_BYTES)
        answer = self.ask(Op.RETRIEVE, self.block_entries(keys, length))
        out: list[bytes | Status] = []
        for i, row in enumerate(answer.entries):
            status = Status(int(row["status"]))
            out.append(
                bytes(self.client.view[i * SLOT_BYTES :][: int(row["length"])]) if status is Status.OK else status
            )
        return out

    def lookup(self, keys: Sequence[bytes]) -> list[Status]:
        return statuses(self.ask(Op.LOOKUP, self.key_entries(keys)))


def key(number: int) -> bytes:
    return np.random.default_rng(number).bytes(16)


def content(name: bytes, length: int = SLOT_BYTES) -> bytes:
    return np.random.default_rng(list(name)).bytes(length)


def statuses(answer: Capsule) -> list[Status]:
    return [Status(int(status)) for status in answer.entries["status"]]


__all__ = ["RKEY", "SLOT_BYTES", "EntryFlags", "World", "content", "key", "statuses"]
