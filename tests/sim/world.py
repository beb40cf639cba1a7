"""The simulated world of one region: engine, flash, fabric, clock and clients, in an order that the seed decides.

One thread, no waiting, no real time. Each step does one thing that could happen next; after every step the engine's
work is carried out and its promises are checked. Any broken promise raises `Violation`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import xxhash

from common import wire
from common.status import BlockState, Status
from common.wire import Op, StatId
from doca_shims.api import Opcode
from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.regions.admission import AdmitAll
from dpu_app.regions.context import EngineSettings
from dpu_app.regions.engine import RegionEngine
from dpu_app.regions.index import USED
from dpu_app.regions.quota import FixedQuotas
from dpu_app.regions.recovery import OpenRegion, close_region, open_region
from dpu_app.regions.window import FrameState, Window, WindowLayout
from emulator.sim_fabric import SimFabric
from emulator.sim_flash import NO_FAULTS, Fault, FaultKind, SimFlash
from tests.sim.client import Client
from tests.sim.region import SCRATCH_BYTES, SimClock, block_in, formatted, hot_paths, seeded_hashes, slots_in
from tests.sim.requests import NS_PER_S, ON_FLASH, Lease
from tests.sim.scenario import Scenario
from tests.sim.truth import NEVER, Block, Truth, Violation, require

CREDITS = 6
REQUESTS = {
    Op.STORE: 30,
    Op.RETRIEVE: 22,
    Op.LOOKUP: 6,
    Op.PREFETCH: 8,
    Op.LEASE: 4,
    Op.RELEASE: 3,
    Op.PIN: 8,
    Op.UNPIN: 1,
    Op.TOUCH: 1,
    Op.DELETE: 8,
    Op.CANCEL: 3,
    Op.LIST: 2,
}
"""How often each is sent, relative to the others."""
TENANTS = {"red": (1, 2), "blue": (1,)}
"""Handles of each tenant's sessions."""


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.clock = SimClock()
        self.step_number = 0
        self.digests = {
            (tenant, handle): xxhash.xxh3_128_digest(f"{tenant} {handle}".encode())
            for tenant, handles in TENANTS.items()
            for handle in handles
        }
        self.truth = Truth(scenario.seed, list(self.digests.values()), scenario.keys, scenario.slot_bytes)
        self.layout = WindowLayout(scenario.frames, scenario.slot_bytes)
        self.memory = AnonymousMemory(self.layout.memory_bytes)
        self.scratch = AnonymousMemory(SCRATCH_BYTES)
        self.media = formatted(scenario.slots, scenario.slot_bytes).copy()
        self.clients: list[Client] = []
        self.survivors: list[Block] = []
        """What was promised when the region last died."""
        self.next_session = 1
        self.next_connection = 1
        self.faults_seen = 0
        self.unheard: dict[int, int] = {}
        """Connection -> responses that were sent without the engine having been told yet."""
        self.trace = xxhash.xxh3_64()
        """Of everything that the engine asked for and answered: the same whenever the seed is."""

    # ---------------------------------------------------------------- life and death

    def run(self) -> None:
        """All lives of the region. Raises Violation."""
        with seeded_hashes(self.random.getrandbits(64)), hot_paths(self.scenario.native):
            for life in range(self.scenario.lives):
                self._open()
                self._after_recovery()
                if life == 0:
                    self._prefill()
                for _ in range(self.scenario.steps):
                    self.step()
                if life + 1 < self.scenario.lives:
                    self._end_life()
            self._quiesce()
            self.flash.close()
        self.memory.close()
        self.scratch.close()

    def _open(self) -> None:
        """Open the region from what is on the media, and connect clients to it."""
        scenario = self.scenario
        self.flash = SimFlash(
            self.media,
            self.random.getrandbits(32),
            scenario.recovery_faults,
            queue_depth=max(scenario.queue_depth, 1),
            max_io_bytes=scenario.max_io_bytes,
        )
        self.faults_seen = 0
        self.flash.register_memory(self.memory)
        self.flash.register_memory(self.scratch)
        now_s = self.clock.wall_ns() // NS_PER_S
        self.region: OpenRegion = open_region(self.flash, self.scratch, scenario.eviction, now_s=now_s)
        self.flash.plan = scenario.faults
        self.fabric = SimFabric(self.memory, self.random.getrandbits(32), self._on_access, scenario.fabric_failures)
        self.memory.view[:] = self.random.randbytes(256) * (self.memory.length_bytes // 256)
        window = Window(self.layout, self.memory.address, self.memory.view)
        self.engine = RegionEngine(
            EngineSettings(
                dirty_fraction=scenario.dirty_fraction,
                send_wrs_max=scenario.send_wrs_max,
                deadline_default_ms=1000,
                lease_default_ms=100,
            ),
            self.region,
            window,
            self.flash.caps,
            self.clock,
            self.fabric,
            AdmitAll(),
            FixedQuotas({}, scenario.quota_bytes),
        )
        self.unheard.clear()
        self.clients = []
        for tenant in ("red", "red", "blue"):
            self._open_session(tenant)

    def _open_session(self, tenant: str) -> None:
        handles = {handle: self.digests[tenant, handle] for handle in TENANTS[tenant]}
        client = Client(
            self.next_session,
            tenant,
            handles,
            self.truth,
            self.scenario.slot_bytes,
            random.Random(self.random.getrandbits(32)),
            self.clock.monotonic_ns,
            self.clock.wall_ns,
            lambda: self.step_number,
        )
        faults = self.scenario.faults
        client.judge.evicts = self.scenario.evicts
        client.judge.flash_loses = bool(faults.eio_read or faults.short_read or faults.eio_write)
        self.next_session += 1
        self.engine.open_session(client.session_id, tenant, handles)
        self.clients.append(client)
        self._connect(client)

    def _connect(self, client: Client) -> None:
        connection_id = self.next_connection
        self.next_connection += 1
        lkey = self.fabric.connect(connection_id)
        keys = [self.fabric.register(connection_id, *region) for region in client.regions()]
        self.engine.connected(client.session_id, connection_id, lkey)
        client.connected(connection_id, *keys)

    def _disconnect(self, client: Client) -> None:
        self.fabric.disconnect(client.connection_id)
        self.unheard.pop(client.connection_id, None)
        self.engine.disconnected(client.connection_id)
        client.disconnected()

    def _end_life(self) -> None:
        if self.random.random() < self.scenario.clean_stops:
            self._quiesce()
            self.engine.drain()
            self._settle(lambda: self.engine.drained, "a drain")
            survivors = self._promised()
            self.flash.plan = NO_FAULTS
            close_region(self.flash, self.scratch, self.region)
            self.flash.close()
        else:
            survivors = self._promised()
            self.flash.crash()
            self._excuse(self.flash.faults[self.faults_seen :])
            if self.random.random() < 0.3:
                self.clock.now_ns += self.random.randrange(3 * NS_PER_S)
        for client in self.clients:
            client.disconnected()
        for block in self.truth.blocks.values():
            block.pinned_at = NEVER
            block.sure = False
            if self.scenario.faults.lost_write:
                block.gone_at = NEVER
        self.survivors = survivors

    def _promised(self) -> list[Block]:
        """Blocks that are on flash at the moment before the region dies: those that the engine says are and that were
        stored in this life, or promised at the end of the last one. Others are claims, maybe never verified."""
        index = self.region.index
        fresh = index.flags == USED
        fresh &= index.generation == self.region.superblock.generation
        stored = {id(block_in(self.region.index, slot, self.truth)) for slot in np.flatnonzero(fresh).tolist()}
        sure = stored | {id(block) for block in self.survivors}
        return [
            block
            for block, state in self._lookup_all()
            if state in ON_FLASH and id(block) in sure and not block.excused and not block.mortal
        ]

    def _after_recovery(self) -> None:
        """What was promised is there, and (for some, so that others stay unverified) reads right."""
        self._check_counts()
        present = {id(block) for block, state in self._lookup_all() if state is not BlockState.ABSENT}
        for block in self.survivors:
            if block.excused:
                continue
            block.sure = True
            require(id(block) in present, f"block {block.number}, on flash before, is not there after recovery")
        if self.random.random() < 0.5:
            self._read_survivors()

    def _read_survivors(self) -> None:
        plan, self.flash.plan = self.flash.plan, NO_FAULTS
        for block in self.survivors:
            if block.excused or self.random.random() < 0.4:
                continue
            client = next(client for client in self.clients if block.digest in client.handles.values())
            client.read_now(block)
            self._deliver_all(client)
            self._settle(partial(_answered_all, client), "reading after recovery")
            status = client.last_status
            require(status is Status.OK, f"block {block.number}, on flash before the crash: {status.name} after it")
        self.flash.plan = plan

    def _prefill(self) -> None:
        """Store some blocks to begin with, so that a short life sees a region that is full."""
        for client in self.clients:
            blocks = [block for digest in client.handles.values() for block in self.truth.of[digest]]
            blocks = self.random.sample(blocks, int(len(blocks) * self.scenario.prefill))
            count = max(1, min(8, int(self.scenario.frames * self.scenario.dirty_fraction)))
            for start in range(0, len(blocks), count):
                client.store_now(blocks[start : start + count])
                self._deliver_all(client)
                self._settle(partial(_answered_all, client), "storing")

    # ---------------------------------------------------------------- steps

    def step(self) -> None:
        """One thing that could happen next."""
        self.step_number += 1
        choice = self.random.random()
        if choice < 0.30:
            self._make_request()
        elif choice < 0.50:
            self._deliver_request()
        elif choice < 0.70:
            self._flash()
        elif choice < 0.88:
            self._fabric()
        elif choice < 0.95:
            self._pass_time(self.random.choice((1_000, 50_000, 1_000_000, 20_000_000)))
        elif choice < 0.96:
            self._pass_time(self.random.choice((200_000_000, 1_100_000_000)))
        elif choice < 0.962:
            self._set_wall_clock()
        else:
            self._read_lease()
        if self.random.random() < self.scenario.reconnects:
            self._break_something()
        self._check_counts()
        if self.step_number % 8 == 0:
            self._check_pins()

    def _make_request(self) -> None:
        client = self.random.choice(self.clients)
        if client.connection_id:
            (op,) = self.random.choices(list(REQUESTS), list(REQUESTS.values()))
            client.request(op)

    def _deliver_request(self) -> None:
        waiting = [c for c in self.clients if c.connection_id and c.unsent and len(c.requests) < CREDITS]
        if waiting:
            self._deliver(self.random.choice(waiting))

    def _deliver(self, client: Client) -> None:
        request = client.unsent.pop(0)
        request.arrived = self.step_number
        request.arrived_ns = self.clock.now_ns
        request.arrived_wall_ns = self.clock.wall_ns()
        request.deadline_ns = self.clock.now_ns + (request.budget_us or 1_000_000) * 1000
        client.requests[request.request_id] = request
        self.engine.receive(client.connection_id, request.capsule)
        self._carry_out()

    def _deliver_all(self, client: Client) -> None:
        while client.unsent:
            self.step_number += 1
            self._deliver(client)

    def _flash(self) -> None:
        completions = self.flash.poll()
        self._excuse(self.flash.faults[self.faults_seen :])
        self.faults_seen = len(self.flash.faults)
        if completions:
            self.engine.on_flash(completions)
            self._carry_out()

    def _fabric(self) -> None:
        busy = self._busy()
        if not busy:
            return
        connection_id = self.random.choice(busy)
        arrived = self.fabric.execute(connection_id, self.random.choice((1, 2, 5, 100)))
        client = self._client_of(connection_id)
        for capsule in arrived:
            client.receive(capsule)
        self.unheard[connection_id] = self.unheard.get(connection_id, 0) + len(arrived)
        if self.random.random() < 0.7:
            self.engine.on_sent(connection_id, self.unheard.pop(connection_id))
            completions = self.fabric.poll(connection_id)
            if completions:
                self.engine.on_fabric(connection_id, completions)
            self._carry_out()

    def _busy(self) -> list[int]:
        """Connections with something to execute, or to tell the engine."""
        return sorted({*self.fabric.busy(), *(number for number, count in self.unheard.items() if count)})

    def _client_of(self, connection_id: int) -> Client:
        return next(client for client in self.clients if client.connection_id == connection_id)

    def _pass_time(self, duration_ns: int) -> None:
        """Advance the clock, waking the engine exactly when it asked for it."""
        target_ns = self.clock.now_ns + duration_ns
        while True:
            wake_ns = self.engine.next_wakeup_ns()
            if wake_ns > target_ns:
                break
            self.clock.now_ns = max(self.clock.now_ns, wake_ns)
            self.engine.tick()
            self._carry_out()
        self.clock.now_ns = target_ns

    def _set_wall_clock(self) -> None:
        """Somebody sets the clock by which blocks expire; what was to expire by it may do so at other times now."""
        self.clock.wall_offset_ns += self.random.choice((-3, -1, 2)) * NS_PER_S
        for block in self.truth.blocks.values():
            block.expires_wall_ns = 0

    def _read_lease(self) -> None:
        """A one-sided READ under a lease: right bytes while it lasts, refused afterwards."""
        leases = [(client, lease) for client in self.clients for lease in client.leases]
        if leases:
            self._check_lease(*self.random.choice(leases))

    def _check_lease(self, client: Client, lease: Lease) -> None:
        data = self.fabric.client_read(client.connection_id, lease.rkey, lease.address, lease.length)
        require(data is None or data == lease.block.value, f"WRONG BYTES under a lease of block {lease.block.number}")
        if data is None:
            require(self.clock.now_ns >= lease.until_ns, f"a lease of block {lease.block.number} ended before its time")
            client.leases.remove(lease)

    def _break_something(self) -> None:
        client = self.random.choice(self.clients)
        self._disconnect(client)
        self._carry_out()
        if self.random.random() < 0.5:
            self._connect(client)
        else:
            self.engine.close_session(client.session_id)
            self.clients.remove(client)
            self._open_session(client.tenant)

    # ---------------------------------------------------------------- the engine's work

    def _carry_out(self) -> None:
        outbox = self.engine.outbox
        while not outbox.empty:
            flash, outbox.flash = outbox.flash, []
            fabric, outbox.fabric = outbox.fabric, []
            responses, outbox.responses = outbox.responses, []
            broken, outbox.broken = outbox.broken, []
            for request in flash:
                self.trace.update(f"{request.tag} {request.op} {request.offset_bytes} {request.length_bytes}".encode())
            if flash:
                self.flash.submit(flash)
            connected = {client.connection_id for client in self.clients}
            for posting in fabric:
                connection_id = posting.connection_id
                if connection_id in connected:
                    self.fabric.post_rdma(*posting[:5])
                    require(
                        self.fabric.posted(connection_id) <= self.scenario.send_wrs_max,
                        "more work requests posted than the queue holds",
                    )
            for connection_id, response in responses:
                if connection_id in connected:
                    self._answered(self._client_of(connection_id), response)
            for connection_id in broken:
                if connection_id in connected and any(c.connection_id == connection_id for c in self.clients):
                    client = self._client_of(connection_id)
                    self._disconnect(client)
                    self._connect(client)

    def _answered(self, client: Client, response: bytes) -> None:
        request = client.requests.get(wire.decode_response(response).request_id)
        if request is not None:
            late_ns = self.clock.now_ns - request.deadline_ns
            require(late_ns <= 0, f"{request.op.name} answered {late_ns} ns after its deadline")
        if request is None or request.op is not Op.LEASE:  # a lease names an address of this process
            self.trace.update(response)
        self.fabric.send(client.connection_id, response)

    def _on_access(self, connection_id: int, opcode: Opcode, address: int, length: int) -> None:
        self._client_of(connection_id).on_access(opcode, address, length)

    # ---------------------------------------------------------------- faults

    def _excuse(self, faults: list[Fault]) -> None:
        """Which blocks may be lost because of silent faults; that none may be wrong needs no list."""
        for fault in faults:
            if fault.kind is FaultKind.MEMORY_CHANGED:
                raise Violation(f"a frame changed while it was being written to flash at {fault.offset_bytes}")
            if fault.kind in (FaultKind.LOST_WRITE, FaultKind.BIT_FLIP):
                for slot in slots_in(self.region.superblock.geometry, fault):
                    block = block_in(self.region.index, slot, self.truth)
                    if block is not None:
                        block.excused = True
                        block.excused_at = self.step_number
                        block.may_vanish()

    # ---------------------------------------------------------------- checks

    def _lookup_all(self) -> list[tuple[Block, BlockState]]:
        """The state of every block, asked through sessions that are made for it."""
        found: list[tuple[Block, BlockState]] = []
        for tenant, handles in TENANTS.items():
            session_id, connection_id = self.next_session, -1
            self.next_session += 1
            self.engine.open_session(session_id, tenant, {h: self.digests[tenant, h] for h in handles})
            self.engine.connected(session_id, connection_id, 0)
            for handle in handles:
                blocks = self.truth.of[self.digests[tenant, handle]]
                entries = wire.keys_array([block.key for block in blocks])
                entries["namespace"] = handle
                self.engine.receive(connection_id, wire.encode(Op.LOOKUP, 1, entries))
                mine = [r for c, r in self.engine.outbox.responses if c == connection_id]
                self.engine.outbox.responses = [r for r in self.engine.outbox.responses if r[0] != connection_id]
                (response,) = [wire.decode_response(capsule) for capsule in mine]
                states = [
                    BlockState(int(row["state"])) if row["status"] == Status.OK else BlockState.ABSENT
                    for row in response.entries
                ]
                found += zip(blocks, states)
            self.engine.close_session(session_id)
            self._carry_out()
        return found

    def _check_counts(self) -> None:
        slots = self.region.superblock.geometry.slots
        accounted = self.engine.slots_accounted()
        require(accounted == slots, f"{accounted} slots are accounted for, of {slots}")

    def _check_pins(self) -> None:
        """No block is evicted while it is pinned (flash may damage it, and it may expire)."""
        index = self.region.index
        if any(client.judge.flash_loses for client in self.clients):
            return
        for block in self.truth.blocks.values():
            if block.pinned_at == NEVER or block.mortal or block.excused or block.pinned_until_ns <= self.clock.now_ns:
                continue
            key = int.from_bytes(block.key[:8], "little"), int.from_bytes(block.key[8:], "little")
            slot = index.find_one(*key, index.find_namespace(block.digest))
            require(slot >= 0, f"block {block.number} is pinned, and gone")

    def _settle(self, done: Callable[[], bool], what: str) -> None:
        """Let everything run its course until `done()`; it must come to that."""
        for _ in range(4000):
            if done():
                return
            self.step_number += 1
            if self.flash.in_flight:
                self._flash()
            elif self._busy():
                self._fabric()
            else:
                self._pass_time(10_000_000)
        raise Violation(f"{what} never ends")

    def _quiesce(self) -> None:
        """All requests are answered, all grants given back: nothing may be left over."""
        for client in self.clients:
            if not client.connection_id:
                continue
            while client.unsent:
                self.step_number += 1
                if len(client.requests) < CREDITS:
                    self._deliver(client)
                else:
                    self._settle(partial(_has_credit, client), "an answer")
        self._settle(lambda: not any(client.requests for client in self.clients), "answering")
        self._pass_time(31 * NS_PER_S)
        self._settle(lambda: not self.flash.in_flight and not self._busy(), "the work of nobody")
        self._pass_time(1 * NS_PER_S)
        self._settle(lambda: not self.flash.in_flight and not self._busy(), "the work of nobody")
        stats = self.engine.stats()
        for stat in (StatId.PENDING, StatId.LEASES, StatId.PINS, StatId.FRAMES_BUSY, StatId.FRAMES_DIRTY):
            require(stats[stat] == 0, f"{stats[stat]} {stat.name} are left when nothing is going on")
        require(self.fabric.grants == 0, f"{self.fabric.grants} leases are still readable when none is granted")
        window = self.engine._context.window
        left = [FrameState(state).name for state in window.state if state not in (FrameState.FREE, FrameState.CLEAN)]
        require(not left, f"frames left over: {left}")
        clean = sum(state == FrameState.CLEAN for state in window.state)
        require(window.free + clean == self.layout.frames, "frames lost")
        for client in self.clients:
            for lease in list(client.leases):
                self._check_lease(client, lease)
            require(not client.leases, "a lease is readable after its time")
        self._check_counts()


def _answered_all(client: Client) -> bool:
    return not client.requests


def _has_credit(client: Client) -> bool:
    return len(client.requests) < CREDITS
