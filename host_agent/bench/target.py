"""A pod under measurement: one client of it, memory to move blocks from and to, and checks of what arrives.

Owns the client's namespace of this run and its two buffers while a block size is measured; never the client.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, perf_counter, sleep
from typing import Any, Final

import numpy as np

from common.errors import UnavailableError, UserError
from common.status import BlockState, Status
from common.units import format_size
from common.wire import StatId
from host_agent.bench.cpu_time import CpuMeter
from host_agent.bench.measurements import Sample
from host_agent.bench.namespace import bench_record
from host_agent.bench.settings import CALL_TIMEOUT_S
from host_agent.block_pattern import BlockPattern
from host_agent.client import Client
from host_agent.memory import RegisteredMemory, Spans
from host_agent.results import BlockResults, Bools

KEY_BYTES: Final = 16
_SETTLE_TIMEOUT_S: Final = 60.0
_QUIESCE_TIMEOUT_S: Final = 2.0
_SETTLE_POLL_S: Final = 0.01
_STORE_STEP: Final = 8
"""Few enough that no region refuses them for the frames that wait for flash."""
_WAKING_KEYS: Final = 64
_WAKING_CALLS: Final = 20
_DAMAGE_STEP_WORDS: Final = 512
"""One word of each 4 KiB page of a destination is damaged before a load, so that old bytes do not pass."""


class Target:
    """`dpu_pids`: the pod's processes, where they run on this machine, for their processor time."""

    source: RegisteredMemory
    destination: RegisteredMemory

    def __init__(self, name: str, client: Client, block_bytes_max: int, dpu_pids: Sequence[int] = ()) -> None:
        self.name = name
        self.client = client
        self.namespace = client.namespace(
            bench_record(client.settings.tenant, secrets.token_bytes(16)), block_bytes_max
        )
        self.cpu = CpuMeter.of_pod(dpu_pids)
        self.wrong: list[str] = []
        """Blocks that came back with other bytes than were stored, in words."""
        self._pattern = BlockPattern(block_bytes_max)
        self._next = 0

    @property
    def slot_bytes(self) -> int:
        """Of the largest blocks that the pod takes."""
        return max((region.slot_bytes for region in self.client.regions), default=0)

    @contextlib.contextmanager
    def memory(self, length_bytes: int) -> Iterator[None]:
        """`source` and `destination` of that size, of the fabric's own memory."""
        self._next = 0
        with self.client.allocate(length_bytes) as self.source, self.client.allocate(length_bytes) as self.destination:
            yield

    def next_place(self, length_bytes: int) -> int:
        """The offset in both buffers at which the next round has its blocks: they go round, so that no round finds
        what the one before left in the processor's caches."""
        place = self._next if self._next + length_bytes <= self.source.length_bytes else 0
        self._next = place + length_bytes
        return place

    def fill(self, keys: Sequence[bytes], size: int, at: int = 0) -> None:
        """Write the contents of the keys to `source`, one after the other from offset `at`."""
        for start, key in zip(range(at, at + len(keys) * size, size), keys):
            self._pattern.fill(key, self.source.view[start : start + size])

    def damage(self, length_bytes: int, at: int = 0) -> None:
        """So that what is in `destination` from before does not pass for what is loaded next."""
        words = self.destination.array(np.uint64)[at // 8 : (at + length_bytes) // 8]
        words[::_DAMAGE_STEP_WORDS] ^= np.uint64(0x5A5A5A5A5A5A5A5A)

    def check(self, keys: Sequence[bytes], ok: Bools, size: int, at: int = 0) -> None:
        """Compare every byte of the blocks in `destination`, from offset `at`, that were answered OK."""
        for place in np.flatnonzero(ok).tolist():
            key, start = keys[place], at + place * size
            offset = self._pattern.first_mismatch(key, self.destination.view[start : start + size])
            if offset is not None:
                self.wrong.append(f"{self.name}: block {key.hex()} of {size} bytes differs at byte {offset}")

    def states(self, keys: Sequence[bytes]) -> Any:
        """`BlockState` of each key."""
        return self.client.lookup(self.namespace, keys, timeout_s=CALL_TIMEOUT_S).state

    def settle(self, keys: Sequence[bytes]) -> None:
        """Wait until nothing of `keys` is on its way to flash any more, so that no flush runs into what follows."""
        deadline_s = monotonic() + _SETTLE_TIMEOUT_S
        while (self.states(keys) == BlockState.STAGED).any():
            if monotonic() > deadline_s:
                raise UnavailableError(f"blocks were still not on flash after {_SETTLE_TIMEOUT_S:g} s")
            sleep(_SETTLE_POLL_S)

    def quiesce(self) -> None:
        """Wait until the regions have discarded what was deleted, so that it does not run into what follows. Goes on
        after a while where others keep them busy."""
        deadline_s = monotonic() + _QUIESCE_TIMEOUT_S
        while self.stat(StatId.SLOTS_IN_TRANSIT) != (0,) and monotonic() < deadline_s:
            sleep(_SETTLE_POLL_S)

    def store(self, keys: Sequence[bytes], size: int) -> None:
        """Not timed: fill `source`, store it on flash. Raises UnavailableError unless every block is taken."""
        self.fill(keys, size)
        for start in range(0, len(keys), _STORE_STEP):
            part = keys[start : start + _STORE_STEP]
            places = self.source.blocks(np.arange(start, start + len(part)), size)
            results = self.client.store(self.namespace, part, places, until_flash=True, timeout_s=CALL_TIMEOUT_S)
            if not results.all_ok:
                raise UnavailableError(f"the pod does not take blocks of {format_size(size)}: {results}")

    def delete(self, keys: Sequence[bytes]) -> None:
        """Whatever of `keys` is there."""
        for start in range(0, len(keys), 512):
            self.client.delete(self.namespace, keys[start : start + 512], timeout_s=CALL_TIMEOUT_S)

    def stat(self, *ids: StatId) -> tuple[int, ...]:
        """The sums over all regions."""
        regions = list(self.client.stat(timeout_s=CALL_TIMEOUT_S).values())
        return tuple(sum(stats.get(stat_id, 0) for stats in regions) for stat_id in ids)

    def wake(self) -> None:
        """Untimed LOOKUPs of blocks that nobody stored, so that no process is asleep when the clock starts, as none is
        in the loops of the limits."""
        keys = fresh_keys(_WAKING_KEYS)
        for _call in range(_WAKING_CALLS):
            self.client.lookup(self.namespace, keys, timeout_s=CALL_TIMEOUT_S)

    def time_calls(
        self,
        call: Callable[[Sequence[bytes], Spans, slice], BlockResults],
        keys: Sequence[bytes],
        memory: RegisteredMemory,
        size: int,
        batch: int,
        at: int,
    ) -> tuple[Sample, Bools]:
        """`call` for each batch of `keys` and their places in `memory`, from offset `at`, timed each by itself; the
        processor time of both sides is that of all of them. Blocks that did not succeed count no bytes, and are
        said."""
        parts = [slice(start, min(start + batch, len(keys))) for start in range(0, len(keys), batch)]
        work = [(keys[part], memory.spans(at + np.arange(part.start, part.stop) * size, size), part) for part in parts]
        answers: list[BlockResults] = []
        sample = Sample()
        self.wake()
        before = self.cpu.read_s()
        for part_keys, places, part in work:
            started = perf_counter()
            answers.append(call(part_keys, places, part))
            sample.calls_s.append(perf_counter() - started)
        sample.cpu_s = self.cpu.since_s(before)
        ok: Bools = np.concatenate([results.status == Status.OK for results in answers])
        for results in answers:
            sample.other_answers.update({s.name: n for s, n in results.counts().items() if s is not Status.OK})
        sample.work = int(ok.sum()) * size / 1e9
        return sample, ok


def require_sizes(target: Target, sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of `sizes` that the pod takes. Raises UserError for none."""
    fitting = tuple(size for size in sizes if size <= target.slot_bytes)
    if not fitting:
        raise UserError(f"the pod's blocks are at most {format_size(target.slot_bytes)}; give such a size")
    return fitting


def fresh_keys(count: int) -> list[bytes]:
    """Keys that no run has used."""
    return [os.urandom(KEY_BYTES) for _ in range(count)]
