"""Checks of the fabric contract: what hardware refuses must be refused, with the same errno or completion status.

After a completion with error the connection is in ERROR, what was posted behind it is flushed, and no byte moved.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from contextlib import closing

from doca_shims.api import (
    Access,
    Connection,
    ConnectionState,
    Opcode,
    QueueLimits,
    RecvRequest,
    SendFlags,
    SendRequest,
    Sge,
    ShimError,
    WcStatus,
)
from doca_shims.contract_harness import (
    ALL_ACCESS,
    MEMORY_BYTES,
    FabricHarness,
    Pair,
    Side,
    SkippedError,
    collect,
    expect,
    expect_errno,
    statuses,
    wait_readable,
)

_LOST = (WcStatus.WR_FLUSH_ERR, WcStatus.RETRY_EXC_ERR)


def _expect_failure(pair: Pair, request: SendRequest, status: WcStatus, what: str) -> None:
    """`request`, posted between a good one and another, must complete with `status` and flush what follows."""
    a, b = pair.a, pair.b
    before = bytes(b.memory.view)
    good = a.transfer(1, Opcode.RDMA_READ, (0, 8), b.at(0), SendFlags.NONE)
    after = a.transfer(3, Opcode.RDMA_WRITE, (0, 8), b.at(0), SendFlags.NONE)
    a.connection.post_recv([a.recv(4, 0, 64)])
    a.connection.post_send([good, request._replace(wr_id=2, flags=SendFlags.NONE), after])
    done = collect(a.connection, 3)
    expect(
        [(c.wr_id, c.status) for c in done] == [(2, status), (3, WcStatus.WR_FLUSH_ERR), (4, WcStatus.WR_FLUSH_ERR)],
        f"{what}: {done}",
    )
    expect(a.connection.state == ConnectionState.ERROR, f"{what}: the connection is {a.connection.state.name}")
    expect_errno(errno.ENOTCONN, lambda: a.connection.post_send([good]), f"{what}: post_send in ERROR")
    expect_errno(errno.ENOTCONN, lambda: a.connection.post_recv([a.recv(1, 0, 8)]), f"{what}: post_recv in ERROR")
    expect(a.connection.poll() == [], f"{what}: more completions")
    expect(bytes(b.memory.view) == before, f"{what}: bytes moved")


def _write(pair: Pair, remote: tuple[int, int], length: int = 64) -> SendRequest:
    return pair.a.transfer(2, Opcode.RDMA_WRITE, (0, length), remote)


def _read(pair: Pair, remote: tuple[int, int], length: int = 64) -> SendRequest:
    return pair.a.transfer(2, Opcode.RDMA_READ, (0, length), remote)


def wrong_rkey(harness: FabricHarness) -> None:
    """A key that nobody gave out is REM_ACCESS_ERR, for READ and WRITE."""
    for make in (_write, _read):
        with Pair(harness) as pair:
            address, rkey = pair.b.at(0)
            _expect_failure(pair, make(pair, (address, rkey ^ 0x5A5A)), WcStatus.REM_ACCESS_ERR, "a wrong rkey")


def out_of_bounds(harness: FabricHarness) -> None:
    """Before, beyond and far away from a region: REM_ACCESS_ERR."""
    for offset in (-1, MEMORY_BYTES - 63, 1 << 40):
        with Pair(harness) as pair:
            request = _write(pair, pair.b.at(offset))
            _expect_failure(pair, request, WcStatus.REM_ACCESS_ERR, f"64 bytes at offset {offset}")
    with Pair(harness) as pair:
        _expect_failure(pair, _read(pair, pair.b.at(MEMORY_BYTES - 63)), WcStatus.REM_ACCESS_ERR, "READ past the end")


def wrong_access(harness: FabricHarness) -> None:
    """WRITE needs REMOTE_WRITE and READ needs REMOTE_READ at the target: else REM_ACCESS_ERR."""
    for make, access in ((_write, Access.LOCAL_WRITE | Access.REMOTE_READ), (_read, ALL_ACCESS & ~Access.REMOTE_READ)):
        with Pair(harness) as pair, closing(pair.b.pd.register(pair.b.memory.address, 4096, access)) as region:
            remote = (region.address, region.rkey)
            _expect_failure(pair, make(pair, remote), WcStatus.REM_ACCESS_ERR, f"access {access!r}")


def other_domains_rkey(harness: FabricHarness) -> None:
    """A good key of another protection domain of the same peer is as wrong as any: REM_ACCESS_ERR."""
    with Pair(harness) as pair:
        other = Side(pair.fabric)
        _expect_failure(pair, _write(pair, other.at(0)), WcStatus.REM_ACCESS_ERR, "another domain's rkey")
        expect(not any(other.memory.view[:64]), "another domain's memory was written")
        other.close()


def stale_rkey(harness: FabricHarness) -> None:
    """After deregistration the key is dead, though it has just worked, and though the range is registered anew."""
    for given in (False, True):
        with Pair(harness) as pair:
            buffer = bytearray(4096)
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if given else pair.b.memory.address
            region = pair.b.pd.register(address, 4096, ALL_ACCESS, buffer)
            remote = (address, region.rkey)
            pair.a.connection.post_send([_write(pair, remote)])
            expect(statuses(collect(pair.a.connection, 1)) == [0], "the key does not work while it should")
            region.close()
            region.close()
            with closing(pair.b.pd.register(address, 4096, ALL_ACCESS, buffer)):
                _expect_failure(pair, _write(pair, remote), WcStatus.REM_ACCESS_ERR, "a stale rkey")


def bad_local_memory(harness: FabricHarness) -> None:
    """Unknown lkey, range beyond the region, another domain's region, READ into memory without LOCAL_WRITE."""

    def unknown(pair: Pair) -> Sge:
        return pair.a.sge(0, 64)._replace(lkey=pair.a.region.lkey ^ 1)

    def beyond(pair: Pair) -> Sge:
        return pair.a.sge(MEMORY_BYTES - 63, 64)

    def foreign(pair: Pair) -> Sge:
        return pair.b.sge(0, 64)

    for make in (unknown, beyond, foreign):
        for opcode in (Opcode.RDMA_WRITE, Opcode.RDMA_READ):
            with Pair(harness) as pair:
                request = SendRequest(2, opcode, (make(pair),), *pair.b.at(0))
                _expect_failure(pair, request, WcStatus.LOC_PROT_ERR, f"{make.__name__} local memory")
    with Pair(harness, recvs=1) as pair:
        request = SendRequest(2, Opcode.SEND, (unknown(pair),))
        pair.a.connection.post_send([request])
        expect(collect(pair.a.connection, 1)[0].status == WcStatus.LOC_PROT_ERR, "SEND from unknown local memory")
    with Pair(harness) as pair, closing(pair.a.pd.register(pair.a.memory.address, 64, Access(0))) as region:
        request = SendRequest(2, Opcode.RDMA_READ, (Sge(region.address, 64, region.lkey),), *pair.b.at(0))
        _expect_failure(pair, request, WcStatus.LOC_PROT_ERR, "READ into memory without LOCAL_WRITE")


