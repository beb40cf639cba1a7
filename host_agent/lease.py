"""Leases: frames of staged blocks that this client may READ by itself, with no work for the DPU's processor.

Made by `Client.lease`. A read that could outlive its lease is not begun: the DPU withdraws the memory key at the end,
and a refused READ would cost the connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from common import wire
from common.errors import UserError
from common.status import Status
from common.wire import Op
from doca_shims.api import Opcode, SendRequest, Sge
from host_agent.batch import cuts
from host_agent.core import AgentCore
from host_agent.dispatch import Share
from host_agent.link import SEND_QUEUE_READS, SEND_SGES_MAX, RegionLink
from host_agent.memory import Spans
from host_agent.operation import Operation, Request
from host_agent.registration import Grants
from host_agent.results import BlockResults

_Post: TypeAlias = tuple[RegionLink, Request, list[SendRequest], Grants]
"""The READs of one block, and where they go."""
_USABLE_SHARE: Final = 0.9
"""Of a lease's time, counted from before it was asked for: no READ begins after that."""


class Lease:
    """Leases on the blocks of one batch; `status` says which were granted. Released on leaving the context."""

    def __init__(self, core: AgentCore, operation: Operation, shares: list[Share], asked_ns: int) -> None:
        self._core = core
        self._answers = operation.answers
        self._links: list[RegionLink | None] = [None] * len(self._answers)
        self._grants: list[Grants | None] = [None] * len(self._answers)
        for link, blocks, grants in shares:
            for index in range(len(self._answers)) if blocks is None else blocks.tolist():
                self._links[index], self._grants[index] = link, grants
        usable_ns = (self._answers["duration_ms"] * (1e6 * _USABLE_SHARE)).astype(np.int64)
        self._usable_until_ns = usable_ns + asked_ns
        self._released = False

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """OK where a lease was granted; MISS, BUSY and so on where not."""
        return self._answers["status"]

    @property
    def length(self) -> npt.NDArray[np.uint32]:
        """Bytes of each leased block."""
        return self._answers["length"]

    @property
    def checksum(self) -> npt.NDArray[np.uint64]:
        return self._answers["checksum"]

    def __len__(self) -> int:
        return len(self._answers)

    def read(
        self,
        memory: Spans | Sequence[Any],
        *,
        indices: Sequence[int] | None = None,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> BlockResults:
        """READ leased blocks into registered memory: all of them, or those at `indices`, from their beginning and as
        far as the destination goes. `verify` compares whole blocks with the lease's checksum.

        Not leased or expired: MISS. A fabric without one-sided READ: UNSUPPORTED. Raises UserError.
        """
        chosen = list(range(len(self))) if indices is None else list(indices)
        spans = self._core.memories.resolve(memory)
        if len(spans) != len(chosen):
            raise UserError(f"{len(chosen)} leased blocks, but memory for {len(spans)}")
        operation = self._core.operation(Op.RETRIEVE, len(chosen), timeout_s)
        posts: list[_Post] = []
        for place, index in enumerate(chosen):
            self._prepare(operation, spans, place, index, posts)
        while posts:
            posts = self._post(operation, posts)
            self._core.progress.wait(operation)
        for place, index in enumerate(chosen):
            if operation.answers["status"][place] == Status.OK:
                self._finish(operation.answers, spans, place, index, verify)
        return BlockResults(operation.answers)

    def release(self) -> BlockResults:
        """Give the frames back. Idempotent."""
        if self._released:
            return BlockResults(np.zeros(0, wire.RESULT))
        self._released = True
        operation = self._core.operation(Op.RELEASE, len(self), None)
        operation.answers["status"] = Status.MISS
        held: dict[RegionLink, list[int]] = {}
        for index, link in enumerate(self._links):
            leased = self._answers["status"][index] == Status.OK
            if link is not None and leased and self._grants[index] is link.grants:
                held.setdefault(link, []).append(index)
        order = np.array([index for indices in held.values() for index in indices], np.intp)
        operation.reorder(order)
        entries = np.zeros(len(order), wire.RELEASE_ENTRY)
        entries["lease_id"] = self._answers["lease_id"][order]
        entries["generation"] = self._answers["generation"][order]
        prepared: list[tuple[RegionLink, list[Request], Grants | None]] = []
        start = 0
        for link, indices in held.items():
            made = [
                Request.of(operation, entries[first:last], first)
                for first, last in cuts(start, start + len(indices), wire.MAX_BATCH)
            ]
            operation.pending.update(made)
            prepared.append((link, made, self._grants[indices[0]]))
            start += len(indices)
        for link, made, grants in prepared:
            link.submit(made, grants)
        self._core.progress.wait(operation)
        return BlockResults(operation.answers)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _prepare(
        self,
        operation: Operation,
        spans: Spans,
        place: int,
        index: int,
        posts: list[_Post],
    ) -> None:
        """Add the READs of one block to `posts`, or its status to the answers."""
        answer, link, grants = self._answers[index], self._links[index], self._grants[index]
        now_ns = self._core.clock.monotonic_ns()
        leased = int(answer["status"]) == Status.OK and not self._released
        if not leased or link is None or grants is None or now_ns >= int(self._usable_until_ns[index]):
            operation.answers["status"][place] = Status.MISS
            return
        if not grants.domain.fabric.caps.one_sided_initiator:
            operation.answers["status"][place] = Status.UNSUPPORTED
            return
        reads = _reads(spans, place, grants, int(answer["address"]), int(answer["rkey"]), int(answer["length"]))
        if not reads:
            operation.answers["status"][place] = Status.BAD_RANGE
            return
        request = Request(operation, b"", 1, place)
        request.deadline_ns = min(request.deadline_ns, int(self._usable_until_ns[index]))
        posts.append((link, request, reads, grants))

    def _post(self, operation: Operation, posts: list[_Post]) -> list[_Post]:
        """Post as many as the connections' send queues take at once; the others, for the next time. What it is too
        late for is answered."""
        taken: dict[RegionLink, int] = {}
        ready: list[_Post] = []
        later: list[_Post] = []
        now_ns = self._core.clock.monotonic_ns()
        for post in posts:
            link, request, reads, _grants = post
            if now_ns >= request.deadline_ns:
                late = now_ns >= operation.deadline_ns
                operation.mark(request, Status.DEADLINE if late else Status.MISS)
            elif link in taken and taken[link] + len(reads) > SEND_QUEUE_READS:
                later.append(post)
            else:
                taken[link] = taken.get(link, 0) + len(reads)
                ready.append(post)
        operation.pending.update(request for _link, request, _reads, _grants in ready)
        for link, request, reads, grants in ready:
            link.read(request, reads, grants)
        return later

    def _finish(self, answers: wire.Entries, spans: Spans, place: int, index: int, verify: bool) -> None:
        whole = int(self._answers["length"][index])
        moved = min(whole, int(spans.block_bytes[place]))
        answers["length"][place] = moved
        if not verify or moved < whole:
            return
        digest = xxhash.xxh3_64()
        left = whole
        for piece in spans.pieces(place):
            digest.update(piece[:left])
            left -= len(piece[:left])
        answers["checksum"][place] = digest.intdigest()
        if digest.intdigest() != int(self._answers["checksum"][index]):
            answers["status"][place] = Status.CORRUPT


def _reads(
    spans: Spans, place: int, grants: Grants, remote_address: int, rkey: int, length_bytes: int
) -> list[SendRequest]:
    """READs of up to `length_bytes` from the frame into the pieces of one block."""
    max_sge = min(SEND_SGES_MAX, grants.domain.fabric.caps.max_sge)
    first, last = (place, place + 1) if spans.starts is None else (int(n) for n in spans.starts[place : place + 2])
    reads: list[SendRequest] = []
    sges: list[Sge] = []
    done = start = 0
    for piece in range(first, last):
        size = min(int(spans.lengths[piece]), length_bytes - done)
        region = grants.domain.region(spans.memories[0 if spans.which is None else int(spans.which[piece])])
        if size <= 0 or region is None:
            break
        sges.append(Sge(int(spans.addresses[piece]), size, region.lkey))
        done += size
        if len(sges) == max_sge:
            reads.append(SendRequest(0, Opcode.RDMA_READ, tuple(sges), remote_address + start, rkey))
            sges, start = [], done
    if sges:
        reads.append(SendRequest(0, Opcode.RDMA_READ, tuple(sges), remote_address + start, rkey))
    return reads
