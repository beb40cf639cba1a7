"""The operations that move blocks: each measures one round on one target, on fresh blocks, and checks every byte.

STORE staged, STORE to flash, RETRIEVE staged and cold, one-sided READ of leased frames. `host_agent.bench.run` says
in which order and beside which limits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

import numpy as np

from common.status import BlockState
from common.units import approximate_size
from common.wire import StatId
from host_agent.bench.measurements import Sample
from host_agent.bench.settings import CALL_TIMEOUT_S
from host_agent.bench.target import Target, fresh_keys
from host_agent.lease import Lease
from host_agent.memory import Spans
from host_agent.results import BlockResults

_COLD_BYTES_MAX: Final = 8 << 30
"""No more is stored to push blocks out of the windows. Blocks of others are never evicted for it."""
_LEASE_S: Final = 20.0
_TOUCH_FRAMES: Final = 1.25
"""Times the frames there are: hashing does not give every region the same."""


class FreshBlocks:
    """Blocks of one round that nobody has seen before; deleted on leaving the context."""

    def __init__(self, target: Target, size: int, count: int, verify: bool) -> None:
        self.target = target
        self.size = size
        self.keys = fresh_keys(count)
        self.verify = verify
        self.at = target.next_place(size * count)
        self._stored = False

    def store(self, batch: int, until_flash: bool) -> Sample:
        """STORE of all, timed."""
        target = self.target
        target.fill(self.keys, self.size, self.at)

        def call(keys: Sequence[bytes], places: Spans, _part: slice) -> BlockResults:
            return target.client.store(
                target.namespace,
                keys,
                places,
                until_flash=until_flash,
                verify=self.verify,
                timeout_s=CALL_TIMEOUT_S,
            )

        self._stored = True
        sample, _ok = target.time_calls(call, self.keys, target.source, self.size, batch, self.at)
        return sample

    def settle(self) -> None:
        """Wait until those that are stored are on flash."""
        if self._stored:
            self.target.settle(self.keys)

    def require_staged(self) -> list[str]:
        """Have them in the windows and nothing on its way to flash. What is not so, in words."""
        if not self._stored:
            self.target.store(self.keys, self.size)
            self._stored = True
        self.settle()
        if (self.target.states(self.keys) == BlockState.FLASH).any():
            return ["the windows do not hold all blocks of a round: some came from flash"]
        return []

    def __enter__(self) -> FreshBlocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stored:
            return
        if error is None:
            self.settle()
        self.target.delete(self.keys)


def store_staged(blocks: FreshBlocks, batch: int) -> Sample:
    return blocks.store(batch, until_flash=False)


def store_flash(blocks: FreshBlocks, batch: int) -> Sample:
    """Blocks of its own: those of `blocks` are there already, and flushed before it begins."""
    blocks.settle()
    with FreshBlocks(blocks.target, blocks.size, len(blocks.keys), blocks.verify) as own:
        return own.store(batch, until_flash=True)


def retrieve_staged(blocks: FreshBlocks, batch: int) -> Sample:
    notes = blocks.require_staged()
    sample = _retrieve(blocks.target, blocks.keys, blocks.size, batch, blocks.verify, blocks.at)
    sample.notes += notes
    return sample


def lease_read(blocks: FreshBlocks, batch: int) -> Sample:
    """READs by the client itself of frames that were leased before the clock starts."""
    target, keys = blocks.target, blocks.keys
    notes = blocks.require_staged()
    target.damage(len(keys) * blocks.size, blocks.at)
    with contextlib.ExitStack() as stack:
        leases: dict[int, Lease] = {}
        for start in range(0, len(keys), batch):
            leases[start] = stack.enter_context(
                target.client.lease(
                    target.namespace, keys[start : start + batch], duration_s=_LEASE_S, timeout_s=CALL_TIMEOUT_S
                )
            )

        def call(_keys: Sequence[bytes], places: Spans, part: slice) -> BlockResults:
            return leases[part.start].read(places, verify=blocks.verify, timeout_s=CALL_TIMEOUT_S)

        sample, ok = target.time_calls(call, keys, target.destination, blocks.size, batch, blocks.at)
    target.check(keys, ok, blocks.size, blocks.at)
    sample.notes += notes
    return sample


STAGED_CASES: Final[dict[str, Callable[[FreshBlocks, int], Sample]]] = {
    "store_staged": store_staged,
    "retrieve_staged": retrieve_staged,
    "lease_read": lease_read,
    "store_flash": store_flash,
}
"""In the order in which a round runs them."""


def touch_windows(target: Target, size: int, step: int) -> None:
    """Store and delete blocks for every frame of the windows, as far as there are free slots."""
    frames, slots, used = target.stat(StatId.FRAMES, StatId.SLOTS, StatId.SLOTS_USED)
    count = min(int(frames * _TOUCH_FRAMES), (slots - used) // 2, _COLD_BYTES_MAX // size)
    keys: list[bytes] = []
    try:
        while len(keys) < count:
            fresh = fresh_keys(step)
            keys += fresh
            target.store(fresh, size)
    finally:
        target.delete(keys)


class ColdBlocks:
    """More blocks of one size than the target's windows have frames: those on flash alone are cold. A context
    manager, which deletes them. `problem` says why there are none."""

    def __init__(self, target: Target, size: int, step: int, verify: bool) -> None:
        self.target = target
        self.size = size
        self.problem = ""
        self._step = step
        self._verify = verify
        self._keys: list[bytes] = []
        self._random = np.random.default_rng()

    def __enter__(self) -> ColdBlocks:
        frames, slots, used = self.target.stat(StatId.FRAMES, StatId.SLOTS, StatId.SLOTS_USED)
        needed = frames + 2 * self._step
        if needed > slots - used or needed * self.size > _COLD_BYTES_MAX:
            self.problem = (
                f"not measured: to fill the windows takes {needed} blocks, {approximate_size(needed * self.size)}; "
                f"{slots - used} slots are free, and no more than {approximate_size(_COLD_BYTES_MAX)} is stored for it"
            )
        try:
            while not self.problem and len(self._keys) < needed:
                fresh = fresh_keys(self._step)
                self._keys += fresh
                self.target.store(fresh, self.size)
        except BaseException:
            self.target.delete(self._keys)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.target.delete(self._keys)

    def retrieve(self, batch: int) -> Sample:
        """One round, of blocks in no order, so that flash is read at random places."""
        cold = np.flatnonzero(self.target.states(self._keys) == BlockState.FLASH)
        if len(cold) < self._step:
            note = f"only {len(cold)} of {len(self._keys)} stored blocks were on flash alone; not measured"
            return Sample(notes=[note])
        wanted = [self._keys[index] for index in self._random.permutation(cold)[: self._step]]
        before = self.target.stat(StatId.FLASH_READ_BYTES)[0]
        at = self.target.next_place(self._step * self.size)
        sample = _retrieve(self.target, wanted, self.size, batch, self._verify, at)
        read_bytes = self.target.stat(StatId.FLASH_READ_BYTES)[0] - before
        if read_bytes < self._step * self.size:
            sample.notes.append("not all of it was read from flash")
        return sample


def _retrieve(target: Target, keys: Sequence[bytes], size: int, batch: int, verify: bool, at: int) -> Sample:
    def call(part_keys: Sequence[bytes], places: Spans, _part: slice) -> BlockResults:
        return target.client.retrieve(target.namespace, part_keys, places, verify=verify, timeout_s=CALL_TIMEOUT_S)

    target.damage(len(keys) * size, at)
    sample, ok = target.time_calls(call, keys, target.destination, size, batch, at)
    target.check(keys, ok, size, at)
    return sample
