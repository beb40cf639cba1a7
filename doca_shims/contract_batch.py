"""Checks of the fabric contract: `post_rdma`, many READs or WRITEs by one doorbell and one completion.

The same rules as for `post_send` hold for every request of it; what is its own is that it completes once.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing

from doca_shims.api import (
    RDMA_REQUEST,
    Access,
    ConnectionState,
    Opcode,
    QueueLimits,
    SendFlags,
    WcStatus,
)
from doca_shims.contract_harness import (
    MEMORY_BYTES,
    FabricHarness,
    Pair,
    Side,
    collect,
    expect,
    expect_errno,
    statuses,
    wait_readable,
)

_Request = tuple[int, int, int, int, int, int]
_PIECE_BYTES = 2048


def _request(pair: Pair, local: int, remote: int, length: int) -> _Request:
    """One request between offsets of the two memories."""
    address, rkey = pair.b.at(remote)
    sge = pair.a.sge(local, length)
    return sge.address, address, length, sge.lkey, rkey, 0


def _pack(requests: Sequence[_Request]) -> bytes:
    return b"".join(RDMA_REQUEST.pack(*request) for request in requests)


def packed_transfers(harness: FabricHarness) -> None:
    """WRITEs and READs of many sizes, from places of any order, move the right bytes and complete once a batch."""
    sizes = [1, 0, 7, 64, 4096, 65536, 300_000, 3]
    with Pair(harness, memory_bytes=2 << 20) as pair:
        a, b = pair.a, pair.b
        a.memory.view[: 1 << 20] = os.urandom(1 << 20)
        before = bytes(a.memory.view[: 1 << 20])
        offsets = [sum(sizes[index + 1 :]) for index in range(len(sizes))]
        writes = [_request(pair, at, at + 100, size) for at, size in zip(offsets, sizes)]
        a.connection.post_rdma(5, Opcode.RDMA_WRITE, _pack(writes))
        expect(wait_readable(a.connection.fileno()), "the completion is not announced")
        done = collect(a.connection, 1)
        expect([(c.wr_id, c.status, c.opcode) for c in done] == [(5, 0, Opcode.RDMA_WRITE)], f"completions: {done}")
        total = sum(sizes)
        expect(bytes(b.memory.view[100 : 100 + total]) == before[:total], "WRITEs put other bytes there")
        expect(not any(b.memory.view[:100]) and not any(b.memory.view[100 + total :]), "WRITEs went beyond")
        reads = [_request(pair, (1 << 20) + at, at + 100, size) for at, size in zip(offsets, sizes)]
        a.connection.post_rdma(6, Opcode.RDMA_READ, bytearray(_pack(reads)))
        done = collect(a.connection, 1)
        expect([(c.wr_id, c.status, c.opcode) for c in done] == [(6, 0, Opcode.RDMA_READ)], f"completions: {done}")
        expect(bytes(a.memory.view[1 << 20 :][:total]) == before[:total], "READs gave other bytes")
        expect(a.connection.poll() == [], "more completions than batches")


def packed_in_order(harness: FabricHarness) -> None:
    """Batches, unsignalled ones and SENDs keep their order; the caller may use its bytes again at once."""
    with Pair(harness, recvs=8) as pair:
        a, b = pair.a, pair.b
        for turn in range(1, 9):
            a.memory.view[65536 : 2 * 65536] = bytes([turn]) * 65536
            packed = bytearray(_pack([_request(pair, 65536 + i * 512, 65536 + i * 512, 512) for i in range(128)]))
            quiet = SendFlags.NONE if turn % 2 else SendFlags.SIGNALED
            a.connection.post_rdma(turn, Opcode.RDMA_WRITE, memoryview(packed), quiet)
            packed[:] = bytes(len(packed))
            a.connection.post_send([a.send(100, 0, 8)])
            received = collect(b.connection, 1)
            expect(statuses(received) == [0], f"received: {received}")
            whole = bytes(b.memory.view[65536 : 2 * 65536]) == bytes([turn]) * 65536
            expect(whole, "a message overtook the bytes that were written before it")
            wanted = [100] if turn % 2 else [turn, 100]
            expect([c.wr_id for c in collect(a.connection, len(wanted))] == wanted, "completions of another order")
        expect(a.connection.poll() == [], "an unsignalled batch completed")


def packed_waits_behind_a_send(harness: FabricHarness) -> None:
    """A batch behind a SEND that waits for a receive is carried out after it, and not before."""
    with Pair(harness) as pair:
        a, b = pair.a, pair.b
        a.memory.view[:8] = b"whatever"
        a.connection.post_send([a.send(1, 0, 8)])
        a.connection.post_rdma(2, Opcode.RDMA_WRITE, _pack([_request(pair, 0, 4096 + i * 8, 8) for i in range(5)]))
        expect(a.connection.poll() == [], "a SEND completed with no receive for it")
        expect(not any(b.memory.view[4096:8192]), "a WRITE overtook a SEND")
        b.connection.post_recv([b.recv(7, 0, 64)])
        done = collect(a.connection, 2)
        expect([(c.wr_id, c.status) for c in done] == [(1, 0), (2, 0)], f"completions: {done}")
        expect(bytes(b.memory.view[4096 : 4096 + 40]) == b"whatever" * 5, "WRITEs behind a SEND are lost")


def packed_flushed(harness: FabricHarness) -> None:
    """A batch that was never begun is flushed by one completion, signalled or not."""
    for flags in (SendFlags.SIGNALED, SendFlags.NONE):
        with Pair(harness) as pair:
            a, b = pair.a, pair.b
            a.memory.view[:8] = b"whatever"
            a.connection.post_send([a.send(1, 0, 8)])  # no receive: it waits
            batch = _pack([_request(pair, 0, 4096, 8)] * 3)
            a.connection.post_rdma(2, Opcode.RDMA_WRITE, batch, flags)
            a.connection.post_rdma(3, Opcode.RDMA_WRITE, batch, flags)
            b.connection.close()
            done = collect(a.connection, 3)
            expect([c.wr_id for c in done] == [1, 2, 3] and all(statuses(done)), f"flushed: {done}")
            expect(a.connection.poll() == [], "something was flushed twice")
            expect(not any(b.memory.view[4096:8192]), "bytes of a flushed batch moved")
            expect_errno(errno.ENOTCONN, lambda: a.connection.post_rdma(4, Opcode.RDMA_WRITE, batch), "post in ERROR")  # noqa: B023


def packed_and_closed(harness: FabricHarness) -> None:
    """A closed connection takes no batch."""
    with Pair(harness) as pair:
        pair.a.connection.close()
        batch = _pack([_request(pair, 0, 0, 8)])
        expect_errno(errno.ENOTCONN, lambda: pair.a.connection.post_rdma(1, Opcode.RDMA_WRITE, batch), "CLOSED")


def packed_nonsense(harness: FabricHarness) -> None:
    """No request, part of one, a reserved field and other opcodes are EINVAL, and nothing of them is posted."""
    with Pair(harness) as pair:
        a = pair.a
        good = _pack([_request(pair, 0, 0, 8)] * 2)
        reserved = good + RDMA_REQUEST.pack(*_request(pair, 0, 0, 8)[:5], 1)
        for opcode, requests in (
            (Opcode.RDMA_WRITE, b""),
            (Opcode.RDMA_WRITE, good[:-1]),
            (Opcode.RDMA_WRITE, good + b"\0"),
            (Opcode.RDMA_WRITE, reserved),
            (Opcode.SEND, good),
            (Opcode.RECV, good),
        ):
            expect_errno(
                errno.EINVAL,
                lambda opcode=opcode, requests=requests: a.connection.post_rdma(1, opcode, requests),  # type: ignore[misc]
                f"{len(requests)} bytes of {opcode.name}",
            )
        expect(a.connection.poll() == [], "a refused batch was posted")
        expect(a.connection.state == ConnectionState.READY, "nonsense ended the connection")
        a.connection.post_rdma(9, Opcode.RDMA_WRITE, good)
        expect([(c.wr_id, c.status) for c in collect(a.connection, 1)] == [(9, 0)], "a good batch failed")


def packed_overflow(harness: FabricHarness) -> None:
    """Each request takes a slot: a batch beyond the queue is refused whole, and slots come back by polling."""
    with Pair(harness, QueueLimits(max_send_wr=8, max_recv_wr=4, max_sge=1)) as pair:
        a = pair.a
        eight = _pack([_request(pair, 0, 0, 8)] * 8)
        nine = eight + eight[: RDMA_REQUEST.size]
        expect_errno(errno.ENOMEM, lambda: a.connection.post_rdma(1, Opcode.RDMA_WRITE, nine), "9 requests of 8")
        expect(a.connection.poll() == [], "a refused batch was partly posted")
        for turn in range(3):
            a.connection.post_rdma(turn, Opcode.RDMA_WRITE, eight)
            expect(wait_readable(a.connection.fileno()), "nothing completes")
            expect_errno(
                errno.ENOMEM,
                lambda: a.connection.post_rdma(7, Opcode.RDMA_WRITE, eight[: RDMA_REQUEST.size]),
                "a ninth request, before polling",
            )
            expect([c.wr_id for c in collect(a.connection, 1)] == [turn], "completions are missing")
        a.connection.post_rdma(1, Opcode.RDMA_WRITE, eight[: 7 * RDMA_REQUEST.size], SendFlags.NONE)
        a.connection.post_rdma(2, Opcode.RDMA_READ, eight[: RDMA_REQUEST.size])
        expect([c.wr_id for c in collect(a.connection, 1)] == [2], "an unsignalled batch completed")
        a.connection.post_rdma(3, Opcode.RDMA_WRITE, eight)
        expect([c.wr_id for c in collect(a.connection, 1)] == [3], "slots of an unsignalled batch are lost")


def _expect_failure(pair: Pair, bad: _Request, opcode: Opcode, status: WcStatus, what: str) -> None:
    """`bad`, in the midst of good requests, ends the batch there, once, and flushes what is posted behind it."""
    a, b = pair.a, pair.b
    a.memory.view[:_PIECE_BYTES] = b"\x77" * _PIECE_BYTES
    a.connection.post_recv([a.recv(4, MEMORY_BYTES // 2, 64)])
    place = MEMORY_BYTES // 4
    first, second = (_request(pair, i * 1024, place + i * 1024, 1024) for i in range(2))
    a.connection.post_rdma(2, opcode, _pack([first, bad, second, second]), SendFlags.NONE)
    try:
        a.connection.post_rdma(3, Opcode.RDMA_WRITE, _pack([second, second]))
        behind = [(3, WcStatus.WR_FLUSH_ERR)]
    except OSError as error:  # it is in ERROR already
        expect(error.errno == errno.ENOTCONN, f"{what}: posting behind it: {error}")
        behind = []
    done = collect(a.connection, 2 + len(behind))
    told = sorted((c.wr_id, c.status) for c in done)
    expect(told == [(2, status), *behind, (4, WcStatus.WR_FLUSH_ERR)], f"{what}: {done}")
    expect(a.connection.poll() == [], f"{what}: more completions")
    expect(a.connection.state == ConnectionState.ERROR, f"{what}: the connection is {a.connection.state.name}")
    if opcode is Opcode.RDMA_WRITE:
        wanted = b"\x77" * 1024 + bytes(1024)
        expect(bytes(b.memory.view[place:][:_PIECE_BYTES]) == wanted, f"{what}: other bytes moved than those before it")
    else:
        expect(bytes(a.memory.view[:_PIECE_BYTES]) == bytes(1024) + b"\x77" * 1024, f"{what}: other bytes were read")


def packed_remote_misuse(harness: FabricHarness) -> None:
    """A wrong rkey, and ranges outside the region, are REM_ACCESS_ERR, for READ and WRITE, large and small."""
    for opcode in (Opcode.RDMA_WRITE, Opcode.RDMA_READ):
        for field, value in ((4, 0x5A5A), (1, -1), (1, MEMORY_BYTES - 63), (1, 1 << 40), (1, 1 << 63)):
            with Pair(harness) as pair:
                bad = list(_request(pair, 0, 0, 64))
                bad[field] = bad[field] ^ value if field == 4 else (bad[field] + value) % (1 << 64)
                _expect_failure(pair, _of(bad), opcode, WcStatus.REM_ACCESS_ERR, f"field {field} off by {value}")
        with Pair(harness) as pair:
            address = (1 << 64) - 8  # address + length wraps round
            bad = [*_request(pair, 0, 0, 64)[:1], address, 64, pair.a.region.lkey, pair.b.region.rkey, 0]
            _expect_failure(pair, _of(bad), opcode, WcStatus.REM_ACCESS_ERR, "a range past the end of all memory")


def packed_remote_access(harness: FabricHarness) -> None:
    """WRITE needs REMOTE_WRITE and READ needs REMOTE_READ at the target; another domain's key is no key."""
    wrong = {Opcode.RDMA_WRITE: Access.LOCAL_WRITE | Access.REMOTE_READ, Opcode.RDMA_READ: Access.LOCAL_WRITE}
    for opcode, access in wrong.items():
        with Pair(harness) as pair, closing(pair.b.pd.register(pair.b.memory.address, 4096, access)) as region:
            bad = (*_request(pair, 0, 0, 64)[:4], region.rkey, 0)
            _expect_failure(pair, bad, opcode, WcStatus.REM_ACCESS_ERR, f"access {access!r}")
        with Pair(harness) as pair, closing(Side(pair.fabric)) as other:
            bad = (*_request(pair, 0, 0, 64)[:4], other.region.rkey, 0)
            _expect_failure(pair, bad, opcode, WcStatus.REM_ACCESS_ERR, "another domain's rkey")


