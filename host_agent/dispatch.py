"""Sends what a call is made of to the regions that it concerns, and withdraws it.

Decides nothing but where: placement says which region, the link's grants what a request there may name. Used by
`host_agent.calls` and `host_agent.lease`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from common import wire
from common.wire import MAX_BATCH, Flags, Op
from host_agent import batch
from host_agent.core import AgentCore
from host_agent.link import RegionLink
from host_agent.memory import Spans
from host_agent.namespace import Namespace
from host_agent.operation import Indices, Operation, Request, take
from host_agent.plan import Plan
from host_agent.registration import Grants
from host_agent.topology import SlotClass

log = logging.getLogger(__name__)
_BYTE_REGIONS_MAX: Final = 256
Seal = Callable[[Request], None]
"""Completes a capsule right before it is sent, while those before it are on their way."""


class Share(NamedTuple):
    """The blocks of one region, by their places in the batch (None: all of it), and what its connection let them name;
    None where it was down."""

    link: RegionLink
    blocks: Indices | None
    grants: Grants | None


_Prepared = list[tuple[RegionLink, list[Request], Grants]]


def where(namespace: Namespace, slot_class: SlotClass, key: tuple[int, int]) -> tuple[RegionLink, Grants | None, int]:
    """The link of one key's region, and what a request there may name; no grants: it is answered DISCONNECTED."""
    link = slot_class.regions[slot_class.pod_map.place_one(*key)].link
    grants = link.grants
    handle = grants.handles.get(namespace.digest, 0) if grants is not None else 0
    return link, grants if handle else None, handle


def submit_one(
    core: AgentCore, operation: Operation, link: RegionLink, entry: bytes, grants: Grants, flags: Flags
) -> None:
    request = Request(operation, entry, 1, 0, flags)
    operation.pending.add(request)
    try:
        link.submit((request,), grants)
    except BaseException:
        core.progress.abandon(operation)
        raise


def submit_plan(
    core: AgentCore,
    operation: Operation,
    slot_class: SlotClass,
    plan: Plan,
    flags: Flags = Flags.NONE,
    *,
    capsule_blocks: int = MAX_BATCH,
    seal: Seal | None = None,
) -> None:
    """Send every block of a plain batch to its region, about so many in a capsule."""
    if plan.order is not None:
        operation.reorder(plan.order)
    body = memoryview(plan.body)
    entry_bytes = len(body) // operation.count
    prepared: _Prepared = []
    start = 0
    for region, grants, handle, end in zip(slot_class.regions, plan.grants, plan.handles, plan.ends):
        if end > start and handle and grants is not None:  # the others stay DISCONNECTED
            if end - start <= capsule_blocks:
                made = [Request(operation, body[start * entry_bytes : end * entry_bytes], end - start, start, flags)]
            else:
                made = [
                    Request(operation, body[first * entry_bytes : last * entry_bytes], last - first, first, flags)
                    for first, last in batch.cuts(start, end, capsule_blocks)
                ]
            operation.pending.update(made)
            prepared.append((region.link, made, grants))
        start = end
    _send(core, operation, prepared, seal)


def plan_shares(slot_class: SlotClass, plan: Plan) -> list[Share]:
    """Which blocks a plan asks which region for."""
    shares: list[Share] = []
    order = None if plan.order is None else np.frombuffer(plan.order, np.int64).astype(np.intp)
    start = 0
    for region, grants, end in zip(slot_class.regions, plan.grants, plan.ends):
        if end > start:
            shares.append(Share(region.link, None if order is None else order[start:end], grants))
        start = end
    return shares


