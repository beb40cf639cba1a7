"""A plain batch cut by region in one pass of native code (`host_agent.native_batches`).

Answers None for whatever is not plain, and always where the native code is missing: `host_agent.batch` then does it in
numpy, to the same bytes. Sends nothing. Used by `host_agent.calls`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from common.errors import UserError
from host_agent import native_batches
from host_agent.memory import Spans
from host_agent.registration import Grants
from host_agent.topology import SlotClass


class Plan(NamedTuple):
    """The entries of a batch, region by region: those of region i end at entry ends[i] of `body`. `order`: which block
    each entry is for (64-bit numbers; None: they are in order). `grants` and `handles` by region; no handle: its
    blocks cannot be asked for."""

    body: bytearray
    order: bytes | None
    ends: tuple[int, ...]
    grants: list[Grants | None]
    handles: list[int]

    @property
    def blocks(self) -> int:
        return self.ends[-1]


def plan_keys(slot_class: SlotClass, digest: bytes, keys: Any, argument: int) -> Plan | None:
    """LOOKUP, LEASE, PIN, UNPIN, TOUCH, DELETE."""
    if native_batches.MODULE is None:
        return None
    grants, handles = _grants(slot_class, digest)
    made = native_batches.MODULE.keys(keys, slot_class.pod_map.table, handles, argument)
    return None if made is None else Plan(made[0], made[1], made[2], grants, handles)


def plan_blocks(
    slot_class: SlotClass,
    digest: bytes,
    keys: Any,
    spans: Spans,
    *,
    offset: int = 0,
    ttl_s: int = 0,
    flags: int = 0,
    must_be_apart: bool = False,
) -> Plan | None:
    """STORE, RETRIEVE, PREFETCH to the host. Raises UserError for memory that is not registered."""
    if native_batches.MODULE is None or spans.starts is not None or spans.which is not None or not len(spans.addresses):
        return None
    grants, handles = _grants(slot_class, digest)
    rkeys: list[int] = []
    memory = spans.memories[0]
    for grant, handle in zip(grants, handles):
        region = grant.domain.region(memory) if grant is not None and handle else None
        if region is None and handle:
            raise UserError("this memory has been closed, or is registered with another client")
        rkeys.append(region.rkey if region is not None else 0)
    made = native_batches.MODULE.blocks(
        keys,
        slot_class.pod_map.table,
        handles,
        rkeys,
        spans.addresses,
        spans.lengths,
        offset,
        ttl_s,
        flags,
        must_be_apart,
    )
    return None if made is None else Plan(made[0], made[1], made[2], grants, handles)


def _grants(slot_class: SlotClass, digest: bytes) -> tuple[list[Grants | None], list[int]]:
    grants: list[Grants | None] = []
    handles: list[int] = []
    for region in slot_class.regions:
        grant = region.link.grants
        grants.append(grant)
        handles.append(grant.handles.get(digest, 0) if grant is not None else 0)
    return grants, handles
