"""A DPU in this process for the agent's tests: the real control-plane service and the real emulated fabric, answered
by a script that can be told to keep silent, to answer nonsense, to refuse, to go away and to come back.

It keeps blocks in a dict. What it does to the agent's memory it does through the fabric, as a real DPU would.
"""

from __future__ import annotations

import hashlib
import os
import select
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import xxhash

from common import rpc_errors, wire
from common.errors import EntresolError, NotFoundError, PermissionDeniedError
from common.identity import UNKNOWN, NamespaceRecord
from common.proto.entresol.v1 import control_pb2, control_pb2_grpc
from common.status import BlockState, Status
from common.wire import Flags, Op
from doca_shims.api import (
    Access,
    Completion,
    Connection,
    ConnectionState,
    Opcode,
    QueueLimits,
    RecvRequest,
    SendRequest,
    Sge,
)
from doca_shims.registry import create_fabric

SLOT_BYTES = 65536
TTL_S = 3.0
Script = Callable[["ScriptedRegion", wire.Capsule], "wire.Entries | None"]
"""Answers a request; None: `ScriptedRegion.answer` answers it; raise Silence for no answer at all."""


class Silence(Exception):
    """This request gets no answer."""


def record(tenant: str = "acme", **changes: Any) -> NamespaceRecord:
    unknown = {name: UNKNOWN for name in NamespaceRecord.__dataclass_fields__ if name not in ("tenant", "salt")}
    values: dict[str, Any] = {"tenant": tenant, "salt": b"", **unknown, **changes}
    return NamespaceRecord(**values)


