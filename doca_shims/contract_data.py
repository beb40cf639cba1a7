"""Checks of the fabric contract: registration, connecting, and data that must arrive."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing

from doca_shims.api import (
    Access,
    ConnectionState,
    Opcode,
    QueueLimits,
    SendFlags,
    SendRequest,
    Sge,
    ShimError,
)
from doca_shims.contract_harness import (
    ALL_ACCESS,
    WAIT_S,
    FabricHarness,
    Pair,
    Side,
    collect,
    connect_pair,
    expect,
    expect_errno,
    next_request,
    require_one_sided,
    statuses,
    wait_readable,
)

_PAGE_BYTES = mmap.PAGESIZE


def allocated_memory(harness: FabricHarness) -> None:
    """`allocate` gives zeroed, page-aligned, writable memory, and refuses page sizes that are not in caps."""
    with closing(harness.open_fabric()) as fabric:
        for page_bytes in fabric.caps.page_sizes_bytes:
            memory = fabric.allocate(page_bytes + 1, page_bytes)
            expect(memory.address % page_bytes == 0, "the address is not aligned to the page size")
            expect(memory.length_bytes == page_bytes + 1 == len(memory.view), "the length is not what was asked for")
            expect(not any(memory.view), "the memory is not zeroed")
            memory.view[-1:] = b"x"
            expect(ctypes.string_at(memory.address + page_bytes, 1) == b"x", "view and address are not the same bytes")
            memory.close()
            memory.close()
        expect_errno(errno.EINVAL, lambda: fabric.allocate(4096, 12288), "a page size of 12288")
        expect_errno(errno.EINVAL, lambda: fabric.allocate(0), "no bytes")


def registration(harness: FabricHarness) -> None:
    """Bad registrations are refused with verbs' errno; children are closed before their parents."""
    with closing(harness.open_fabric()) as fabric:
        pd = fabric.alloc_pd()
        memory = fabric.allocate(8192)
        at = memory.address
        expect_errno(errno.EINVAL, lambda: pd.register(at, 0, ALL_ACCESS), "zero length")
        expect_errno(errno.EINVAL, lambda: pd.register(at, 4096, Access.REMOTE_WRITE), "REMOTE_WRITE alone")
        expect_errno(errno.EFAULT, lambda: pd.register(4096, 4096, ALL_ACCESS), "memory that is not mapped")
        region = pd.register(at + 100, 5000, Access.LOCAL_WRITE)
        expect((region.address, region.length_bytes) == (at + 100, 5000), "the region is not what was registered")
        other = pd.register(at + 100, 5000, Access.LOCAL_WRITE)
        expect(region.rkey != other.rkey and region.lkey != other.lkey, "two regions share a key")
        expect_errno(errno.EBUSY, memory.close, "memory with regions")
        expect_errno(errno.EBUSY, pd.close, "a domain with regions")
        expect_errno(errno.EBUSY, fabric.close, "a device with a domain")
        for child in (region, region, other, memory, pd, pd):
            child.close()


def read_only_memory(harness: FabricHarness) -> None:
    """Memory that this process may not write cannot be registered for writing, only for reading."""
    with closing(harness.open_fabric()) as fabric, closing(fabric.alloc_pd()) as pd:
        mapping = mmap.mmap(-1, 2 * _PAGE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE_BYTES), mmap.PROT_READ)
        expect_errno(
            errno.EFAULT, lambda: pd.register(address, 2 * _PAGE_BYTES, Access.LOCAL_WRITE), "a read-only page"
        )
        pd.register(address, 2 * _PAGE_BYTES, Access.REMOTE_READ).close()


def connecting(harness: FabricHarness) -> None:
    """Private data reaches both sides; both are READY, quiet, and know whom they talk to."""
    with Pair(harness) as pair:
        a, b = pair.a.connection, pair.b.connection
        told = sorted((a.private_data, b.private_data))
        expect(told == [b"from the client", b"from the server"], "private data was lost")
        expect(a.state == b.state == ConnectionState.READY, "a side is not READY")
        expect(a.peer and b.peer, "a peer has no name")
        expect(a.poll() == [] and b.poll() == [], "completions out of nothing")
        expect(not wait_readable(a.fileno(), 0) and not wait_readable(b.fileno(), 0), "readable without cause")


