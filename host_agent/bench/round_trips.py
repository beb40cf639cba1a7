"""Where no bytes to speak of move: LOOKUP of keys that are there, RETRIEVE of one small staged block.

Held against a bare round trip over a Unix socket. Each measures one round on one target.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Final

import numpy as np

from common.errors import UnavailableError
from host_agent.bench.measurements import Sample
from host_agent.bench.settings import CALL_TIMEOUT_S
from host_agent.bench.target import KEY_BYTES, Target, fresh_keys

SMALL_BYTES: Final = 4096


class SmallBlocks:
    """As many blocks of 4 KiB as the largest batch looks up; the last one is in a window. A context manager, which
    deletes them."""

    def __init__(self, target: Target, count: int, calls: int, verify: bool) -> None:
        self.target = target
        self._keys = fresh_keys(count)
        self._calls = calls
        self._verify = verify

    def __enter__(self) -> SmallBlocks:
        try:
            self.target.store(self._keys, SMALL_BYTES)
        except BaseException:
            self.target.delete(self._keys)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.target.delete(self._keys)

    def lookup(self, batch: int) -> Sample:
        """Keys as one array, the form of which the client copies nothing."""
        target = self.target
        keys = np.frombuffer(b"".join(self._keys[-batch:]), np.uint8).reshape(-1, KEY_BYTES)

        def call() -> bool:
            return target.client.lookup(target.namespace, keys, timeout_s=CALL_TIMEOUT_S).prefix_blocks == batch

        return self._time(call, batch * self._calls / 1e6)

    def retrieve(self) -> Sample:
        """Of the last block, over and over."""
        target, keys = self.target, self._keys[-1:]
        place = target.destination.spans([0], SMALL_BYTES)

        def call() -> bool:
            return target.client.retrieve(
                target.namespace, keys, place, verify=self._verify, timeout_s=CALL_TIMEOUT_S
            ).all_ok

        target.damage(SMALL_BYTES)
        sample = self._time(call, self._calls / 1e6)
        target.check(keys, np.ones(1, np.bool_), SMALL_BYTES)
        return sample

    def _time(self, call: Callable[[], bool], work: float) -> Sample:
        """Raises UnavailableError where a block is gone."""
        sample = Sample(work=work)
        good = True
        before = self.target.cpu.read_s()
        for _call in range(self._calls):
            started = perf_counter()
            good &= call()
            sample.calls_s.append(perf_counter() - started)
        sample.cpu_s = self.target.cpu.since_s(before)
        if not good:
            raise UnavailableError("the pod lost blocks during the benchmark")
        return sample
