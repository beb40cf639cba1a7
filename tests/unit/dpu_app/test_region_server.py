"""The region server's loop among agents that behave badly: its turns end, credits bind, no agent ends it for others."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common import wire
from common.status import Status
from common.wire import CONNECT_DATA, Op, StatId
from doca_shims.api import Completion, ConnectionState, Opcode, RecvRequest, SendFlags, SendRequest, ShimError, WcStatus
from dpu_app import capsule_queue
from dpu_app.busy_poll import BusyPoll
from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.peer import Peer
from dpu_app.region_server import RegionFacts, RegionServer
from dpu_app.worker_channel import ChannelClosedError, Message
from tests.unit.dpu_app.regions.engine_world import SLOT_BYTES, World, content, key, statuses

pytestmark = pytest.mark.usefixtures("both_ways")

CREDITS = 4
TOKEN = b"t" * 16
KEYS = [key(i) for i in range(4)]


class _Event:
    """A descriptor that is readable from `set` on."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


class AgentConnection(_Event):
    """The server's side of a connection and the agent at its other end, in one. `heard` is called with each answer
    as it is sent."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.state = ConnectionState.READY
        self.answers: list[wire.Capsule] = []
        self.heard: Callable[[wire.Capsule], None] = lambda _: None
        self.hold_sent = False
        self.fail_posts = False
        self._held: list[Completion] = []
        self._receives: deque[RecvRequest] = deque()
        self._unsent: deque[bytes] = deque()
        self._queue: deque[Completion] = deque()
        self._ids = itertools.count(1)

    # the agent

    def ask(self, op: Op, entries: Any, **options: Any) -> None:
        self._unsent.append(wire.encode(op, next(self._ids), entries, **options))
        self._flow()

    def release_sent(self) -> None:
        self._queue.extend(self._held)
        self._held.clear()
        self.set()

    def _flow(self) -> None:
        while self._unsent and self._receives:
            capsule, receive = self._unsent.popleft(), self._receives.popleft()
            np.ctypeslib.as_array(_bytes_at(receive.sge.address, len(capsule)))[:] = np.frombuffer(capsule, np.uint8)
            self._queue.append(Completion(receive.wr_id, WcStatus.SUCCESS, Opcode.RECV, len(capsule)))
        self.set()

    # doca_shims.api.Connection

    def post_recv(self, requests: Sequence[RecvRequest]) -> None:
        self._receives.extend(requests)
        self._flow()

    def post_send(self, requests: Sequence[SendRequest]) -> None:
        if self.fail_posts:
            raise ShimError(errno.ENOTCONN, "ibv_post_send", "the peer has just gone")
        for request in requests:
            (sge,) = request.sges
            done = Completion(request.wr_id, WcStatus.SUCCESS, Opcode.SEND, sge.length)
            (self._held if self.hold_sent else self._queue).append(done)
            answer = wire.decode_response(bytes(_bytes_at(sge.address, sge.length)))
            self.answers.append(answer)
            self.heard(answer)
        self.set()

    def post_rdma(self, wr_id: int, opcode: Opcode, requests: bytes, flags: SendFlags) -> None:
        if self.fail_posts:
            raise ShimError(errno.ENOTCONN, "ibv_post_send", "the peer has just gone")
        self._queue.extend(self.world.perform(wr_id, opcode, requests, flags))
        self.set()

    def poll(self, max_completions: int = 256, arm: bool = True) -> list[Completion]:
        del arm
        out = [self._queue.popleft() for _ in range(min(max_completions, len(self._queue)))]
        if not self._queue:
            try:
                os.eventfd_read(self.fileno())
            except BlockingIOError:
                return out
        return out


def _bytes_at(address: int, length: int) -> Any:
    return (ctypes.c_ubyte * length).from_address(address)


class Domain:
    def __init__(self) -> None:
        self._keys = itertools.count(1)

    def register(self, address: int, length_bytes: int, access: Any, owner: object = None) -> Any:
        del address, length_bytes, access, owner
        number = next(self._keys)
        return SimpleNamespace(lkey=number, rkey=number, close=lambda: None)

    def close(self) -> None: ...


class Channel(_Event):
    """The worker's end of the supervisor's channel."""

    wants_write = False

    def __init__(self) -> None:
        super().__init__()
        self.messages: deque[Message] = deque()
        self.gone = False
        self.events: list[str] = []
        self.seen: Callable[[], None] = lambda: None

    def say(self, message: Message) -> None:
        self.messages.append(message)
        self.set()

    def recv(self) -> list[Message]:
        self.seen()
        out = list(self.messages)
        self.messages.clear()
        return out

    def reply(self, request_id: int, result: Message | None = None) -> None:
        del request_id, result
        if self.gone:
            raise ChannelClosedError("gone")

    def reply_error(self, request_id: int, error: BaseException) -> None:
        del error
        self.reply(request_id)

    def event(self, name: str, **fields: Any) -> None:
        del fields
        self.events.append(name)

    def flush(self) -> None: ...


class Rig:
    """A region server on an engine in memory, with one agent connected and four blocks stored."""

    def __init__(self, busy_poll_ns: int = 0) -> None:
        self.world = World(frames=16)
        self.world.store(KEYS)
        self.world.settle()
        self.world.engine.disconnected(1)
        self.channel, self.listener, self.flash = Channel(), _Event(), _Event()
        self.peers: dict[int, Peer] = {}
        self.requests: deque[Any] = deque()
        self.fabric = SimpleNamespace(allocate=AnonymousMemory, alloc_pd=Domain)
        vars(self.listener).update(address="a", accept=lambda: self.requests.popleft() if self.requests else None)
        vars(self.flash).update(poll=self.world.flash.poll, submit=self._submit)
        facts = RegionFacts("r", "00" * 16, SLOT_BYTES, self.world.slots, 0, 1)
        server: Any = RegionServer
        self.server: RegionServer = server(
            facts,
            self.world.engine,
            self.peers,
            self.fabric,
            self.listener,
            self.flash,
            self.world.memory,
            self.channel,
            self.world.clock,
            CREDITS,
            1024,
            BusyPoll(busy_poll_ns),
        )
        namespaces = [{"handle": 1, "digest": (b"n" * 16).hex()}]
        for session_id in (9, 10):
            opening = {"session_id": session_id, "token": TOKEN.hex(), "tenant": "t", "namespaces": namespaces}
            self.channel.say({"id": 1, "method": "session_open", "params": opening})
        self.turn()

    def _submit(self, requests: Any) -> None:
        self.world.flash.submit(requests)
        self.flash.set()

    def connect(self, session_id: int = 9) -> AgentConnection:
        connection = AgentConnection(self.world)

        def accept(pd: Any, limits: Any, recvs: Any, private_data: bytes) -> AgentConnection:
            del pd, limits, private_data
            connection.post_recv(recvs)
            return connection

        request = SimpleNamespace(private_data=CONNECT_DATA.pack(session_id, TOKEN), peer="agent", accept=accept)
        self.requests.append(request)
        self.listener.set()
        return connection

    def turn(self, count: int = 1) -> None:
        """Let the loop go round some times, then stop it; a test may go on afterwards."""
        left = [count]

        def stopped() -> bool:
            left[0] -= 1
            return left[0] < 0

        vars(self.server)["_stopped"] = stopped
        self.channel.set()  # so that no turn waits
        self.server.run()

    def close(self) -> None:
        self.server.close()
        for owned in (self.channel, self.listener, self.flash):
            owned.close()


@pytest.fixture(params=[0, 1000], ids=["sleeps", "busy polling"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The clock stands still, so that busy polling never ends of itself."""
    rig = Rig(request.param)
    yield rig
    rig.close()