def refused(harness: FabricHarness) -> None:
    """Nobody listening, a rejection, and nobody answering, each with its errno; a listener's address is its own."""
    with closing(harness.open_fabric()) as fabric:
        side = Side(fabric)
        limits = QueueLimits()
        listener = fabric.listen(harness.new_address())
        address = listener.address
        expect_errno(errno.EADDRINUSE, lambda: fabric.listen(address), "an address in use")
        caught: list[ShimError] = []

        def connect(timeout_s: float) -> None:
            try:
                fabric.connect(address, side.pd, limits, (), b"hello", timeout_s)
            except ShimError as error:
                caught.append(error)

        thread = threading.Thread(target=connect, args=(WAIT_S,))
        thread.start()
        request = next_request(listener)
        expect(request.private_data == b"hello", "the request lost its private data")
        request.reject("no room today")
        thread.join()
        expect(caught[0].errno == errno.ECONNREFUSED, f"a rejection is {caught[0]}")
        expect("no room today" in str(caught[0]), "the reason of a rejection was lost")
        connect(0.1)
        expect(caught[1].errno == errno.ETIMEDOUT, f"no answer is {caught[1]}")
        listener.close()
        listener.close()
        connect(WAIT_S)
        expect(caught[2].errno == errno.ECONNREFUSED, f"nobody listening is {caught[2]}")
        expect_errno(errno.EINVAL, lambda: fabric.connect(address, side.pd, limits, (), bytes(57)), "57 private bytes")
        too_many = QueueLimits(max_send_wr=fabric.caps.max_send_wr + 1)
        expect_errno(errno.EINVAL, lambda: fabric.connect(address, side.pd, too_many), "a queue beyond caps")
        side.close()


def send_and_receive(harness: FabricHarness) -> None:
    """Messages of all sizes arrive whole and in order in the receives posted, gathered from several elements."""
    sizes = (1, 0, 17, 4096, 65536, 3)
    with Pair(harness, memory_bytes=1 << 20) as pair:
        a, b = pair.a, pair.b
        a.memory.view[:65536] = os.urandom(65536)
        b.connection.post_recv([b.recv(i, i * 65536, 65536) for i in range(len(sizes))])
        a.connection.post_send([a.send(i, 0, size) for i, size in enumerate(sizes)])
        sent = collect(a.connection, len(sizes))
        expect([(c.wr_id, c.opcode) for c in sent] == [(i, Opcode.SEND) for i in range(len(sizes))], f"sent: {sent}")
        got = collect(b.connection, len(sizes))
        expect([(c.wr_id, c.byte_count) for c in got] == list(enumerate(sizes)), f"received: {got}")
        expect(all(c.opcode == Opcode.RECV and c.status == 0 for c in got), f"received: {got}")
        for i, size in enumerate(sizes):
            expect(b.memory.view[i * 65536 :][:size] == a.memory.view[:size], f"message {i} is damaged")
        b.connection.post_recv([b.recv(9, 0, 4096)])
        a.connection.post_send([SendRequest(9, Opcode.SEND, (a.sge(100, 7), a.sge(5, 0), a.sge(50000, 90)))])
        expect(collect(b.connection, 1)[0].byte_count == 97, "a gathered message has another length")
        expect(
            b.memory.view[:97] == bytes(a.memory.view[100:107]) + bytes(a.memory.view[50000:50090]), "gathered wrong"
        )


def many_messages(harness: FabricHarness) -> None:
    """A stream of messages through few receives: none lost, none doubled, order kept, unsignalled ones silent."""
    count = 500
    with Pair(harness, recvs=8) as pair:
        a, b = pair.a, pair.b
        sent = received = 0
        deadline_s = time.monotonic() + WAIT_S
        while received < count:
            expect(time.monotonic() < deadline_s, f"{received} of {count} messages after {WAIT_S} s")
            for _ in range(min(5, count - sent)):
                if sent - received < 64:
                    a.memory.view[65536 + sent * 8 :][:8] = sent.to_bytes(8, "little")
                    flags = SendFlags.SIGNALED if sent % 16 == 15 else SendFlags.NONE
                    a.connection.post_send([a.send(sent, 65536 + sent * 8, 8, flags)])
                    sent += 1
            for completion in a.connection.poll():
                expect(completion.status == 0 and completion.wr_id % 16 == 15, f"sender: {completion}")
            if not wait_readable(b.connection.fileno(), 0.05):
                continue
            for completion in b.connection.poll():
                place = completion.wr_id * 4096
                expect(bytes(b.memory.view[place : place + 8]) == received.to_bytes(8, "little"), "order was lost")
                b.connection.post_recv([b.recv(completion.wr_id, place, 4096)])
                received += 1