def behind_a_failure(harness: FabricHarness) -> None:
    """What is posted after a request that will fail, while earlier ones are still under way, moves nothing."""
    with Pair(harness, memory_bytes=16 << 20) as pair:
        a, b = pair.a, pair.b
        a.memory.view[:8] = b"too late"
        large = [a.transfer(i, Opcode.RDMA_READ, (8 << 20, 8 << 20), b.at(8 << 20)) for i in range(4)]
        bad = SendRequest(4, Opcode.RDMA_WRITE, (a.sge(0, 8)._replace(lkey=a.region.lkey ^ 1),), *b.at(0))
        late = a.transfer(5, Opcode.RDMA_WRITE, (0, 8), b.at(0))
        a.connection.post_send(large)
        a.connection.post_send([bad])
        posted = [0, 1, 2, 3, 4]
        try:
            a.connection.post_send([late])
            posted.append(5)
        except ShimError as error:
            expect(error.errno == errno.ENOTCONN, f"posting behind a failure: {error}")
        done = collect(a.connection, len(posted))
        expect([c.wr_id for c in done] == posted, f"order: {done}")
        wanted = [WcStatus.SUCCESS] * 4 + [WcStatus.LOC_PROT_ERR, WcStatus.WR_FLUSH_ERR]
        expect(statuses(done) == wanted[: len(posted)], f"statuses: {done}")
        expect(not any(b.memory.view[:8]), "a request behind a failure was carried out")


