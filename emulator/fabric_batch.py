"""`post_rdma` for backends that carry out one request at a time: packed requests as `SendRequest`s.

They are marked, so that `fabric_core.QueuePair` lets the failure of any of them complete once for all.
"""

from __future__ import annotations

import errno

from doca_shims.api import RDMA_REQUEST, Opcode, SendFlags, SendRequest, Sge, ShimError

SIGNALED = int(SendFlags.SIGNALED)
BATCH = 1 << 8
BATCH_END = 1 << 9
"""Flags of a request that is one of a `post_rdma`, and of its last one: together they fail by one completion."""
SIGNALED_END = SIGNALED | BATCH | BATCH_END

_new = tuple.__new__


def unpack_rdma(
    wr_id: int, opcode: Opcode, requests: bytes | bytearray | memoryview, flags: SendFlags
) -> list[SendRequest]:
    """What `post_rdma` was given, one by one. Raises ShimError EINVAL for what is no batch of READs or WRITEs."""
    length_bytes = memoryview(requests).nbytes
    if opcode not in (Opcode.RDMA_WRITE, Opcode.RDMA_READ):
        raise ShimError(errno.EINVAL, "ibv_post_send", f"opcode {opcode} is not READ or WRITE")
    if not length_bytes or length_bytes % RDMA_REQUEST.size:
        raise ShimError(errno.EINVAL, "ibv_post_send", f"{length_bytes} bytes are no whole number of requests")
    part = SendFlags(BATCH)
    batch = []
    for local, remote, length, lkey, rkey, reserved in RDMA_REQUEST.iter_unpack(requests):
        if reserved:
            raise ShimError(errno.EINVAL, "ibv_post_send", f"the reserved field is {reserved}")
        sge = _new(Sge, (local, length, lkey))
        batch.append(_new(SendRequest, (wr_id, opcode, (sge,), remote, rkey, part)))
    batch[-1] = batch[-1]._replace(flags=SendFlags(int(flags) & SIGNALED | BATCH | BATCH_END))
    return batch