def _transfers(pair: Pair, remote: tuple[int, int], remote_bytes: Callable[[], bytes]) -> None:
    a = pair.a
    data = os.urandom(100_000)
    a.memory.view[: len(data)] = data
    pieces = tuple(a.sge(offset, 25_000) for offset in (75_000, 0, 50_000, 25_000))
    a.connection.post_send(
        [
            SendRequest(1, Opcode.RDMA_WRITE, pieces, *remote),
            SendRequest(2, Opcode.RDMA_READ, (a.sge(300_000, 10), a.sge(200_000, 99_990)), *remote),
            SendRequest(3, Opcode.RDMA_WRITE, (), *remote),
        ]
    )
    done = collect(a.connection, 3)
    expect([(c.wr_id, c.status) for c in done] == [(1, 0), (2, 0), (3, 0)], f"completions: {done}")
    expect(done[1].byte_count == 100_000, "a READ says another length")
    wanted = data[75_000:] + data[:25_000] + data[50_000:75_000] + data[25_000:50_000]
    expect(remote_bytes() == wanted, "a WRITE put other bytes there")
    read = bytes(a.memory.view[300_000:300_010]) + bytes(a.memory.view[200_000:299_990])
    expect(read == wanted, "a READ gave other bytes")


def write_and_read_allocated(harness: FabricHarness) -> None:
    """READ and WRITE with scatter lists on memory from `allocate`, without the peer's doing anything."""
    with Pair(harness) as pair:
        _transfers(pair, pair.b.at(12345), lambda: bytes(pair.b.memory.view[12345:112345]))


def write_and_read_given(harness: FabricHarness) -> None:
    """The same on memory that was merely given: a bytearray, and a region that is registered while connected."""
    with Pair(harness) as pair:
        buffer = bytearray(120_000)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        with closing(pair.b.pd.register(address, len(buffer), ALL_ACCESS, buffer)) as region:
            _transfers(pair, (address + 77, region.rkey), lambda: bytes(buffer[77:100_077]))
        source = bytearray(os.urandom(50_000))
        address = ctypes.addressof(ctypes.c_char.from_buffer(source))
        with closing(pair.a.pd.register(address, len(source), Access.LOCAL_WRITE, source)) as region:
            request = SendRequest(5, Opcode.RDMA_WRITE, (Sge(address, 50_000, region.lkey),), *pair.b.at(0))
            pair.a.connection.post_send([request])
            expect(statuses(collect(pair.a.connection, 1)) == [0], "a WRITE from given memory failed")
            expect(pair.b.memory.view[:50_000] == source, "a WRITE from given memory put other bytes there")


def both_directions(harness: FabricHarness) -> None:
    """Two sides READ and WRITE each other with more in flight than any buffer holds, and neither blocks."""
    size, count = 1 << 20, 12
    with Pair(harness, memory_bytes=2 * size * count) as pair:
        require_one_sided(pair.fabric)
        for side, other in ((pair.a, pair.b), (pair.b, pair.a)):
            half = size * count
            requests = [
                side.transfer(
                    i, (Opcode.RDMA_READ, Opcode.RDMA_WRITE)[i % 2], (i * size, size), other.at(half + i * size)
                )
                for i in range(count)
            ]
            side.memory.view[:half] = bytes([1 if side is pair.a else 2]) * half
            side.connection.post_send(requests)
        for side in (pair.a, pair.b):
            done = collect(side.connection, count)
            expect([(c.wr_id, c.status) for c in done] == [(i, 0) for i in range(count)], f"completions: {done}")
        expect(
            pair.b.memory.view[size * (count + 1)] == 1 and pair.a.memory.view[size * (count + 1)] == 2, "WRITE lost"
        )


