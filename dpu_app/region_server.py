"""The event loop of a region worker: carries capsules, completions and time to the engine, and its work out.

Owns the sockets and nothing of the region's state. Waits in epoll for the fabric's listener and connections, the
flash device and the supervisor's channel, and after a request for a short time by looking again; never blocks anywhere
else. Started by `dpu_app.worker`.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from common.wire import CONNECT_DATA
from doca_shims.api import (
    RDMA_REQUEST,
    Clock,
    ConnectionRequest,
    Fabric,
    FlashCompletion,
    FlashDevice,
    Listener,
    Memory,
    ShimError,
)
from dpu_app.background_task import BackgroundTask
from dpu_app.busy_poll import BusyPoll
from dpu_app.capsule_queue import CapsuleQueue
from dpu_app.flash_errors import FlashErrorLog
from dpu_app.peer import Peer
from dpu_app.regions.context import TURN_MOVED_MAX, Posting
from dpu_app.regions.engine import RegionEngine
from dpu_app.supervisor_calls import Methods, SupervisorCalls
from dpu_app.turn_times import Cause, Schedule, TurnTimes
from dpu_app.worker_channel import Message, WorkerEnd

NS_PER_S = 1_000_000_000
TURNS_PER_LOOK = 16
"""While connections are being polled, the other descriptors are looked at once in so many turns of the loop,"""
LOOK_NS = 200_000
"""or after so long: a busy agent's turns may take milliseconds, and another one's first request waits for a look."""
SOON_BYTES = 16 * RDMA_REQUEST.size
"""Of a posting that is small enough to look in the same turn whether it is through; what follows a larger one takes
milliseconds, and is left to the next."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegionFacts:
    """What the worker tells of its region; fixed while it runs."""

    name: str
    uuid: str
    slot_bytes: int
    slots: int
    capacity_bytes: int
    generation: int


