"""Checks of the fabric contract that need a peer in a process of its own: killed, stopped, resumed; and leaks."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from doca_shims.api import RDMA_REQUEST, ConnectionState, Opcode, QueueLimits, ShimError
from doca_shims.contract_harness import (
    ALL_ACCESS,
    WAIT_S,
    FabricHarness,
    Pair,
    Side,
    collect,
    expect,
    next_request,
    require_one_sided,
)

_WRITE_BYTES = 1 << 20
_CLOSE_LIMIT_S = 2.0
"""How long close or deregistration may take whatever state the peer is in."""
_STOPS = 5


class _Peer:
    """A process of `doca_shims.contract_peer`."""

    def __init__(self, harness: FabricHarness, *arguments: object) -> None:
        command = [sys.executable, "-m", "doca_shims.contract_peer", harness.backend, json.dumps(dict(harness.options))]
        command += [str(argument) for argument in arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def hear(self) -> dict[str, Any]:
        """The next line it prints."""
        output = self.process.stdout
        if output is None or not select.select([output], [], [], WAIT_S)[0]:
            raise TimeoutError("the peer process says nothing")
        line = output.readline()
        expect(line, "the peer process ended")
        fields: dict[str, Any] = json.loads(line)
        return fields

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has taken effect."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _accept_writer(side: Side, harness: FabricHarness, remote: tuple[int, int], packed: bool = False) -> _Peer:
    """A peer process that WRITEs without pause to `remote` over `side.connection`."""
    how = "packed" if packed else "single"
    with closing(side.fabric.listen(harness.new_address())) as listener:
        writer = _Peer(harness, "writer", listener.address, *remote, _WRITE_BYTES, how)
        try:
            side.connection = next_request(listener).accept(side.pd, QueueLimits())
            expect(writer.hear()["writing"], "the writer does not write")
        except BaseException:
            writer.close()
            raise
    return writer


def _wait_for_bytes(view: memoryview) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while view[0] == 0:
        expect(time.monotonic() < deadline_s, "the writer's bytes do not arrive")
        time.sleep(0)


def _stop_then_close(harness: FabricHarness, given: bool, deregister: bool) -> None:
    for attempt in range(_STOPS):
        with closing(harness.open_fabric()) as fabric, closing(Side(fabric, _WRITE_BYTES)) as side:
            require_one_sided(fabric)
            buffer = bytearray(_WRITE_BYTES)
            view = memoryview(buffer) if given else side.memory.view
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            region = side.pd.register(address, _WRITE_BYTES, ALL_ACCESS, buffer)
            writer = _accept_writer(side, harness, (address, region.rkey), attempt % 2 == 0)
            try:
                _wait_for_bytes(view)
                writer.stop()
                started_s = time.monotonic()
                if deregister:
                    region.close()
                else:
                    side.connection.close()
                took_s = time.monotonic() - started_s
                expect(took_s < _CLOSE_LIMIT_S, f"it took {took_s:.1f} s with the peer stopped")
                view[:] = bytes(_WRITE_BYTES)
                writer.signal(signal.SIGCONT)
                if deregister:
                    _poll_until_lost(side, writer)
                else:
                    writer.hear()
                expect(not any(view), f"bytes landed after it returned (attempt {attempt})")
            finally:
                writer.close()
                region.close()


def _poll_until_lost(side: Side, writer: _Peer) -> None:
    """Let the writer find out, and say so."""
    output = writer.process.stdout
    deadline_s = time.monotonic() + WAIT_S
    while output is not None and not select.select([output], [], [], 0.005)[0]:
        side.connection.poll()
        expect(time.monotonic() < deadline_s, "the peer never learns that its key is dead")


def stopped_peer_close_allocated(harness: FabricHarness) -> None:
    """A peer is stopped in mid-WRITE into allocated memory, and resumed after `close`: no byte lands."""
    _stop_then_close(harness, given=False, deregister=False)


def stopped_peer_close_given(harness: FabricHarness) -> None:
    """The same with memory that was merely given."""
    _stop_then_close(harness, given=True, deregister=False)


def stopped_peer_deregister_allocated(harness: FabricHarness) -> None:
    """A peer is stopped in mid-WRITE, and resumed after the region was deregistered: no byte lands."""
    _stop_then_close(harness, given=False, deregister=True)


def stopped_peer_deregister_given(harness: FabricHarness) -> None:
    """The same with memory that was merely given."""
    _stop_then_close(harness, given=True, deregister=True)


def running_peer_close(harness: FabricHarness) -> None:
    """Deregistering and closing under a peer that writes at full speed: nothing lands afterwards."""
    for attempt in range(_STOPS):
        with closing(harness.open_fabric()) as fabric, closing(Side(fabric, _WRITE_BYTES)) as side:
            require_one_sided(fabric)
            writer = _accept_writer(side, harness, side.at(0), attempt >= 2)
            try:
                _wait_for_bytes(side.memory.view)
                if attempt % 2:
                    side.region.close()
                else:
                    side.connection.close()
                side.memory.view[:] = bytes(_WRITE_BYTES)
                if attempt % 2:
                    _poll_until_lost(side, writer)
                else:
                    writer.hear()
                expect(not any(side.memory.view), f"bytes landed after it returned (attempt {attempt})")
            finally:
                writer.close()


def stopped_writer_spares_others(harness: FabricHarness) -> None:
    """Memory taken back from a stopped peer still takes another peer's WRITEs, to the same buffer, unharmed."""
    for attempt in range(3):
        with Pair(harness, memory_bytes=2 * _WRITE_BYTES) as pair:
            require_one_sided(pair.fabric)
            a, b = pair.a, pair.b
            doomed = Side(pair.fabric)
            region = doomed.pd.register(b.memory.address, _WRITE_BYTES, ALL_ACCESS)
            writer = _accept_writer(doomed, harness, (region.address, region.rkey), attempt > 0)
            try:
                _wait_for_bytes(b.memory.view)
                writer.stop()
                doomed.connection.close()
                a.memory.view[:] = b"\x11" * (2 * _WRITE_BYTES)
                for length in (_WRITE_BYTES, 2 * _WRITE_BYTES):
                    a.connection.post_send([a.transfer(1, Opcode.RDMA_WRITE, (0, length), b.at(0))])
                    expect(collect(a.connection, 1)[0].status == 0, "another peer's WRITE failed")
                writer.signal(signal.SIGCONT)
                writer.hear()
                expect(bytes(b.memory.view) == bytes(a.memory.view), "another peer's bytes are gone")
                a.connection.post_send([a.transfer(2, Opcode.RDMA_READ, (0, 2 * _WRITE_BYTES), b.at(0))])
                expect(collect(a.connection, 1)[0].status == 0, "another peer's READ failed")
                expect(bytes(b.memory.view) == bytes(a.memory.view), "READ and WRITE do not meet in the same memory")
            finally:
                writer.close()
                region.close()
                doomed.close()


