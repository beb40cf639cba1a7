"""Mixed load on a pod that holds less than is asked of it: RETRIEVE, then STORE of what was missing, with evictions.

What an inference engine does: blocks are asked for with the frequencies of a Zipf law, and those that are gone are
computed and stored again. Evicts whatever else the pod holds, so it runs only where that is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from common.status import Status
from common.units import approximate_size
from common.wire import StatId
from host_agent.bench.measurements import Sample
from host_agent.bench.settings import CALL_TIMEOUT_S
from host_agent.bench.target import Target, fresh_keys
from host_agent.results import BlockResults

WORKING_SET: Final = 1.5
"""Times the blocks that the pod holds."""
ZIPF_EXPONENT: Final = 0.9
_BYTES_MAX: Final = 8 << 30


class MixedLoad:
    """One target's working set, stored once as far as it fits. A context manager, which deletes what is left of it.
    `problem` says why there is none."""

    def __init__(self, target: Target, size: int, batch: int, calls: int, verify: bool) -> None:
        self.target = target
        self.size = size
        self.problem = ""
        self._batch = batch
        self._calls = calls
        self._verify = verify
        self._keys: list[bytes] = []
        self._random = np.random.default_rng()
        self._share: npt.NDArray[np.float64] = np.empty(0)
        """How often each key is asked for."""

    def __enter__(self) -> MixedLoad:
        (slots,) = self.target.stat(StatId.SLOTS)
        count = int(slots * WORKING_SET)
        if count * self.size > _BYTES_MAX:
            self.problem = (
                f"not measured: {count} blocks, {approximate_size(count * self.size)}, are more than "
                f"{approximate_size(_BYTES_MAX)}, which is the most that is stored for it"
            )
            return self
        self._keys = fresh_keys(count)
        weights = 1.0 / np.arange(1, count + 1) ** ZIPF_EXPONENT
        self._share = weights / weights.sum()
        try:
            for start in range(0, count, self._batch):  # the most wanted last, as if they had been used of late
                self.target.store(self._keys[::-1][start : start + self._batch], self.size)
        except BaseException:
            self.target.delete(self._keys)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.target.delete(self._keys)

    def run(self) -> tuple[Sample, Sample]:
        """One round: its RETRIEVE and its STORE calls, which took turns. The first tells hit rate and evictions."""
        loads, stores = Sample(), Sample()
        (evicted_before,) = self.target.stat(StatId.EVICTIONS)
        asked = hits = 0
        for _call in range(self._calls):
            chosen = self._random.choice(len(self._keys), self._batch, replace=False, p=self._share)
            keys = [self._keys[index] for index in chosen]
            found = self._timed(loads, "retrieve", keys)
            ok = found.status == Status.OK
            self.target.check(keys, ok, self.size)
            asked, hits = asked + len(keys), hits + int(ok.sum())
            missing = [keys[place] for place in np.flatnonzero(found.status == Status.MISS)]
            if missing:
                self._timed(stores, "store", missing)
        evicted = self.target.stat(StatId.EVICTIONS)[0] - evicted_before
        loads.facts = {"hit_rate": hits / asked, "evictions": evicted}
        loads.other_answers.pop(Status.MISS.name, None)
        return loads, stores

    def _timed(self, sample: Sample, operation: str, keys: Sequence[bytes]) -> BlockResults:
        target = self.target
        storing = operation == "store"
        memory = target.source if storing else target.destination
        if storing:
            target.fill(keys, self.size)
        else:
            target.damage(len(keys) * self.size)
        call = target.client.store if storing else target.client.retrieve
        places = memory.blocks(np.arange(len(keys)), self.size)
        before = target.cpu.read_s()
        started = perf_counter()
        results: BlockResults = call(target.namespace, keys, places, verify=self._verify, timeout_s=CALL_TIMEOUT_S)
        sample.calls_s.append(perf_counter() - started)
        for side, seconds in target.cpu.since_s(before).items():
            sample.cpu_s[side] = sample.cpu_s.get(side, 0.0) + seconds
        counts = results.counts()
        sample.work += counts.get(Status.OK, 0) * self.size / 1e9
        sample.other_answers.update({status.name: n for status, n in counts.items() if status is not Status.OK})
        return results
