"""How fast an index is once it is large and full: look-ups through the engine, stores, and writes of slot-table pages.

Takes a region as `recovery` opened it and puts work on it that is alike at every size, so that regions of different
size and fill can be compared in one run. Rates are by this thread's processor time, which a busy neighbour hardly
touches; those of the disk are by the clock. What it stores is in the index alone: the region is of no further use.
Called by `measure_large`; never part of serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from common.clock import SystemClock
from common.errors import EntresolError
from common.wire import KEY_ENTRY, Op, decode_response, encode
from doca_shims.api import FlashDevice, FlashOp, FlashRequest
from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.regions.admission import AdmitAll
from dpu_app.regions.blocking_flash import wait_readable
from dpu_app.regions.context import EngineSettings
from dpu_app.regions.engine import RegionEngine
from dpu_app.regions.index import USED
from dpu_app.regions.quota import FixedQuotas
from dpu_app.regions.recovery import OpenRegion
from dpu_app.regions.slot_table import encode_page
from dpu_app.regions.superblock import ENTRIES_PER_PAGE, TABLE_PAGE_BYTES
from dpu_app.regions.window import Window, WindowLayout

LOOKUP_BATCHES: Final = (1, 16, 512)
TABLE_WRITES_DEPTH: Final = 4
"""Pages that the engine has under way at a time."""
_FRAMES: Final = 64
_WINDOW_SLOT_BYTES: Final = 4096
_SESSION = _CONNECTION = 1
_FLASH_TIMEOUT_S: Final = 30.0
_TAG: Final = 1 << 63
"""And above: nobody else's."""
Slots = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Effort:
    """How much of each kind of work."""

    lookup_keys: int = 131072
    """Of each batch size, at most; a batch of one gets a sixteenth of it."""
    stores: int = 30000
    table_pages: int = 2000


@dataclass(frozen=True)
class Speed:
    """Rates a second of processor time. `lookups`: keys, by "present" or "absent" and batch. Latencies likewise."""

    lookups: dict[str, float]
    inserts: float
    """Into free slots: slot, hash and eviction order."""
    insert_p999_us: float
    replacements: float
    """The same where another block is evicted for it."""
    replacement_p999_us: float
    pages_encoded: float
    pages_written: float
    """Random pages of the slot table, O_DIRECT, as many under way as the engine has; by the clock."""


class _NoLeases:
    def grant(self, connection_id: int, address: int, length_bytes: int) -> int:  # noqa: ARG002
        raise EntresolError("nothing is leased here")

    def revoke(self, connection_id: int, rkey: int) -> None:
        pass


def measure_speed(region: OpenRegion, flash: FlashDevice, scratch: AnonymousMemory, effort: Effort) -> Speed:
    """`scratch` is registered with `flash`. Raises EntresolError where the index does not answer what it holds."""
    random = np.random.default_rng(7)
    used = random_used_slots(region, effort.lookup_keys, random)
    lookups = _lookups(region, flash, used, random)
    inserted = _inserts(region, effort.stores, random)
    replaced = _replacements(region, effort.stores, random)
    encoded, written = _table_pages(region, flash, scratch, effort.table_pages, random)
    return Speed(lookups, *inserted, *replaced, encoded, written)


def random_used_slots(region: OpenRegion, count: int, random: np.random.Generator) -> Slots:
    """`count` slots in use, with repetitions, evenly from all."""
    flags = region.index.flags
    found: list[Slots] = []
    missing = count
    while missing > 0:
        tried = random.integers(0, region.index.slots, 2 * missing + 64)
        found.append(tried[flags[tried] == USED][:missing])
        missing -= len(found[-1])
        if region.index.used == 0:
            raise EntresolError("the region is empty: there is nothing to look up")
    return np.concatenate(found)


# ------------------------------------------------------------------------------------------------- look-ups