def packed_local_misuse(harness: FabricHarness) -> None:
    """Unknown lkey, another domain's, ranges outside the region, READ without LOCAL_WRITE: LOC_PROT_ERR."""
    for opcode in (Opcode.RDMA_WRITE, Opcode.RDMA_READ):
        for field, value in ((3, 1), (0, -1), (0, MEMORY_BYTES - 63), (0, 1 << 40)):
            with Pair(harness) as pair:
                bad = list(_request(pair, 0, 0, 64))
                bad[field] = bad[field] ^ value if field == 3 else bad[field] + value
                _expect_failure(pair, _of(bad), opcode, WcStatus.LOC_PROT_ERR, f"field {field} off by {value}")
        with Pair(harness) as pair:
            bad = [*_request(pair, 0, 0, 64)[:3], pair.b.region.lkey, pair.b.region.rkey, 0]
            _expect_failure(pair, _of(bad), opcode, WcStatus.LOC_PROT_ERR, "another domain's lkey")
        with Pair(harness) as pair:
            bad = [(1 << 64) - 8, *_request(pair, 0, 0, 64)[1:]]
            _expect_failure(pair, _of(bad), opcode, WcStatus.LOC_PROT_ERR, "a range past the end of all memory")
    with Pair(harness) as pair, closing(pair.a.pd.register(pair.a.memory.address, 64, Access(0))) as region:
        bad = [*_request(pair, 0, 0, 64)[:3], region.lkey, pair.b.region.rkey, 0]
        _expect_failure(pair, _of(bad), Opcode.RDMA_READ, WcStatus.LOC_PROT_ERR, "READ without LOCAL_WRITE")