def write_before_send(harness: FabricHarness) -> None:
    """A SEND posted after a WRITE arrives after the WRITE's bytes, although the WRITE is unsignalled."""
    with Pair(harness, recvs=4) as pair:
        a, b = pair.a, pair.b
        for turn in range(1, 30):
            a.memory.view[65536 : 65536 + 300_000] = bytes([turn]) * 300_000
            write = a.transfer(0, Opcode.RDMA_WRITE, (65536, 300_000), b.at(65536), SendFlags.NONE)
            a.connection.post_send([write, a.send(1, 0, 8)])
            received = collect(b.connection, 1)[0]
            expect(b.memory.view[65536 + 299_999] == turn, "a message overtook the bytes that were written before it")
            b.connection.post_recv([b.recv(received.wr_id, received.wr_id * 4096, 4096)])
            expect([c.wr_id for c in collect(a.connection, 1)] == [1], "an unsignalled WRITE produced a completion")


def local_completions_are_announced(harness: FabricHarness) -> None:
    """The descriptor is readable when `post_send` alone made completions, and quiet when they are polled."""
    with Pair(harness) as pair:
        a = pair.a
        for _ in range(3):
            a.connection.post_send([a.transfer(i, Opcode.RDMA_WRITE, (0, 64), pair.b.at(0)) for i in range(5)])
            expect(wait_readable(a.connection.fileno()), "completions are not announced")
            expect(len(collect(a.connection, 5)) == 5, "completions are missing")
            expect(a.connection.poll() == [], "more completions than requests")
            expect(not wait_readable(a.connection.fileno(), 0), "readable with nothing to poll")


def poll_is_bounded(harness: FabricHarness) -> None:
    """`poll(n)` returns at most n, in order, and keeps the rest."""
    with Pair(harness) as pair:
        a = pair.a
        a.connection.post_send([a.transfer(i, Opcode.RDMA_WRITE, (0, 64), pair.b.at(0)) for i in range(9)])
        order: list[int] = []
        while len(order) < 9:
            expect(wait_readable(a.connection.fileno()) or order, "completions are not announced")
            found = a.connection.poll(2)
            expect(len(found) <= 2, "more completions than asked for")
            order += [completion.wr_id for completion in found]
        expect(order == list(range(9)), f"order {order}")


def memory_comes_and_goes(harness: FabricHarness) -> None:
    """Memory of every page size is allocated, registered, used and freed again and again on one connection, and
    nothing stays mapped."""

    def mapped() -> int:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            return sum(1 for _ in maps)

    with Pair(harness) as pair:
        counts = []
        sizes = pair.fabric.caps.page_sizes_bytes
        for turn in range(20):
            memory = pair.fabric.allocate(65536, sizes[turn % len(sizes)])
            with closing(pair.b.pd.register(memory.address, 65536, ALL_ACCESS)) as region:
                pair.a.memory.view[:1] = bytes([turn])
                write = pair.a.transfer(turn, Opcode.RDMA_WRITE, (0, 1), (memory.address + 9, region.rkey))
                pair.a.connection.post_send([write])
                expect(statuses(collect(pair.a.connection, 1)) == [0], "a WRITE to new memory failed")
                expect(memory.view[9] == turn, "a WRITE went to other memory")
            memory.close()
            counts.append(mapped())
        expect(counts[-1] <= counts[4] + 4, f"mappings after each turn: {counts}")


def two_connections_of_one_domain(harness: FabricHarness) -> None:
    """Regions of a domain serve all its connections, and a closed connection leaves the others alone."""
    with Pair(harness) as pair:
        require_one_sided(pair.fabric)
        extra = Side(pair.fabric)
        shared = pair.b
        first = shared.connection
        with closing(pair.fabric.listen(harness.new_address())) as listener:
            connect_pair(listener, extra, shared, QueueLimits())
        first.close()
        extra.memory.view[:4] = b"more"
        extra.connection.post_send([extra.transfer(1, Opcode.RDMA_WRITE, (0, 4), shared.at(500))])
        expect(statuses(collect(extra.connection, 1)) == [0], "the other connection died too")
        expect(bytes(shared.memory.view[500:504]) == b"more", "the bytes are not there")
        extra.close()


CHECKS: list[Callable[[FabricHarness], None]] = [
    allocated_memory,
    registration,
    read_only_memory,
    connecting,
    refused,
    send_and_receive,
    many_messages,
    write_and_read_allocated,
    write_and_read_given,
    both_directions,
    write_before_send,
    local_completions_are_announced,
    poll_is_bounded,
    memory_comes_and_goes,
    two_connections_of_one_domain,
]