def test_requests_are_answered(rig: Rig) -> None:
    agent = rig.connect()
    rig.turn(2)
    agent.ask(Op.RETRIEVE, rig.world.block_entries(KEYS, 0))
    rig.turn(2)
    assert statuses(agent.answers[0]) == [Status.OK] * 4
    assert bytes(rig.world.client.view[:SLOT_BYTES]) == content(KEYS[0])


def test_an_agent_that_never_pauses_does_not_keep_the_loop(rig: Rig) -> None:
    """Each answer brings the next request before the loop has looked elsewhere."""
    agent = rig.connect()
    rig.turn(2)
    left = iter(range(1000))

    def ask_again(_: wire.Capsule) -> None:
        if next(left, None) is not None:
            agent.ask(Op.RETRIEVE, rig.world.block_entries(KEYS[:1], 0))

    agent.heard = ask_again
    agent.ask(Op.RETRIEVE, rig.world.block_entries(KEYS[:1], 0))
    rig.turn()
    assert 1 <= len(agent.answers) < 10
    before = len(agent.answers)
    rig.turn(50)
    assert len(agent.answers) >= before + 50


def test_beside_an_agent_with_long_turns_another_is_heard_in_the_next(rig: Rig) -> None:
    busy, quiet = rig.connect(), rig.connect(10)
    rig.turn(3)

    def ask_again(_: wire.Capsule) -> None:
        rig.world.clock.now_ns += 2_000_000  # so long was the turn
        busy.ask(Op.RETRIEVE, rig.world.block_entries(KEYS, 0))

    busy.heard = ask_again
    busy.ask(Op.RETRIEVE, rig.world.block_entries(KEYS, 0))
    rig.turn(20)
    for number in range(1, 6):
        quiet.ask(Op.LOOKUP, rig.world.key_entries(KEYS))
        rig.turn(2)
        assert len(quiet.answers) == number
    assert len(busy.answers) > 20


