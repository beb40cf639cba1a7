"""Checks of the fabric contract: owners that poll in a loop, and more messages than any buffer between them holds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from doca_shims.api import Completion, Opcode, QueueLimits
from doca_shims.contract_harness import (
    WAIT_S,
    FabricHarness,
    Pair,
    collect,
    expect,
    statuses,
    wait_readable,
)


def looking_without_arming(harness: FabricHarness) -> None:
    """`poll(arm=False)` finds what a plain poll finds. After it, one empty plain poll makes the descriptor tell again,
    whatever comes between the two; messages and completions are announced from then on."""
    with Pair(harness, recvs=16) as pair:
        a, b = pair.a.connection, pair.b.connection
        for turn in range(12):
            a.post_send([pair.a.send(turn, 0, 8)])
            deadline_s = time.monotonic() + WAIT_S
            found: list[Completion] = []
            while not found and turn % 3 != 1:
                found = b.poll(arm=False)
                expect(time.monotonic() < deadline_s, "looking without arming does not find a message")
            if turn % 3 == 2:
                expect(b.poll(arm=False) == [] and b.poll() == [], "a message came twice")
                pair.b.connection.post_send([pair.b.send(turn, 0, 8)])
                expect(wait_readable(b.fileno()) and collect(b, 1), "a completion of its own is not announced")
                expect([c.opcode for c in collect(a, 2)].count(Opcode.RECV) == 1, "the other way lost a message")
                a.post_recv([pair.a.recv(0, 0, 64)])
            else:
                expect(statuses(collect(a, 1)) == [0], "a message that arrived was not sent")
            found += collect(b, 1 - len(found))
            expect([c.opcode for c in found] == [Opcode.RECV], f"found: {found}")
            expect(b.poll() == [], "a message came twice")
            expect(not wait_readable(b.fileno(), 0), "readable with nothing to poll")
            b.post_recv([pair.b.recv(found[0].wr_id, 4096 * found[0].wr_id, 4096)])
            a.post_send([pair.a.send(turn, 0, 8)])
            expect(wait_readable(b.fileno()), "armed by an empty poll, and a message is not announced")
            again = collect(b, 1) + collect(a, 1)
            b.post_recv([pair.b.recv(again[0].wr_id, 4096 * again[0].wr_id, 4096)])
            expect(b.poll(arm=False) == [] and b.poll() == [] and a.poll() == [], "completions out of nothing")


def ping_pong_without_arming(harness: FabricHarness) -> None:
    """Two owners that only look keep a message going to and fro, and neither loses its place when it stops to."""
    with Pair(harness, recvs=2) as pair:
        sides = (pair.a, pair.b)
        for turn in range(600):
            here, there = sides[turn % 2], sides[1 - turn % 2]
            here.memory.view[65536:65544] = turn.to_bytes(8, "little")
            here.connection.post_send([here.send(7, 65536, 8)])
            plain = turn % 100 >= 97  # now and then both sleep
            for side, opcode in ((there, Opcode.RECV), (here, Opcode.SEND)):
                deadline_s = time.monotonic() + WAIT_S
                found: list[Completion] = []
                while not found:
                    expect(time.monotonic() < deadline_s, f"turn {turn}: nothing comes")
                    found = collect(side.connection, 1) if plain else side.connection.poll(arm=False)
                expect([(c.opcode, c.status) for c in found] == [(opcode, 0)], f"turn {turn}: {found}")
                if opcode == Opcode.RECV:
                    place = found[0].wr_id * 4096
                    expect(side.memory.view[place : place + 8] == here.memory.view[65536:65544], "another message")
                    side.connection.post_recv([side.recv(found[0].wr_id, place, 4096)])
            if turn % 100 >= 96:
                expect(there.connection.poll() == [] and here.connection.poll() == [], "a message came twice")


def lost_while_looking(harness: FabricHarness) -> None:
    """An owner that only looks learns, too, that its peer has gone."""
    with Pair(harness, recvs=1) as pair:
        expect(pair.a.connection.poll(arm=False) == [], "completions out of nothing")
        pair.b.connection.close()
        deadline_s = time.monotonic() + WAIT_S
        found: list[Completion] = []
        while not found:
            expect(time.monotonic() < deadline_s, "the loss of the peer is never seen")
            found = pair.a.connection.poll(arm=False)
        expect(all(statuses(found)), f"the peer has gone: {found}")


def messages_beyond_any_buffer(harness: FabricHarness) -> None:
    """Large and small messages, posted faster than they are taken, all arrive whole and in order."""
    size, count = 60_000, 64
    lengths = [(size, 10, 30_000, 0, 5000)[i % 5] for i in range(count)]
    with Pair(harness, QueueLimits(max_recv_wr=count), memory_bytes=2 * count * size) as pair:
        a, b = pair.a, pair.b
        for turn in range(2):
            a.memory.view[: count * size] = os.urandom(count * size)
            b.connection.post_recv([b.recv(i, (count + i) * size, size) for i in range(count)])
            for i in range(0, count, 8):
                a.connection.post_send([a.send(j, j * size, lengths[j]) for j in range(i, i + 8)])
            sent: list[Completion] = []
            got: list[Completion] = []
            deadline_s = time.monotonic() + WAIT_S
            while len(sent) + len(got) < 2 * count:
                sent += a.connection.poll(arm=turn == 0)
                got += b.connection.poll(3, arm=turn == 0)
                expect(time.monotonic() < deadline_s, f"{len(sent)} sent and {len(got)} received of {count}")
            expect([c.wr_id for c in sent] == list(range(count)) and not any(statuses(sent)), f"sent: {sent}")
            expect([(c.wr_id, c.byte_count) for c in got] == list(enumerate(lengths)), f"received: {got}")
            for i, length in enumerate(lengths):
                taken = b.memory.view[(count + i) * size :][:length]
                expect(taken == a.memory.view[i * size :][:length], f"message {i} is damaged")


CHECKS: list[Callable[[FabricHarness], None]] = [
    looking_without_arming,
    ping_pong_without_arming,
    lost_while_looking,
    messages_beyond_any_buffer,
]