def _target(harness: FabricHarness, kind: str) -> tuple[_Peer, dict[str, Any]]:
    peer = _Peer(harness, "target", harness.new_address(), _WRITE_BYTES, kind)
    try:
        return peer, peer.hear()
    except BaseException:
        peer.close()
        raise


def _flood(side: Side, remote: tuple[int, int], opcode: Opcode, limit_s: float) -> None:
    """Transfer until something fails, which it must within the limit; by post_send and by post_rdma in turn."""
    sge = side.sge(0, _WRITE_BYTES)
    packed = RDMA_REQUEST.pack(sge.address, remote[0], sge.length, sge.lkey, remote[1], 0) * 8
    requests = [side.transfer(i, opcode, (0, _WRITE_BYTES), remote) for i in range(8)]
    deadline_s = time.monotonic() + limit_s
    while side.connection.state == ConnectionState.READY:
        expect(time.monotonic() < deadline_s, f"{opcode.name} to a lost peer has not failed in {limit_s} s")
        try:
            side.connection.post_send(requests)
            collect(side.connection, len(requests), limit_s)
            if side.connection.state == ConnectionState.READY:
                side.connection.post_rdma(0, opcode, packed)
                collect(side.connection, 1, limit_s)
        except ShimError:
            break


def killed_peer(harness: FabricHarness) -> None:
    """A target is killed in the midst of READs or WRITEs: they fail in bounded time, and `close` is quick."""
    with closing(harness.open_fabric()) as fabric:
        require_one_sided(fabric)
    for kind in ("allocated", "given"):
        for opcode in (Opcode.RDMA_WRITE, Opcode.RDMA_READ):
            peer, fields = _target(harness, kind)
            with closing(harness.open_fabric()) as fabric, closing(Side(fabric, _WRITE_BYTES)) as side:
                try:
                    side.connection = fabric.connect(fields["address"], side.pd, QueueLimits())
                    killer = threading.Timer(0.05, peer.process.kill)
                    killer.start()
                    _flood(side, (fields["base"], fields["rkey"]), opcode, WAIT_S + harness.failure_limit_s)
                    killer.join()
                    started_s = time.monotonic()
                    side.connection.close()
                    expect(time.monotonic() - started_s < _CLOSE_LIMIT_S, "close waits for a dead peer")
                finally:
                    peer.close()