def test_many_requests_at_once_are_heard_turn_by_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One agent sends as many as it has credits for, each as large as a turn takes; another's is heard in between."""
    monkeypatch.setattr(capsule_queue, "TURN_BYTES", 256)
    busy, quiet = rig.connect(), rig.connect(10)
    rig.turn(3)
    for _ in range(CREDITS):
        busy.ask(Op.RETRIEVE, rig.world.block_entries(KEYS, 0))
    quiet.ask(Op.LOOKUP, rig.world.key_entries(KEYS))
    heard = []
    receive = rig.world.engine.receive

    def hear(connection_id: int, capsule: wire.ReadableBuffer) -> None:
        heard.append(connection_id)
        receive(connection_id, capsule)

    monkeypatch.setattr(rig.world.engine, "receive", hear)
    turns = []
    for _ in range(CREDITS + 3):
        rig.turn()
        turns.append(len(heard))
        heard.clear()
    assert sum(turns) == CREDITS + 1
    assert max(turns) <= 2
    assert len(quiet.answers) == 1
    assert [answer.request_id for answer in busy.answers] == list(range(1, CREDITS + 1))
    assert all(statuses(answer) == [Status.OK] * 4 for answer in busy.answers)


def test_a_connection_that_goes_takes_its_waiting_requests_along(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capsule_queue, "TURN_BYTES", 1)
    agent = rig.connect()
    rig.turn(3)
    for _ in range(CREDITS):
        agent.ask(Op.RETRIEVE, rig.world.block_entries(KEYS, 0))
    agent.fail_posts = True
    rig.turn(5)
    assert not rig.peers
    assert not rig.server._capsules