def packed_stale_keys(harness: FabricHarness) -> None:
    """Keys that worked in the last batch are dead in the next, once their regions are deregistered."""
    for opcode in (Opcode.RDMA_WRITE, Opcode.RDMA_READ):
        for local in (True, False):
            with Pair(harness) as pair:
                side = pair.a if local else pair.b
                region = side.pd.register(side.memory.address, 4096, side.region.access)
                request = list(_request(pair, 0, 0, 64))
                request[3 if local else 4] = region.lkey if local else region.rkey
                pair.a.connection.post_rdma(1, opcode, _pack([_of(request)] * 2))
                expect(statuses(collect(pair.a.connection, 1)) == [0], "the key does not work while it should")
                region.close()
                status = WcStatus.LOC_PROT_ERR if local else WcStatus.REM_ACCESS_ERR
                _expect_failure(pair, _of(request), opcode, status, "a stale key")


def packed_given_memory(harness: FabricHarness) -> None:
    """Requests on memory from `allocate` and on memory that was merely given, mixed in one batch."""
    with Pair(harness) as pair:
        a, b = pair.a, pair.b
        given = (bytearray(65536), bytearray(65536))
        sources = [side.pd.register(_address(part), 65536, b.region.access, part) for side, part in zip((a, b), given)]
        try:
            a.memory.view[:65536] = os.urandom(65536)
            given[0][:] = os.urandom(65536)
            lkeys = ((a.memory.address, a.region.lkey), (_address(given[0]), sources[0].lkey))
            rkeys = ((b.memory.address, b.region.rkey), (_address(given[1]), sources[1].rkey))
            batch = [
                (here + (2 * j + i) * 100, there + (2 * j + i) * 100, 100, lkey, rkey, 0)
                for i, (here, lkey) in enumerate(lkeys)
                for j, (there, rkey) in enumerate(rkeys)
            ]
            a.connection.post_rdma(1, Opcode.RDMA_WRITE, _pack(batch))
            expect(statuses(collect(a.connection, 1)) == [0], "WRITEs of mixed memory failed")
            source = (a.memory.view, memoryview(given[0]))
            target = (b.memory.view, memoryview(given[1]))
            for i in range(2):
                for j in range(2):
                    part = slice((2 * j + i) * 100, (2 * j + i) * 100 + 100)
                    expect(target[j][part] == source[i][part], f"bytes from memory {i} to memory {j}")
        finally:
            for region in sources:
                region.close()


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _of(fields: Sequence[int]) -> _Request:
    local, remote, length, lkey, rkey, reserved = fields
    return local, remote, length, lkey, rkey, reserved


CHECKS: list[Callable[[FabricHarness], None]] = [
    packed_transfers,
    packed_in_order,
    packed_waits_behind_a_send,
    packed_given_memory,
    packed_flushed,
    packed_and_closed,
    packed_nonsense,
    packed_overflow,
    packed_remote_misuse,
    packed_remote_access,
    packed_local_misuse,
    packed_stale_keys,
]