def _lookups(region: OpenRegion, flash: FlashDevice, used: Slots, random: np.random.Generator) -> dict[str, float]:
    """Whole LOOKUP requests, capsule in to capsule out; the keys of each are others than those before."""
    index = region.index
    engine = _engine(region, flash)
    rates: dict[str, float] = {}
    present = np.zeros(len(used), KEY_ENTRY)
    present["key_lo"], present["key_hi"] = index.key_lo[used], index.key_hi[used]
    handles = _open_namespaces(engine, region)
    present["namespace"] = [handles[namespace] for namespace in index.namespace[used].tolist()]
    absent = present.copy()
    absent["key_hi"] = random.integers(1 << 63, 1 << 64, len(used), np.uint64)  # stored ones are below
    for name, keys in (("present", present), ("absent", absent)):
        for batch in LOOKUP_BATCHES:
            count = len(keys) if batch > 1 else max(1, len(keys) // 16)
            rates[f"{name}, {batch}"] = _lookup_rate(engine, keys[:count], batch, len(keys) if name == "present" else 0)
    engine.close_session(_SESSION)
    return rates


def _engine(region: OpenRegion, flash: FlashDevice) -> RegionEngine:
    layout = WindowLayout.fit(_FRAMES * _WINDOW_SLOT_BYTES, _WINDOW_SLOT_BYTES)
    memory = AnonymousMemory(layout.memory_bytes)
    window = Window(layout, memory.address, memory.view)
    leases, quotas = _NoLeases(), FixedQuotas({})
    return RegionEngine(EngineSettings(), region, window, flash.caps, SystemClock(), leases, AdmitAll(), quotas)


def _open_namespaces(engine: RegionEngine, region: OpenRegion) -> dict[int, int]:
    """Connect as an agent that may use every namespace of the region: handles by namespace id."""
    index = region.index
    ids = np.unique(index.namespace[index.flags == USED]).tolist()
    handles = {namespace: handle for handle, namespace in enumerate(ids, 1)}
    digests = {handle: index.namespace_digest(namespace) for namespace, handle in handles.items()}
    engine.open_session(_SESSION, "measure", digests)
    engine.connected(_SESSION, _CONNECTION, 0)
    return handles


def _lookup_rate(engine: RegionEngine, keys: npt.NDArray[np.void], batch: int, found_each: int) -> float:
    """Keys a second. `found_each`: 0 where none of them is present."""
    capsules = [
        encode(Op.LOOKUP, number, keys[start : start + batch])
        for number, start in enumerate(range(0, len(keys) - batch + 1, batch), 1)
    ]
    answers: list[bytes] = []
    outbox = engine.outbox
    started_s = time.thread_time()
    for capsule in capsules:
        engine.receive(_CONNECTION, capsule)
        answers.append(outbox.responses.pop()[1])
    seconds = time.thread_time() - started_s
    for answer in answers:
        prefix = decode_response(answer).aux
        if prefix != (batch if found_each else 0):
            raise EntresolError(f"a look-up of {batch} keys found {prefix} of them")
    return len(capsules) * batch / seconds


# --------------------------------------------------------------------------------------------------- stores


def _inserts(region: OpenRegion, count: int, random: np.random.Generator) -> tuple[float, float]:
    """Blocks into free slots, which are taken out again afterwards; a second, and p99.9 in us."""
    index, policy = region.index, region.policy
    count = min(count, index.free)
    keys = _fresh_keys(count, random)
    stamp_s, namespace = int(time.time()), int(index.namespace[int(np.argmax(index.flags == USED))])
    slots: list[int] = []

    def insert(key: tuple[int, int]) -> None:
        slot = index.allocate()
        index.insert(slot, *key, namespace, _WINDOW_SLOT_BYTES, key[0], 1, stamp_s, 0)
        policy.on_insert(slot, index.fingerprint(*key, namespace))
        slots.append(slot)

    rate = _timed(insert, keys)
    for slot in slots:
        policy.on_remove(slot)
        index.remove(slot)
        index.release(slot)
    return rate


def _replacements(region: OpenRegion, count: int, random: np.random.Generator) -> tuple[float, float]:
    """Blocks for which others are evicted; a second, and p99.9 in us."""
    index, policy = region.index, region.policy
    count = min(count, index.used // 4)
    stamp_s, namespace = int(time.time()), int(index.namespace[int(np.argmax(index.flags == USED))])

    def replace(key: tuple[int, int]) -> None:
        slot = policy.victim(_never)
        policy.on_remove(slot)
        index.remove(slot)
        index.insert(slot, *key, namespace, _WINDOW_SLOT_BYTES, key[0], 1, stamp_s, 0)
        policy.on_insert(slot, index.fingerprint(*key, namespace))

    return _timed(replace, _fresh_keys(count, random))


def _never(_slot: int) -> bool:
    return False


def _fresh_keys(count: int, random: np.random.Generator) -> list[tuple[int, int]]:
    words = random.integers(1 << 63, 1 << 64, (count, 2), np.uint64).tolist()
    return [(lo, hi) for lo, hi in words]


def _timed(work: Callable[[tuple[int, int]], None], keys: Sequence[tuple[int, int]]) -> tuple[float, float]:
    times_ns: list[int] = []
    clock = time.thread_time_ns
    for key in keys:
        started_ns = clock()
        work(key)
        times_ns.append(clock() - started_ns)
    if not times_ns:
        return 0.0, 0.0
    return len(times_ns) / max(sum(times_ns), 1) * 1e9, float(np.percentile(times_ns, 99.9)) / 1e3


# --------------------------------------------------------------------------------------------- table writes


def _table_pages(
    region: OpenRegion, flash: FlashDevice, scratch: AnonymousMemory, count: int, random: np.random.Generator
) -> tuple[float, float]:
    """Pages encoded a second, and random pages written a second. They hold what the index holds."""
    geometry, salt = region.superblock.geometry, region.superblock.salt
    pages = random.integers(0, geometry.slots // ENTRIES_PER_PAGE, count).tolist()
    started_s = time.thread_time()
    encoded = [encode_page(region.index, page, salt) for page in pages]
    encoding_s = time.thread_time() - started_s
    spare = list(range(TABLE_WRITES_DEPTH))
    under_way: dict[int, int] = {}
    waiting = list(zip(pages, encoded))
    done = 0
    started_s = time.perf_counter()
    while done < count:
        requests: list[FlashRequest] = []
        while waiting and spare:
            page, data = waiting.pop()
            buffer = spare.pop()
            at = buffer * TABLE_PAGE_BYTES
            scratch.view[at : at + TABLE_PAGE_BYTES] = data
            tag = _TAG + len(waiting)
            under_way[tag] = buffer
            offset = geometry.page_offset(page)
            requests.append(FlashRequest(tag, FlashOp.WRITE, offset, scratch.address + at, TABLE_PAGE_BYTES))
        if requests:
            flash.submit(requests)
        if not wait_readable(flash, _FLASH_TIMEOUT_S):
            raise EntresolError(f"flash completed nothing for {_FLASH_TIMEOUT_S:g} s")
        for tag, result in flash.poll():
            if result != TABLE_PAGE_BYTES:
                raise EntresolError(f"writing a page of the slot table: {result}")
            spare.append(under_way.pop(tag))
            done += 1
    return count / encoding_s, count / (time.perf_counter() - started_s)
