"""The channel between supervisor and worker: answers find their calls, every wait ends, and neither side blocks."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.errors import DeadlineError, EntresolError, InternalError, LowerLayerError, UserError
from dpu_app import worker_channel
from dpu_app.worker_channel import ChannelClosedError, Message, SupervisorEnd, WorkerEnd


class Ends:
    def __init__(self) -> None:
        theirs, ours = worker_channel.socketpair()
        self.events: list[Message] = []
        self.closed = asyncio.Event()
        self.supervisor = SupervisorEnd(theirs, self.events.append, self.closed.set)
        self.worker_socket: socket.socket = ours
        self.worker = WorkerEnd(ours)

    async def worker_receives(self, count: int) -> list[Message]:
        messages: list[Message] = []
        while len(messages) < count:
            messages += self.worker.recv()
            await asyncio.sleep(0)
        return messages


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    both = Ends()
    yield both
    both.supervisor.close()
    both.worker.close()


async def test_answers_find_their_calls_in_any_order(ends: Ends) -> None:
    first = ends.supervisor.call("status", {"n": 1}, 5)
    second = ends.supervisor.call("drain", {"n": 2}, 5)
    requests = await ends.worker_receives(2)
    assert [request["method"] for request in requests] == ["status", "drain"]
    for request in reversed(requests):
        ends.worker.reply(request["id"], {"n": request["params"]["n"] * 10})
    assert await first == {"n": 10}
    assert await second == {"n": 20}


async def test_the_start_message_comes_first(ends: Ends) -> None:
    ends.supervisor.start({"region": {"name": "r"}})
    [message] = await ends.worker_receives(1)
    assert message == {"event": "start", "config": {"region": {"name": "r"}}}


@pytest.mark.parametrize(
    "error",
    [
        UserError("do other"),
        LowerLayerError("open", errno.ENOSPC, "x"),
        OSError(errno.EIO, "broken"),
        DeadlineError("late"),
        InternalError("bug"),
        KeyError("bug"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_comes_back_as_its_kind(ends: Ends, error: Exception) -> None:
    call = ends.supervisor.call("status", {}, 5)
    [request] = await ends.worker_receives(1)
    ends.worker.reply_error(request["id"], error)
    with pytest.raises(EntresolError) as caught:
        await call
    assert str(caught.value) == str(error)
    if isinstance(error, OSError):
        assert isinstance(caught.value, LowerLayerError)
        assert caught.value.errno == errno.EIO
    elif isinstance(error, EntresolError):
        assert type(caught.value) is type(error)
    else:
        assert type(caught.value) is InternalError


async def test_events_reach_the_supervisor(ends: Ends) -> None:
    ends.worker.event("ready", address="a")
    ends.worker.failed(UserError("bad superblock"))
    while len(ends.events) < 2:
        await asyncio.sleep(0)
    assert ends.events == [
        {"event": "ready", "address": "a"},
        {"event": "failed", "kind": "user", "message": "bad superblock"},
    ]


async def test_a_call_without_an_answer_ends_at_its_deadline_and_a_late_answer_is_dropped(ends: Ends) -> None:
    with pytest.raises(DeadlineError, match="did not answer status"):
        await ends.supervisor.call("status", {}, 0.001)
    [request] = await ends.worker_receives(1)
    ends.worker.reply(request["id"])
    again = ends.supervisor.call("status", {}, 5)
    [request] = await ends.worker_receives(1)
    ends.worker.reply(request["id"], {"fresh": True})
    assert await again == {"fresh": True}


async def test_the_workers_death_ends_calls_and_is_told_once(ends: Ends) -> None:
    call = ends.supervisor.call("status", {}, 5)
    await ends.worker_receives(1)
    ends.worker.close()
    with pytest.raises(ChannelClosedError):
        await call
    await asyncio.wait_for(ends.closed.wait(), 5)
    with pytest.raises(ChannelClosedError):
        await ends.supervisor.call("status", {}, 5)


async def test_what_the_worker_said_before_its_death_is_heard(ends: Ends) -> None:
    ends.worker.event("failed", message="last words")
    ends.worker.close()
    await asyncio.wait_for(ends.closed.wait(), 5)
    assert [event["message"] for event in ends.events] == ["last words"]


async def test_a_message_that_is_no_message_closes_the_channel(ends: Ends) -> None:
    ends.worker_socket.send(b"\xff not json")
    await asyncio.wait_for(ends.closed.wait(), 5)


async def test_the_supervisor_queues_what_a_stopped_worker_does_not_take(ends: Ends) -> None:
    count = 600  # more than a socket buffer holds
    calls = [(ends.supervisor.call("m", {"pad": "x" * 2000}, 30)) for _ in range(count)]
    await asyncio.sleep(0)
    answered = 0
    while answered < count:
        for request in ends.worker.recv():
            ends.worker.reply(request["id"])
            answered += 1
        await asyncio.sleep(0)
    await asyncio.gather(*calls)


def test_the_worker_never_blocks_and_gives_up_on_a_supervisor_that_does_not_read() -> None:
    theirs, ours = worker_channel.socketpair()
    worker = WorkerEnd(ours)

    def tell(count: int) -> None:
        for _ in range(count):
            worker.event("connection_lost", session_id=1)

    with pytest.raises(ChannelClosedError, match="unread"):
        tell(100_000)
    assert worker.wants_write
    theirs.setblocking(False)
    received = 0
    while worker.wants_write:
        theirs.recv(worker_channel.MESSAGE_BYTES_MAX)
        received += 1
        worker.flush()
    assert received > 0
    theirs.close()
    with pytest.raises(ChannelClosedError):
        worker.recv()
    worker.close()


def test_an_oversized_message_is_refused_and_leaves_the_channel_sound() -> None:
    theirs, ours = worker_channel.socketpair()
    worker = WorkerEnd(ours)
    with pytest.raises(InternalError, match="too large"):
        worker.event("x", text="y" * worker_channel.MESSAGE_BYTES_MAX)
    worker.event("x")
    assert worker_channel.decode(theirs.recv(100)) == {"event": "x"}
    theirs.close()
    worker.close()
