"""From a caller's keys and memory to capsules: entries as one structured array, cut by region and by capsule size.

Pure arrays: no object a block on the way, no I/O. What the wire cannot say is answered here, by a status, before
anything is sent. Used by `host_agent.core`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from common import wire
from common.errors import UserError
from common.status import Status
from host_agent.memory import LENGTH_BYTES_MAX, U64, Spans
from host_agent.operation import Indices, Operation, Request
from host_agent.registration import Domain

Keys: TypeAlias = Sequence[bytes] | bytes | npt.NDArray[Any]
"""16-byte keys: a list of them, their concatenation, or an array of n x 16 bytes."""
Pairs: TypeAlias = npt.NDArray[np.uint64]
Entries: TypeAlias = wire.Entries

_CAPSULE_ROOM_BYTES = wire.MAX_CAPSULE_BYTES - wire.HEADER_BYTES
NOT_FAILED = 255
"""In an array of statuses: nothing is wrong so far."""


def key_pairs(keys: Keys) -> Pairs:
    """[n, 2]: the low and high halves of each key. Raises UserError for a key that is not 16 bytes."""
    if isinstance(keys, np.ndarray):
        flat = np.ascontiguousarray(keys).view(np.uint8).reshape(-1)
        if flat.nbytes % wire.KEY_BYTES or (keys.ndim > 1 and keys.nbytes != len(keys) * wire.KEY_BYTES):
            raise UserError(f"an array of keys has {wire.KEY_BYTES} bytes for each")
        return flat.view("<u8").reshape(-1, 2)
    if isinstance(keys, bytes):
        joined = keys
        if len(joined) % wire.KEY_BYTES:
            raise UserError(f"a block key is {wire.KEY_BYTES} bytes")
    else:
        joined = b"".join(keys)
        if len(joined) != len(keys) * wire.KEY_BYTES or (keys and max(map(len, keys)) != wire.KEY_BYTES):
            raise UserError(f"a block key is {wire.KEY_BYTES} bytes")
    return np.frombuffer(joined, "<u8").reshape(-1, 2)


def key_entries(pairs: Pairs, argument: int = 0) -> Entries:
    """LOOKUP, LEASE, PIN, UNPIN, TOUCH, DELETE; the namespace is filled in for each region."""
    entries = np.zeros(len(pairs), wire.KEY_ENTRY)
    entries["key_lo"] = pairs[:, 0]
    entries["key_hi"] = pairs[:, 1]
    if argument:
        entries["argument"] = argument
    return entries


def block_entries(
    pairs: Pairs, spans: Spans | None, lengths: U64 | int, offset: npt.ArrayLike, ttl_s: int, flags: int
) -> Entries:
    """STORE, RETRIEVE, PREFETCH; namespace, rkeys and scatter lists are filled in for each region and capsule."""
    entries = np.zeros(len(pairs), wire.BLOCK_ENTRY)
    entries["key_lo"] = pairs[:, 0]
    entries["key_hi"] = pairs[:, 1]
    entries["length"] = lengths
    if not isinstance(offset, int) or offset:
        entries["offset"] = offset
    if flags:
        entries["flags"] = flags
    if ttl_s:
        entries["ttl_s"] = ttl_s
    if spans is not None and spans.starts is None:
        entries["sge_count"] = 1
        entries["address"] = spans.addresses
    elif spans is not None and spans.starts is not None:
        entries["sge_count"] = np.minimum(np.diff(spans.starts), 0xFFFF)
    return entries


def refusals(spans: Spans, offset: npt.ArrayLike, *, destination: bool, whole_bytes: int = 0) -> npt.NDArray[np.uint8]:
    """For each block the status it is answered with unsent, or NOT_FAILED. `whole_bytes` above 0: each destination
    must hold a block of so many bytes, whose own length is not known."""
    sizes = spans.block_bytes
    statuses = np.full(len(sizes), NOT_FAILED, np.uint8)
    if _plain(spans, offset, max(whole_bytes, 1) if destination else 0):
        return statuses
    if destination:  # length 0 would mean "to the end" on the wire, and write past the caller's memory
        statuses[sizes == 0] = Status.BAD_RANGE
        if whole_bytes and spans.starts is None:
            statuses[sizes < whole_bytes] = Status.BAD_RANGE
        _refuse_overlaps(spans, statuses)
    statuses[sizes > LENGTH_BYTES_MAX] = Status.TOO_LARGE
    if not isinstance(offset, int) or not 0 <= offset <= LENGTH_BYTES_MAX:
        offsets = np.broadcast_to(np.asarray(offset), sizes.shape)
        statuses[(offsets < 0) | (offsets > LENGTH_BYTES_MAX)] = Status.BAD_RANGE
    if spans.starts is not None:
        statuses[np.diff(spans.starts) > wire.MAX_SGES_PER_ENTRY] = Status.BAD_REQUEST
    return statuses


def _plain(spans: Spans, offset: npt.ArrayLike, least_bytes: int) -> bool:
    """Whether nothing can be wrong: pieces of one size, apart from each other. Most batches, and soon told.
    `least_bytes` 0: they are sources, which may overlap."""
    lengths = spans.lengths
    if spans.starts is not None or not len(lengths) or not isinstance(offset, int):
        return False
    size = int(lengths[0])
    if not least_bytes <= size <= LENGTH_BYTES_MAX or not 0 <= offset <= LENGTH_BYTES_MAX or (lengths != size).any():
        return False
    if not least_bytes or len(lengths) == 1:
        return True
    addresses = np.sort(spans.addresses)
    return not (addresses[1:] - addresses[:-1] < size).any()


def _refuse_overlaps(spans: Spans, statuses: npt.NDArray[np.uint8]) -> None:
    """OVERLAP for each block whose destination overlaps that of an earlier one, or itself. Each region checks its own
    share; only here are all of them seen."""
    order = np.argsort(spans.addresses, kind="stable")
    begins = spans.addresses[order]
    ends = begins + spans.lengths[order]
    if not (np.maximum.accumulate(ends)[:-1] > begins[1:]).any():
        return
    taken_begins: list[int] = []
    taken_ends: list[int] = []
    starts = range(len(spans) + 1) if spans.starts is None else spans.starts.tolist()
    for block in range(len(spans)):
        for piece in range(starts[block], starts[block + 1]):
            begin, end = int(spans.addresses[piece]), int(spans.addresses[piece] + spans.lengths[piece])
            at = bisect.bisect_left(taken_ends, begin + 1)
            if begin == end:
                continue
            if at < len(taken_begins) and taken_begins[at] < end:
                statuses[block] = Status.OVERLAP
            else:
                taken_begins.insert(at, begin)
                taken_ends.insert(at, end)


def requests(
    operation: Operation,
    entries: Entries,
    first_position: int,
    blocks: Indices | None,
    namespace: int,
    *,
    spans: Spans | None = None,
    domain: Domain | None = None,
    flags: wire.Flags = wire.Flags.NONE,
    capsule_blocks: int = wire.MAX_BATCH,
) -> list[Request]:
    """Capsules of one region's share, whose `entries` are filled in here. `blocks` are their places in the batch (None:
    all, in order), `domain` has the keys of the spans' memory.

    The requests are added to `operation.pending`. Raises UserError for memory that is not registered.
    """
    entries["namespace"] = namespace
    rkeys = None
    if spans is not None and domain is not None:
        rkeys = _rkeys(spans, domain)
        if spans.starts is None:
            which = spans.which if spans.which is None or blocks is None else spans.which[blocks]
            entries["rkey"] = rkeys[0] if which is None else rkeys[which]
    result: list[Request] = []
    scattered = spans is not None and spans.starts is not None
    if scattered and blocks is None:
        blocks = np.arange(len(entries))
    for first, last in _capsule_bounds(entries, scattered, capsule_blocks):
        part = entries[first:last]
        sges = None
        if spans is not None and rkeys is not None and blocks is not None and scattered:
            sges = _scatter(part, spans, blocks[first:last], rkeys)
        result.append(Request.of(operation, part, first_position + first, flags, sges))
    operation.pending.update(result)
    return result


def _rkeys(spans: Spans, domain: Domain) -> npt.NDArray[np.uint32]:
    keys: list[int] = []
    for memory in spans.memories:
        region = domain.region(memory)
        if region is None:
            raise UserError("this memory has been closed, or is registered with another client")
        keys.append(region.rkey)
    return np.array(keys, np.uint32)


def cuts(start: int, end: int, about: int) -> Iterator[tuple[int, int]]:
    """Ranges for one capsule each, all of about one size: at least `about` entries, where there are so many."""
    count = end - start
    parts = max(count // about, -(-count // wire.MAX_BATCH))
    for part in range(parts):
        yield start + part * count // parts, start + (part + 1) * count // parts


def _capsule_bounds(entries: Entries, scattered: bool, about: int) -> Iterator[tuple[int, int]]:
    """Ranges of entries that fit one capsule each, of `about` so many where elements leave room for them."""
    count = len(entries)
    if not scattered:
        yield from cuts(0, count, about)
        return
    elements = entries["sge_count"].astype(np.int64)
    elements[elements == 1] = 0  # carried in the entry itself
    ends = np.cumsum(elements * wire.SGE.itemsize + entries.dtype.itemsize)
    first = 0
    while first < count:
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + _CAPSULE_ROOM_BYTES, side="right"))
        last = min(max(last, first + 1), first + about, count)
        yield first, last
        first = last


def _scatter(entries: Entries, spans: Spans, blocks: npt.NDArray[np.intp], rkeys: npt.NDArray[np.uint32]) -> Entries:
    """The capsule's list of elements; sets the entries' `address` to their first one, or to the memory itself where
    there is only one."""
    starts = spans.starts
    if starts is None:
        raise ValueError("these spans are not scattered")
    counts = starts[blocks + 1] - starts[blocks]
    many = counts > 1
    listed = np.where(many, counts, 0)
    firsts = np.cumsum(listed) - listed
    pieces = np.repeat(starts[blocks] - firsts, listed) + np.arange(int(listed.sum()))
    sges = np.zeros(len(pieces), wire.SGE)
    sges["address"] = spans.addresses[pieces]
    sges["length"] = spans.lengths[pieces]
    sges["rkey"] = rkeys[0] if spans.which is None else rkeys[spans.which[pieces]]
    single = counts == 1
    own = starts[blocks[single]]
    addresses = firsts.astype(np.uint64)
    addresses[single] = spans.addresses[own]
    entries["address"] = addresses
    keys = np.zeros(len(blocks), np.uint32)
    keys[single] = rkeys[0] if spans.which is None else rkeys[spans.which[own]]
    entries["rkey"] = keys
    return sges