def bad_receives(harness: FabricHarness) -> None:
    """Receives into memory that is not registered, or not for writing, are refused at once; nothing is posted."""
    with Pair(harness, QueueLimits(max_recv_wr=4)) as pair:
        b = pair.b
        unknown = RecvRequest(1, b.sge(0, 64)._replace(lkey=b.region.lkey ^ 1))
        beyond = b.recv(1, MEMORY_BYTES - 63, 64)
        for bad in (unknown, beyond):
            batch = [b.recv(0, 0, 64), bad]
            expect_errno(errno.EINVAL, lambda batch=batch: b.connection.post_recv(batch), "a bad receive")  # type: ignore[misc]
        with closing(b.pd.register(b.memory.address, 4096, Access.REMOTE_READ)) as region:
            request = RecvRequest(1, Sge(region.address, 64, region.lkey))
            expect_errno(errno.EINVAL, lambda: b.connection.post_recv([request]), "a receive without LOCAL_WRITE")
        b.connection.post_recv([b.recv(i, i * 64, 64) for i in range(4)])


def queue_overflow(harness: FabricHarness) -> None:
    """A batch beyond the queue is refused whole. Slots come back by polling; unsignalled ones by a later signal."""
    limits = QueueLimits(max_send_wr=8, max_recv_wr=4, max_sge=3)
    with Pair(harness, limits) as pair:
        a, b = pair.a, pair.b
        expect(a.connection.limits == limits, "the limits are not what was asked for")
        batch = [a.transfer(i, Opcode.RDMA_WRITE, (0, 8), b.at(0)) for i in range(9)]
        expect_errno(errno.ENOMEM, lambda: a.connection.post_send(batch), "9 sends of 8")
        a.connection.post_send(batch[:8])
        expect(wait_readable(a.connection.fileno()), "nothing completes")
        expect_errno(errno.ENOMEM, lambda: a.connection.post_send(batch[:1]), "a ninth send, before polling")
        expect(len(collect(a.connection, 8)) == 8, "completions are missing")
        quiet = [a.transfer(i, Opcode.RDMA_WRITE, (0, 8), b.at(0), SendFlags.NONE) for i in range(7)]
        a.connection.post_send([*quiet, batch[7]])
        expect([c.wr_id for c in collect(a.connection, 1)] == [7], "an unsignalled WRITE completed")
        a.connection.post_send(batch[:8])
        collect(a.connection, 8)
        receives = [b.recv(i, i * 64, 64) for i in range(5)]
        expect_errno(errno.ENOMEM, lambda: b.connection.post_recv(receives), "5 receives of 4")
        b.connection.post_recv(receives[:4])
        expect_errno(errno.ENOMEM, lambda: b.connection.post_recv(receives[:1]), "a fifth receive")
        wide = SendRequest(1, Opcode.RDMA_WRITE, (a.sge(0, 1),) * 4, *b.at(0))
        expect_errno(errno.EINVAL, lambda: a.connection.post_send([batch[0], wide]), "4 elements of 3")
        odd = SendRequest(1, Opcode.RECV, (a.sge(0, 1),))
        expect_errno(errno.EINVAL, lambda: a.connection.post_send([odd]), "an opcode that cannot be sent")
        expect(a.connection.poll() == [], "a refused batch was partly posted")


def receive_too_small(harness: FabricHarness) -> None:
    """The receiver gets LOC_LEN_ERR, the sender REM_INV_REQ_ERR, both are in ERROR, and no byte beyond is touched."""
    with Pair(harness) as pair:
        a, b = pair.a, pair.b
        a.memory.view[:4096] = b"\xff" * 4096
        b.connection.post_recv([b.recv(1, 0, 64), b.recv(2, 128, 64)])
        a.connection.post_send([a.send(3, 0, 65)])
        got = collect(b.connection, 2)
        expect(statuses(got) == [WcStatus.LOC_LEN_ERR, WcStatus.WR_FLUSH_ERR], f"receiver: {got}")
        sent = collect(a.connection, 1)
        expect(statuses(sent) == [WcStatus.REM_INV_REQ_ERR], f"sender: {sent}")
        expect(a.connection.state == b.connection.state == ConnectionState.ERROR, "a side is not in ERROR")
        expect(not any(b.memory.view[64:4096]), "bytes beyond the receive were touched")


def message_too_long(harness: FabricHarness) -> None:
    """A SEND beyond caps.max_message_bytes is LOC_LEN_ERR at the sender."""
    with Pair(harness, memory_bytes=1 << 20, recvs=1) as pair:
        length = pair.fabric.caps.max_message_bytes + 1
        if length > 1 << 20:
            raise SkippedError(f"a message may be {length - 1} bytes, more than this check wants to register")
        pair.a.connection.post_send([pair.a.send(1, 0, length)])
        expect(collect(pair.a.connection, 1)[0].status == WcStatus.LOC_LEN_ERR, "a message beyond caps")