class RegionServer:
    def __init__(
        self,
        facts: RegionFacts,
        engine: RegionEngine,
        peers: dict[int, Peer],
        fabric: Fabric,
        listener: Listener,
        flash: FlashDevice,
        window: Memory,
        channel: WorkerEnd,
        clock: Clock,
        credits: int,
        send_wrs_max: int,
        busy_poll: BusyPoll,
    ) -> None:
        self._facts = facts
        self._engine = engine
        self._peers = peers
        self._fabric = fabric
        self._listener = listener
        self._flash = flash
        self._flash_errors = FlashErrorLog(facts.name)
        self._window = window
        self._clock = clock
        self._times = TurnTimes(clock.monotonic_ns, Schedule())
        self._credits = credits
        self._send_wrs_max = send_wrs_max
        self._tokens: dict[int, bytes] = {}
        self._peer_by_fd: dict[int, int] = {}
        self._unsettled: set[int] = set()
        """Connections to look at in this turn of the loop: each promises to wake it only once polled empty."""
        self._capsules = CapsuleQueue()
        self._moved = 0
        """Bytes of what was posted in this turn."""
        self._busy_poll = busy_poll
        self._turns_to_look = 0
        self._look_at_ns = 0
        self._next_connection = 0
        self._epoll = select.epoll()
        for source in (listener, flash):
            self._epoll.register(source.fileno(), select.EPOLLIN)
        methods: Methods = {
            "session_open": self._session_open,
            "session_namespace": self._session_namespace,
            "session_close": self._session_close,
            "status": self._status,
            "pauses": lambda _: self._times.report(),
        }
        self._supervisor = SupervisorCalls(channel, engine, clock, self._epoll, methods)

    # ---------------------------------------------------------------- loop

    def run(
        self, restore_order: Callable[[], None] | None = None, ticked: Callable[[int], None] = lambda _: None
    ) -> None:
        """Until the supervisor says stop or is gone. Afterwards `drained` says whether all is on flash.
        `restore_order` is done meanwhile, in a thread of its own; `ticked` is called after each of the engine's ticks,
        with the blocks under way."""
        self._ticked = ticked
        with self._times, BackgroundTask(restore_order) as self._restoring:
            self._epoll.register(self._restoring.fileno(), select.EPOLLIN)
            self._serve()

    def _serve(self) -> None:
        engine, times = self._engine, self._times
        rest = Cause.RECEIVE
        while not self._stopped():
            now_ns = times.turn(rest)
            rest = Cause.RECEIVE
            if not self._unsettled or not self._turns_to_look or now_ns >= self._look_at_ns:
                self._look(now_ns)
            self._turns_to_look -= 1
            self._capsules.begin_turn()
            self._moved = 0
            if self._capsules:
                self._hear()
            for connection_id in tuple(self._unsettled):
                self._poll_peer(connection_id, now_ns)
            if now_ns >= engine.next_wakeup_ns():
                times.mark(Cause.RECEIVE)
                engine.tick()
                self._ticked(engine.blocks_under_way)
                times.mark(Cause.TICK)
            if not engine.outbox.empty:
                times.mark(Cause.RECEIVE)
                self._carry_out(now_ns)
                rest = Cause.OUTPUT
            if self._supervisor.busy:
                self._supervisor.serve()

    def _hear(self) -> None:
        """What earlier turns left."""
        for connection_id, capsule in self._capsules.next():
            self._engine.receive(connection_id, capsule)
            if self._engine.outbox.full:
                self._capsules.end_turn()

    def _look(self, now_ns: int) -> None:
        """At all descriptors; until something comes or is due, where no connection needs to be polled."""
        self._turns_to_look = TURNS_PER_LOOK
        self._look_at_ns = now_ns + LOOK_NS
        left_ns = 0 if self._unsettled or self._capsules else max(0, self._engine.next_wakeup_ns() - now_ns)
        ready = self._epoll.poll(left_ns / NS_PER_S)
        self._times.awake()
        for fd, _ in ready:
            self._ready(fd)

    @property
    def drained(self) -> bool:
        return self._engine.drained

    def close(self) -> None:
        """Close every connection."""
        for connection_id in list(self._peers):
            self._drop(connection_id)
        self._epoll.close()
        self._times.close()

    def _stopped(self) -> bool:
        return self._supervisor.stopped

    def _ready(self, fd: int) -> None:
        connection_id = self._peer_by_fd.get(fd)
        if connection_id is not None:
            self._unsettled.add(connection_id)
        elif fd == self._flash.fileno():
            completions = self._flash.poll()
            self._flash_errors.note(completions, self._clock.monotonic_ns())
            self._engine.on_flash(completions)
            self._times.mark(Cause.FLASH)
        elif fd == self._listener.fileno():
            while (request := self._listener.accept()) is not None:
                self._accept(request)
            self._times.mark(Cause.CONTROL)
        elif fd == self._supervisor.fileno():
            self._supervisor.receive()
            self._times.mark(Cause.CONTROL)
        elif fd == self._restoring.fileno():
            self._epoll.unregister(fd)
            self._restoring.finish()
            self._engine.order_restored()

    # ---------------------------------------------------------------- the engine's work

    def _carry_out(self, now_ns: int) -> None:
        """Ends, however fast agents are: what they send meanwhile is left to the loop's next turn."""
        outbox = self._engine.outbox
        first = True
        while not outbox.empty:
            completing = self._put_out()
            if first and completing:
                for connection_id in sorted(completing):  # a transfer may be through already
                    self._poll_peer(connection_id, now_ns)
            first = False

    def _put_out(self) -> set[int] | None:
        """Start what the outbox holds; the connections where some of it will complete."""
        outbox = self._engine.outbox
        completing: set[int] | None = None
        if outbox.fabric:
            fabric, outbox.fabric = outbox.fabric, []
            completing = self._post(fabric)
        if outbox.responses:
            responses, outbox.responses = outbox.responses, []
            self._send(responses)
        if outbox.flash:  # last: handing over a hundred writes takes longer than to answer the agent
            flash, outbox.flash = outbox.flash, []
            self._submit(flash)
        if outbox.broken:
            broken, outbox.broken = outbox.broken, []
            for connection_id in broken:
                self._drop(connection_id, "a transfer failed")
        return completing

    def _post(self, fabric: list[Posting]) -> set[int] | None:
        """READs and WRITEs; the connections where few are, which may be complete already."""
        completing: set[int] | None = None
        for connection_id, wr_id, opcode, requests, flags, moved in fabric:
            peer = self._peers.get(connection_id)
            if peer is None:
                continue
            try:
                peer.post(wr_id, opcode, requests, flags)
            except ShimError as error:
                self._drop(connection_id, str(error))
                continue
            self._moved += moved
            self._unsettled.add(connection_id)
            if flags and len(requests) <= SOON_BYTES:
                completing = completing or set()
                completing.add(connection_id)
        if self._moved >= TURN_MOVED_MAX:
            self._capsules.end_turn()
        return completing

    def _send(self, responses: list[tuple[int, bytes]]) -> None:
        answers: dict[int, list[bytes]]
        if len(responses) == 1:
            ((connection_id, response),) = responses
            answers = {connection_id: [response]}
        else:
            answers = {}
            for connection_id, response in responses:
                answers.setdefault(connection_id, []).append(response)
        for connection_id, capsules in answers.items():
            peer = self._peers.get(connection_id)
            if peer is None:
                continue
            try:
                peer.send(capsules)
            except ShimError as error:
                self._drop(connection_id, str(error))
            else:
                self._unsettled.add(connection_id)

    def _submit(self, requests: list[Any]) -> None:
        try:
            self._flash.submit(requests)
        except ShimError as error:
            _LOG.error("flash refused a batch: %s", error)
            self._engine.on_flash([FlashCompletion(request.tag, -(error.errno or 5)) for request in requests])

    # ---------------------------------------------------------------- peers

    def _accept(self, request: ConnectionRequest) -> None:
        if len(request.private_data) != CONNECT_DATA.size:
            request.reject("not an Entresol agent: no session in the connection request")
            return
        session_id, token = CONNECT_DATA.unpack(request.private_data)
        expected = self._tokens.get(session_id)
        if expected is None or not hmac.compare_digest(expected, token):
            request.reject("no such session: open one with the DPU's control plane first")
            return
        for connection_id, peer in list(self._peers.items()):
            if peer.session_id == session_id:
                self._drop(connection_id, "replaced by a new connection")
        try:
            peer = Peer(
                self._fabric,
                request,
                self._window,
                self._facts.slot_bytes,
                bytes.fromhex(self._facts.uuid),
                self._credits,
                self._send_wrs_max,
            )
        except ShimError as error:
            _LOG.warning("could not accept %s: %s", request.peer, error)
            with contextlib.suppress(ShimError):  # answered already, where accepting it is what failed
                request.reject("this region cannot take another connection now")
            return
        self._next_connection += 1
        connection_id = self._next_connection
        self._peers[connection_id] = peer
        self._peer_by_fd[peer.fileno()] = connection_id
        self._epoll.register(peer.fileno(), select.EPOLLIN)
        self._engine.connected(session_id, connection_id, peer.window_lkey)
        self._unsettled.add(connection_id)

    def _poll_peer(self, connection_id: int, now_ns: int) -> None:
        """Take what has come. Where nothing has, the connection is left alone until its descriptor tells, unless it is
        worth looking again."""
        peer = self._peers.get(connection_id)
        if peer is None:
            return
        engine = self._engine
        looking = self._busy_poll.goes_on(now_ns)
        while True:
            try:
                polled = peer.poll(arm=not looking)
            except ShimError as error:
                self._drop(connection_id, str(error))
                return
            if polled is None:
                break
            capsules, work, sent = polled
            if sent:
                engine.on_sent(connection_id, sent)
            if work:
                engine.on_fabric(connection_id, work)
            if capsules:
                self._busy_poll.served()
                self._receive(connection_id, peer, capsules)
            if work or capsules:
                if self._peers.get(connection_id) is peer:
                    self._unsettled.add(connection_id)  # whether there is more, the next turn sees
                return
        if peer.lost:
            self._drop(connection_id, "the agent is gone")
        elif looking:
            os.sched_yield()
        else:
            self._unsettled.discard(connection_id)

    def _receive(self, connection_id: int, peer: Peer, capsules: list[memoryview]) -> None:
        engine = self._engine
        for capsule in self._capsules.take(connection_id, capsules):
            if self._peers.get(connection_id) is not peer:
                return
            engine.receive(connection_id, capsule)
            if engine.outbox.fabric and len(capsules) > 1:
                self._put_out()  # the agent works on the answer to one while the next one's bytes are moved
        if engine.outbox.full:
            self._capsules.end_turn()

    def _drop(self, connection_id: int, reason: str = "") -> None:
        peer = self._peers.get(connection_id)
        if peer is None:
            return
        self._unsettled.discard(connection_id)
        self._capsules.drop(connection_id)
        self._epoll.unregister(peer.fileno())
        del self._peer_by_fd[peer.fileno()]
        peer.close()
        self._engine.disconnected(connection_id)
        del self._peers[connection_id]
        if reason:
            _LOG.info(
                "connection closed", extra={"peer": peer.name, "session": f"{peer.session_id:016x}", "reason": reason}
            )
            self._supervisor.tell("connection_lost", session_id=peer.session_id, reason=reason)

    # ---------------------------------------------------------------- the supervisor's calls

    def _session_open(self, params: dict[str, Any]) -> Message:
        session_id = int(params["session_id"])
        namespaces = {int(item["handle"]): bytes.fromhex(item["digest"]) for item in params["namespaces"]}
        self._tokens[session_id] = bytes.fromhex(params["token"])
        self._engine.open_session(session_id, str(params["tenant"]), namespaces)
        return {}

    def _session_namespace(self, params: dict[str, Any]) -> Message:
        session_id = int(params["session_id"])
        if session_id not in self._tokens:
            raise UserError(f"no session {session_id}")
        self._engine.add_namespace(session_id, int(params["handle"]), bytes.fromhex(params["digest"]))
        return {}

    def _session_close(self, params: dict[str, Any]) -> Message:
        session_id = int(params["session_id"])
        self._tokens.pop(session_id, None)
        for connection_id, peer in list(self._peers.items()):
            if peer.session_id == session_id:
                self._drop(connection_id)
        self._engine.close_session(session_id)
        return {}

    def _status(self, params: dict[str, Any]) -> Message:
        del params
        facts = self._facts
        region = {
            "name": facts.name,
            "uuid": facts.uuid,
            "slot_bytes": facts.slot_bytes,
            "slots": facts.slots,
            "capacity_bytes": facts.capacity_bytes,
            "generation": facts.generation,
            "state": "draining" if self._supervisor.draining else "serving",
            "address": self._listener.address,
        }
        return {"region": region, "stats": {stat.name: value for stat, value in self._engine.stats().items()}}