def killed_writer(harness: FabricHarness) -> None:
    """A peer is killed in mid-WRITE into memory here: the connection goes to ERROR, and everything closes."""
    with closing(harness.open_fabric()) as fabric, closing(Side(fabric, _WRITE_BYTES)) as side:
        require_one_sided(fabric)
        writer = _accept_writer(side, harness, side.at(0))
        try:
            side.connection.post_recv([side.recv(1, 0, 64)])
            _wait_for_bytes(side.memory.view)
            writer.signal(signal.SIGKILL)
            done = collect(side.connection, 1, WAIT_S + harness.failure_limit_s)
            expect(done[0].status != 0 and side.connection.state == ConnectionState.ERROR, f"the peer is dead: {done}")
        finally:
            writer.close()


def stopped_target(harness: FabricHarness) -> None:
    """Requests to a stopped peer complete or fail within the transport's time, and `close` does not wait."""
    with closing(harness.open_fabric()) as fabric:
        require_one_sided(fabric)
    peer, fields = _target(harness, "allocated")
    with closing(harness.open_fabric()) as fabric, closing(Side(fabric, _WRITE_BYTES)) as side:
        try:
            side.connection = fabric.connect(fields["address"], side.pd, QueueLimits())
            peer.stop()
            remote = (fields["base"], fields["rkey"])
            requests = [side.transfer(i, Opcode.RDMA_READ, (0, _WRITE_BYTES), remote) for i in range(8)]
            side.connection.post_send(requests)
            done = collect(side.connection, 8, harness.failure_limit_s)
            expect(len(done) == 8, f"a stopped peer: {done}")
            started_s = time.monotonic()
            side.connection.close()
            expect(time.monotonic() - started_s < _CLOSE_LIMIT_S, "close waits for a stopped peer")
        finally:
            peer.signal(signal.SIGCONT)
            peer.close()


def _held() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of this process."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        mappings = sum(1 for line in maps if "entresol" in line or "deleted" in line)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mappings


def nothing_leaks(harness: FabricHarness) -> None:
    """After many pairs were opened, used and closed, descriptors, threads and mappings are as before."""

    def once() -> None:
        with Pair(harness, recvs=1, memory_bytes=65536) as pair:
            pair.a.connection.post_send([pair.a.transfer(1, Opcode.RDMA_WRITE, (0, 8), pair.b.at(0))])
            pair.b.connection.post_send([pair.b.send(1, 0, 8)])
            collect(pair.a.connection, 2)

    once()
    before = _held()
    for _ in range(200):
        once()
    expect(_held() == before, f"descriptors, threads, mappings: {_held()}, before {before}")


CHECKS: list[Callable[[FabricHarness], None]] = [
    stopped_peer_close_allocated,
    stopped_peer_close_given,
    stopped_peer_deregister_allocated,
    stopped_peer_deregister_given,
    running_peer_close,
    stopped_writer_spares_others,
    killed_peer,
    killed_writer,
    stopped_target,
    nothing_leaks,
]