def test_one_answer_does_not_wait_for_the_next_ones_bytes(rig: Rig) -> None:
    """Both requests come in one turn: the agent works on the first answer while the second's bytes are moved."""
    agent = rig.connect()
    rig.turn(2)
    moved = []
    second = rig.world.client.view[SLOT_BYTES : 2 * SLOT_BYTES]
    second[:] = bytes(SLOT_BYTES)
    agent.heard = lambda _: moved.append(bytes(second) == content(KEYS[1]))
    for place in range(2):
        agent.ask(Op.RETRIEVE, rig.world.block_entries([KEYS[place]], 0, at=[place * SLOT_BYTES]))
    rig.turn(3)
    assert [statuses(answer) for answer in agent.answers] == [[Status.OK]] * 2
    assert moved == [False, True]


def test_a_connection_that_breaks_at_one_answer_drops_the_requests_behind_it(rig: Rig) -> None:
    agent = rig.connect()
    rig.turn(2)

    def gone(_: wire.Capsule) -> None:
        raise ShimError(errno.ENOTCONN, "ibv_post_send", "gone")

    agent.heard = gone
    second = rig.world.client.view[SLOT_BYTES : 2 * SLOT_BYTES]
    second[:] = bytes(SLOT_BYTES)
    for place in range(3):
        agent.ask(Op.RETRIEVE, rig.world.block_entries([KEYS[place]], 0, at=[place * SLOT_BYTES]))
    rig.turn(3)
    assert bytes(second) == bytes(SLOT_BYTES)
    other = rig.connect()
    rig.turn(2)
    other.ask(Op.LOOKUP, rig.world.key_entries(KEYS))
    rig.turn(3)
    assert statuses(other.answers[0]) == [Status.OK] * 4


def test_an_agent_that_ignores_its_credits_waits_for_itself(rig: Rig) -> None:
    agent = rig.connect()
    rig.turn(2)
    vars(rig.flash)["submit"] = lambda _: None  # flash never answers, so no store is durable
    for _ in range(10 * CREDITS):
        agent.ask(Op.STORE, rig.world.block_entries([key(100)], SLOT_BYTES), flags=wire.Flags.UNTIL_FLASH)
    for _ in range(30):
        rig.turn()
        assert 0 < rig.world.engine.stats()[StatId.PENDING] <= CREDITS


def test_every_request_is_answered_though_sending_is_slow(rig: Rig) -> None:
    agent = rig.connect()
    rig.turn(2)
    agent.hold_sent = True
    for _ in range(5 * CREDITS):
        agent.ask(Op.LOOKUP, rig.world.key_entries(KEYS))
    for _ in range(20):
        rig.turn()
        agent.release_sent()
    assert [answer.request_id for answer in agent.answers] == list(range(1, 5 * CREDITS + 1))


def test_a_connection_that_breaks_under_a_waiting_answer_ends_alone(rig: Rig) -> None:
    agent = rig.connect()
    rig.turn(2)
    agent.hold_sent = True
    for _ in range(2 * CREDITS):
        agent.ask(Op.LOOKUP, rig.world.key_entries(KEYS))
    rig.turn(4)
    assert len(agent.answers) == CREDITS
    agent.fail_posts = True
    agent.release_sent()
    rig.turn(2)
    assert not rig.peers
    assert "connection_lost" in rig.channel.events


def test_an_agent_for_which_there_is_no_memory_is_told(rig: Rig) -> None:
    def no_memory(length_bytes: int) -> AnonymousMemory:
        raise ShimError(errno.ENOMEM, "allocate", f"{length_bytes} bytes")

    vars(rig.fabric)["allocate"] = no_memory
    told: list[str] = []
    rig.connect()
    vars(rig.requests[0])["reject"] = told.append
    rig.turn()
    assert len(told) == 1


def test_a_supervisor_that_dies_during_a_drain_is_no_fault(rig: Rig) -> None:
    rig.channel.say({"id": 2, "method": "drain", "params": {"timeout_s": 60}})
    rig.channel.gone = True
    rig.turn(3)
    del vars(rig.server)["_stopped"]
    rig.server.run()  # told to stop by the loss itself
    assert rig.server.drained