def submit(
    core: AgentCore,
    operation: Operation,
    namespace: Namespace,
    slot_class: SlotClass,
    pairs: batch.Pairs,
    entries: wire.Entries,
    sendable: npt.NDArray[np.intp] | None,
    spans: Spans | None,
    flags: Flags,
    *,
    capsule_blocks: int = MAX_BATCH,
    seal: Seal | None = None,
) -> list[Share]:
    """Send every block, or those at `sendable`, to its region, about so many in a capsule."""
    shares, ordered = _shares(operation, slot_class, pairs, entries, _by_address(operation, spans, sendable))
    prepared: _Prepared = []
    position = 0
    for link, blocks, grants in shares:
        count = len(ordered) if blocks is None else len(blocks)
        handle = grants.handles.get(namespace.digest) if grants is not None else None
        if grants is not None and handle is not None:  # the others stay DISCONNECTED
            part = ordered[position : position + count]
            made = batch.requests(
                operation,
                part,
                position,
                blocks,
                handle,
                spans=spans,
                domain=grants.domain,
                flags=flags,
                capsule_blocks=capsule_blocks,
            )
            prepared.append((link, made, grants))
        position += count
    _send(core, operation, prepared, seal)
    return shares


def _send(core: AgentCore, operation: Operation, prepared: _Prepared, seal: Seal | None) -> None:
    try:
        for link, made, grants in prepared:
            if seal is None:
                link.submit(made, grants)
                continue
            for request in made:
                seal(request)
                link.submit((request,), grants)
    except BaseException:
        core.progress.abandon(operation)
        raise


def submit_page(
    core: AgentCore, op: Op, link: RegionLink, entries: wire.Entries, flags: Flags, timeout_s: float | None
) -> Operation:
    """LIST and STAT of one region: the answer is in `Operation.pages`."""
    operation = core.operation(op, 1, timeout_s)
    operation.pages = []
    request = Request.of(operation, entries, flags=flags)
    operation.pending.add(request)
    link.submit([request], link.grants)
    return operation


def cancel(core: AgentCore, operation: Operation) -> Operation | None:
    """Ask the DPUs to give up what is outstanding of `operation`; they answer it, CANCELLED where nothing was
    moved yet. Returns the operation of asking, None where nothing is outstanding."""
    asking = core.operation(Op.CANCEL, len(operation.pending), core.settings.timeout_s)
    prepared: list[tuple[RegionLink, Request]] = []
    at = 0
    for link in {request.link for request in list(operation.pending)}:
        ids = link.withdraw(operation) if link is not None else []
        if link is None or not ids:
            continue
        entries = np.zeros(len(ids), wire.CANCEL_ENTRY)
        entries["request_id"] = ids
        prepared.append((link, Request.of(asking, entries, at)))
        at += len(ids)
    asking.pending.update(request for _link, request in prepared)
    for link, request in prepared:
        link.submit([request], link.grants)
    return asking if prepared else None


def _by_address(operation: Operation, spans: Spans | None, sendable: Indices | None) -> Indices | None:
    """A RETRIEVE's blocks in the order of their destinations, which spares each DPU the search for overlaps: an
    engine's pages are in no order once it has run for a while."""
    if operation.op is not Op.RETRIEVE or spans is None or spans.starts is not None:
        return sendable
    addresses = spans.addresses if sendable is None else spans.addresses[sendable]
    if (addresses[1:] >= addresses[:-1]).all():
        return sendable
    order = addresses.argsort(kind="stable")
    return order if sendable is None else sendable[order]


def _shares(
    operation: Operation,
    slot_class: SlotClass,
    pairs: batch.Pairs,
    entries: wire.Entries,
    sendable: Indices | None,
) -> tuple[list[Share], wire.Entries]:
    """Which blocks go to which region, and the entries in the order of the regions."""
    if sendable is not None:
        pairs = pairs[sendable]
    if not len(pairs):
        return [], entries
    regions = slot_class.regions
    placed = slot_class.pod_map.place(pairs[:, 0], pairs[:, 1])
    if len(regions) == 1 and sendable is None:
        return [Share(regions[0].link, None, regions[0].link.grants)], entries
    # Bytes are sorted by radix: 3 us for 512, where words take 8.
    order = placed.astype(np.uint8 if len(regions) <= _BYTE_REGIONS_MAX else np.intp).argsort(kind="stable")
    if sendable is not None:
        order = sendable[order]
    operation.reorder(order)
    shares: list[Share] = []
    first = 0
    for region, count in zip(regions, np.bincount(placed, minlength=len(regions)).tolist()):
        if count:
            shares.append(Share(region.link, order[first : first + count], region.link.grants))
            first += count
    return shares, take(entries, order)
