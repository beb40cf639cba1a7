"""The peer process of the fabric contract: ``python -m doca_shims.contract_peer BACKEND OPTIONS ROLE ...``.

It is what the checks kill and stop. It prints one JSON line when it is ready, and one when its connection has
ended; it leaves when its standard input closes. Roles:

- ``target ADDRESS BYTES allocated|given``: listens, registers memory, serves one connection.
- ``writer ADDRESS REMOTE RKEY BYTES single|packed``: connects and WRITEs 0xff over that range, by post_send or by
  post_rdma, until that fails.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from doca_shims.api import (
    RDMA_REQUEST,
    Access,
    Completion,
    Connection,
    ConnectionState,
    Fabric,
    Opcode,
    QueueLimits,
    SendRequest,
    Sge,
    ShimError,
)
from doca_shims.registry import create_fabric

_ALL_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _await_end(connection: Connection) -> None:
    """Poll until the connection ends or standard input closes."""
    events = select.epoll()
    events.register(connection.fileno(), select.EPOLLIN)
    events.register(sys.stdin.fileno(), select.EPOLLIN)
    while connection.state == ConnectionState.READY:
        ready = [descriptor for descriptor, _ in events.poll()]
        while connection.poll():
            pass
        if sys.stdin.fileno() in ready:
            return
    _say(ended=[])
    sys.stdin.read()


def _target(fabric: Fabric, address: str, length_text: str, kind: str) -> None:
    length = int(length_text)
    pd = fabric.alloc_pd()
    buffer = bytearray(length if kind == "given" else 1)
    if kind == "given":
        base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    else:
        base = fabric.allocate(length).address
    region = pd.register(base, length, _ALL_ACCESS, buffer)
    listener = fabric.listen(address)
    _say(address=listener.address, base=base, rkey=region.rkey, pid=os.getpid())
    request = None
    while request is None:
        select.select([listener.fileno()], [], [])
        request = listener.accept()
    connection = request.accept(pd, QueueLimits())
    listener.close()
    _await_end(connection)


def _writer(fabric: Fabric, address: str, remote_text: str, rkey_text: str, length_text: str, how: str) -> None:
    length = int(length_text)
    pd = fabric.alloc_pd()
    memory = fabric.allocate(length)
    memory.view[:] = b"\xff" * length
    region = pd.register(memory.address, length, _ALL_ACCESS)
    connection = fabric.connect(address, pd, QueueLimits())
    sge = Sge(memory.address, length, region.lkey)
    write = SendRequest(0, Opcode.RDMA_WRITE, (sge,), int(remote_text), int(rkey_text))
    packed = RDMA_REQUEST.pack(memory.address, int(remote_text), length, region.lkey, int(rkey_text), 0)
    _say(writing=True, pid=os.getpid())
    failures: list[Completion] = []
    events = select.epoll()
    events.register(connection.fileno(), select.EPOLLIN)
    posted = 0
    while not failures and connection.state == ConnectionState.READY:
        with suppress(ShimError):  # it went to ERROR just now
            if how == "packed" and posted == 0:
                posted = 1
                connection.post_rdma(0, Opcode.RDMA_WRITE, packed * 4)
            elif how == "single" and posted < 4:
                new, posted = 4 - posted, 4
                connection.post_send([write] * new)
        done = connection.poll()
        posted -= len(done)
        failures = [completion for completion in done if completion.status]
        if not done:
            events.poll(1)
    _say(ended=[completion.status.name for completion in failures])
    sys.stdin.read()


def main(arguments: Sequence[str]) -> None:
    backend, options_text, role, *rest = arguments
    options: Mapping[str, str] = json.loads(options_text)
    fabric = create_fabric(backend, options)
    if role == "target":
        _target(fabric, *rest)
    else:
        _writer(fabric, *rest)


if __name__ == "__main__":
    main(sys.argv[1:])