def receiver_not_ready(harness: FabricHarness) -> None:
    """A SEND waits for a receive; with none in time it is RNR_RETRY_EXC_ERR and what is behind it is flushed."""
    with Pair(harness) as pair:
        a, b = pair.a, pair.b
        a.connection.post_send([a.send(1, 0, 8), a.transfer(2, Opcode.RDMA_WRITE, (0, 8), b.at(0))])
        expect(a.connection.poll() == [], "a SEND completed with no receive for it")
        b.connection.post_recv([b.recv(7, 0, 64)])
        expect(statuses(collect(a.connection, 2)) == [0, 0], "a SEND that waited in time failed")
        expect(collect(b.connection, 1)[0].wr_id == 7, "the message did not arrive")
        a.connection.post_send([a.send(3, 0, 8), a.transfer(4, Opcode.RDMA_WRITE, (0, 8), b.at(0))])
        done = collect(a.connection, 2, harness.failure_limit_s)
        wanted = [(3, WcStatus.RNR_RETRY_EXC_ERR), (4, WcStatus.WR_FLUSH_ERR)]
        expect([(c.wr_id, c.status) for c in done] == wanted, f"no receive: {done}")


def closed_connection(harness: FabricHarness) -> None:
    """A closed connection takes nothing and returns nothing; the peer is flushed, its WRITEs land no more."""
    with Pair(harness, recvs=2) as pair:
        a, b = pair.a, pair.b
        b.connection.close()
        b.connection.close()
        expect(b.connection.state == ConnectionState.CLOSED, "not CLOSED")
        expect(b.connection.poll() == [], "completions of a closed connection")
        for post in (
            lambda: b.connection.post_send([b.send(1, 0, 8)]),
            lambda: b.connection.post_recv([b.recv(1, 0, 8)]),
        ):
            expect_errno(errno.ENOTCONN, post, "posting on a closed connection")
        flushed = collect(a.connection, 2)
        expect(statuses(flushed) == [WcStatus.WR_FLUSH_ERR] * 2, f"the peer: {flushed}")
        expect(a.connection.state == ConnectionState.ERROR, "the peer is not in ERROR")


def write_to_closed_connection(harness: FabricHarness) -> None:
    """READ and WRITE to a peer that has closed fail and move nothing, although its region is still registered."""
    for opcode in (Opcode.RDMA_WRITE, Opcode.RDMA_READ):
        with Pair(harness) as pair:
            a, b = pair.a, pair.b
            a.memory.view[:8] = b"whatever"
            b.connection.close()
            if a.connection.state == ConnectionState.READY:
                a.connection.post_send([a.transfer(1, opcode, (0, 8), b.at(0))])
                done = collect(a.connection, 1, harness.failure_limit_s)
                expect(done[0].status in _LOST, f"{opcode.name} to a closed peer: {done}")
            expect(not any(b.memory.view[:8]), "bytes landed after close")
            expect(bytes(a.memory.view[:8]) == b"whatever", "a READ of a closed peer gave bytes")


def disconnect_flushes(harness: FabricHarness) -> None:
    """When the peer goes, everything that waits is flushed, each request once, and the descriptor says so."""
    with Pair(harness, recvs=3) as pair:
        a, b = pair.a, pair.b
        b_connection: Connection = b.connection
        for _ in range(3):
            a.connection.post_send([a.send(0, 0, 8)])
        collect(b_connection, 3)
        collect(a.connection, 3)
        a.connection.post_send([a.send(i, 0, 8) for i in (10, 11)])  # no receives are left: these wait
        expect(a.connection.poll() == [], "a SEND completed with no receive for it")
        b_connection.close()
        expect(wait_readable(a.connection.fileno()), "the loss of the peer is not announced")
        done = collect(a.connection, 5)
        expect(sorted(c.wr_id for c in done) == [0, 1, 2, 10, 11], f"flushed: {done}")
        expect(all(c.status in _LOST for c in done), f"flushed: {done}")
        expect(a.connection.poll() == [], "something was flushed twice")
        expect(not wait_readable(a.connection.fileno(), 0), "readable with nothing to poll")


CHECKS: list[Callable[[FabricHarness], None]] = [
    wrong_rkey,
    out_of_bounds,
    wrong_access,
    other_domains_rkey,
    stale_rkey,
    bad_local_memory,
    behind_a_failure,
    bad_receives,
    queue_overflow,
    receive_too_small,
    message_too_long,
    receiver_not_ready,
    closed_connection,
    write_to_closed_connection,
    disconnect_flushes,
]