def key(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


class ScriptedRegion:
    """One region: a thread that accepts agents' connections and answers their capsules."""

    def __init__(self, name: str, address: str, credits: int, slot_bytes: int, tokens: dict[int, bytes]) -> None:
        self.name = name
        self.uuid = hashlib.blake2b(name.encode(), digest_size=16).digest()
        self.address = address
        self.credits = credits
        self.slot_bytes = slot_bytes
        self.blocks: dict[bytes, bytes] = {}
        self.script: Script | None = None
        self.seen: list[wire.Capsule] = []
        self.outstanding_max = 0
        self.connections = 0
        self.held: list[tuple[_Peer, wire.Capsule]] = []
        """Requests that got no answer."""
        self._tokens = tokens
        self._fabric = create_fabric("emu-shm", {})
        self._memory = self._fabric.allocate(slot_bytes)
        self._listener = self._fabric.listen(address)
        self._wake = os.eventfd(0)
        self._jobs: list[Callable[[], None]] = []
        self._peers: dict[int, _Peer] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        """Run `job` in the region's thread, and wait for it."""
        done = threading.Event()

        def run() -> None:
            job()
            done.set()

        self._jobs.append(run)
        os.eventfd_write(self._wake, 1)
        if not done.wait(20):
            raise TimeoutError("the scripted region does not answer")

    def drop(self) -> None:
        """Break every connection."""
        self.do(self._drop)

    def release_held(self) -> list[bool]:
        """Now carry out what was held back; for each whether the fabric still let it through."""
        outcomes: list[bool] = []

        def job() -> None:
            for peer, capsule in self.held:
                outcomes.append(peer.connection.state is ConnectionState.READY and self._try(peer, capsule))
            self.held.clear()

        self.do(job)
        return outcomes

    def close(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    # ------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        epoll = select.epoll()
        epoll.register(self._wake, select.EPOLLIN)
        epoll.register(self._listener.fileno(), select.EPOLLIN)
        while not self._stopping:
            for fd, _events in epoll.poll(5):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd == self._listener.fileno():
                    while (request := self._listener.accept()) is not None:
                        session_id, token = wire.CONNECT_DATA.unpack(request.private_data)
                        if self._tokens.get(session_id) != token:
                            request.reject("no such session")
                            continue
                        peer = _Peer(self._fabric, request, self.credits, self.slot_bytes, self.uuid, self._memory)
                        self._peers[peer.connection.fileno()] = peer
                        self.connections += 1
                        epoll.register(peer.connection.fileno(), select.EPOLLIN)
                elif fd in self._peers:
                    self._serve(self._peers[fd])
                    if self._peers[fd].connection.state is not ConnectionState.READY:
                        epoll.unregister(fd)
                        self._peers.pop(fd).close()
            while self._jobs:
                self._jobs.pop(0)()
        self._drop()
        epoll.close()
        self._listener.close()
        self._memory.close()
        self._fabric.close()

    def _drop(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _serve(self, peer: _Peer) -> None:
        for capsule in peer.receive():
            peer.outstanding += 1
            self.outstanding_max = max(self.outstanding_max, peer.outstanding)
            self.seen.append(capsule)
            self._try(peer, capsule)

    def _try(self, peer: _Peer, capsule: wire.Capsule) -> bool:
        try:
            entries = self.script(self, capsule) if self.script is not None else None
            if entries is None:
                entries = self.answer(peer, capsule)
            peer.respond(capsule, entries)
        except Silence:
            self.held.append((peer, capsule))
            return False
        except OSError:  # the agent has gone
            return False
        return True

    # ------------------------------------------------------------------------------------ what a DPU does

    def answer(self, peer: _Peer, capsule: wire.Capsule) -> wire.Entries:
        answers = np.zeros(len(capsule.entries), wire.RESPONSE_LAYOUT[capsule.op])
        if capsule.op is Op.STAT:
            answers["stat_id"], answers["value"] = wire.StatId.SLOTS_USED, len(self.blocks)
            return answers
        if capsule.op is Op.CANCEL:
            return answers
        for entry, answer in zip(capsule.entries, answers):
            name = wire.key_bytes(entry)
            block = self.blocks.get(name)
            if capsule.op is Op.STORE:
                answer["status"] = Status.EXISTS if block is not None else self._store(peer, capsule, entry, name)
            elif block is None:
                answer["status"] = Status.MISS
            elif capsule.op is Op.RETRIEVE:
                self._deliver(peer, capsule, entry, answer, block)
            elif capsule.op is Op.DELETE:
                del self.blocks[name]
            else:
                answer["length"] = len(block)
                answer["state"] = BlockState.STAGED
        return answers

    def _store(self, peer: _Peer, capsule: wire.Capsule, entry: Any, name: bytes) -> Status:
        data = b"".join(peer.read(address, length, rkey) for address, length, rkey in _elements(capsule, entry))
        if not data:
            return Status.BAD_LENGTH
        if entry["flags"] & wire.EntryFlags.HAS_CHECKSUM and xxhash.xxh3_64_intdigest(data) != entry["checksum"]:
            return Status.CHECKSUM
        self.blocks[name] = data
        return Status.OK

    def _deliver(self, peer: _Peer, capsule: wire.Capsule, entry: Any, answer: Any, block: bytes) -> None:
        offset, wanted = int(entry["offset"]), int(entry["length"])
        data = block[offset : offset + wanted] if wanted else block[offset:]
        if wanted and len(data) != wanted:
            answer["status"], answer["length"] = Status.BAD_RANGE, len(block)
            return
        done = 0
        for address, length, rkey in _elements(capsule, entry):
            part = data[done : done + length] if wanted else data
            peer.write(address, part, rkey)
            done += len(part)
        answer["length"], answer["checksum"] = len(data), xxhash.xxh3_64_intdigest(data)


def _elements(capsule: wire.Capsule, entry: Any) -> Iterator[tuple[int, int, int]]:
    """(address, length, rkey) of each element of an entry."""
    if entry["sge_count"] == 1:
        yield int(entry["address"]), int(entry["length"]), int(entry["rkey"])
        return
    first = int(entry["address"])
    for sge in capsule.sges[first : first + int(entry["sge_count"])]:
        yield int(sge["address"]), int(sge["length"]), int(sge["rkey"])


class _Peer:
    def __init__(self, fabric: Any, request: Any, credits: int, slot_bytes: int, uuid: bytes, memory: Any) -> None:
        size = wire.MAX_CAPSULE_BYTES
        self.outstanding = 0
        self._arrived: list[Completion] = []
        self._memory = memory
        self._capsules = fabric.allocate((credits + 1) * size)
        self._pd = fabric.alloc_pd()
        self._region = self._pd.register(self._capsules.address, self._capsules.length_bytes, Access.LOCAL_WRITE)
        self._bounce = self._pd.register(memory.address, memory.length_bytes, Access.LOCAL_WRITE)
        self._recvs = [
            RecvRequest(i, Sge(self._capsules.address + i * size, size, self._region.lkey)) for i in range(credits)
        ]
        self._out = credits * size
        self.connection: Connection = request.accept(
            self._pd, QueueLimits(64, credits, 1), self._recvs, wire.ACCEPT_DATA.pack(credits, slot_bytes, uuid)
        )

    def receive(self) -> Iterator[wire.Capsule]:
        while completions := self._arrived or self.connection.poll():
            self._arrived = []
            for completion in completions:
                if completion.opcode is Opcode.RECV and completion.status == 0:
                    start = completion.wr_id * wire.MAX_CAPSULE_BYTES
                    yield wire.decode_request(bytes(self._capsules.view[start : start + completion.byte_count]))
                    if self.connection.state is ConnectionState.READY:
                        self.connection.post_recv([self._recvs[completion.wr_id]])

    def respond(self, capsule: wire.Capsule, entries: wire.Entries) -> None:
        self.outstanding -= 1
        answer = wire.encode(capsule.op, capsule.request_id, entries, flags=Flags.RESPONSE)
        self._capsules.view[self._out : self._out + len(answer)] = answer
        sge = Sge(self._capsules.address + self._out, len(answer), self._region.lkey)
        self._post(SendRequest(1, Opcode.SEND, (sge,)))

    def read(self, address: int, length: int, rkey: int) -> bytes:
        if not length:
            return b""
        sge = Sge(self._memory.address, length, self._bounce.lkey)
        self._post(SendRequest(2, Opcode.RDMA_READ, (sge,), address, rkey))
        return bytes(self._memory.view[:length])

    def write(self, address: int, data: bytes, rkey: int) -> None:
        self._memory.view[: len(data)] = data
        sge = Sge(self._memory.address, len(data), self._bounce.lkey)
        self._post(SendRequest(3, Opcode.RDMA_WRITE, (sge,), address, rkey))

    def _post(self, request: SendRequest) -> None:
        """emu-shm moves the bytes before it returns; a failure shows in the state."""
        self.connection.post_send([request])
        self._arrived += [done for done in self.connection.poll() if done.opcode is Opcode.RECV]
        if self.connection.state is not ConnectionState.READY:
            raise OSError("the transfer was refused")

    def close(self) -> None:
        self.connection.close()
        self._bounce.close()
        self._region.close()
        self._pd.close()
        self._capsules.close()


class ScriptedDpu(control_pb2_grpc.SessionsServicer):
    """The control plane. `start` and `stop` may alternate: addresses stay, sessions do not."""

    def __init__(self, directory: Path, name: str, regions: int, credits: int, slot_bytes: tuple[int, ...]) -> None:
        self.name = name
        self.address = f"unix:{directory}/{name}.sock"
        self.regions: list[ScriptedRegion] = []
        self.opened = 0
        self.refusal: EntresolError | None = None
        """What opening a session is answered with."""
        self._directory = directory
        self._shape = [(f"{name}-r{i}", credits, slot_bytes[i % len(slot_bytes)]) for i in range(regions)]
        self._tokens: dict[int, bytes] = {}
        self._tenants: dict[int, str] = {}
        self._handles: dict[int, dict[bytes, int]] = {}
        self._server: Any = None

    def start(self) -> None:
        self.regions = [
            ScriptedRegion(name, f"{self._directory}/{name}", credits, slot_bytes, self._tokens)
            for name, credits, slot_bytes in self._shape
        ]
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        control_pb2_grpc.add_SessionsServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
        self._tokens.clear()
        for region in self.regions:
            region.close()
        self.regions = []

    def forget_sessions(self) -> None:
        """As when they expire: connections close, keep-alives are answered NOT_FOUND."""
        self._tokens.clear()
        for region in self.regions:
            region.drop()

    def OpenSession(self, request: Any, context: Any) -> Any:
        with _mapped(context):
            if self.refusal is not None:
                raise self.refusal
            self.opened += 1
            session_id = int.from_bytes(os.urandom(7), "little")
            self._tokens[session_id] = os.urandom(16)
            self._tenants[session_id] = request.tenant
            self._handles[session_id] = {}
            return control_pb2.OpenSessionResponse(
                session_id=session_id,
                token=self._tokens[session_id],
                wire_version=1,
                ttl_ms=int(TTL_S * 1000),
                namespaces=[self._grant(session_id, encoded) for encoded in request.namespaces],
                regions=[self._describe(region) for region in self.regions],
                dpu=control_pb2.Identity(name=self.name),
                regions_epoch=1,
            )

    def KeepAlive(self, request: Any, context: Any) -> Any:
        with _mapped(context):
            self._check(request)
            return control_pb2.KeepAliveResponse(ttl_ms=int(TTL_S * 1000), regions_epoch=request.regions_epoch)

    def RegisterNamespace(self, request: Any, context: Any) -> Any:
        with _mapped(context):
            self._check(request)
            return control_pb2.RegisterNamespaceResponse(namespace=self._grant(request.session_id, request.record))

    def CloseSession(self, request: Any, context: Any) -> Any:
        self._tokens.pop(request.session_id, None)
        return control_pb2.CloseSessionResponse()

    def _check(self, request: Any) -> None:
        if self._tokens.get(request.session_id) != request.token:
            raise NotFoundError("the session has ended; open another")

    def _grant(self, session_id: int, encoded: bytes) -> Any:
        parsed = NamespaceRecord.from_bytes(encoded)
        if parsed.tenant != self._tenants[session_id]:
            raise PermissionDeniedError("another tenant's record")
        handles = self._handles[session_id]
        handle = handles.setdefault(parsed.digest(), len(handles) + 1)
        return control_pb2.NamespaceGrant(handle=handle, digest=parsed.digest())

    @staticmethod
    def _describe(region: ScriptedRegion) -> Any:
        return control_pb2.Region(
            name=region.name,
            uuid=region.uuid,
            slot_bytes=region.slot_bytes,
            slots=1000,
            weight=1.0,
            state=control_pb2.REGION_STATE_SERVING,
            fabrics=[control_pb2.FabricEndpoint(name="emu-shm", address=region.address)],
        )


@contextmanager
def _mapped(context: Any) -> Iterator[None]:
    try:
        yield
    except EntresolError as error:
        code, text, metadata = rpc_errors.to_status(error)
        context.set_trailing_metadata(metadata)
        context.abort(code, text)
