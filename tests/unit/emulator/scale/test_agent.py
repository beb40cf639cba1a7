"""An agent of bench-scale against a client in memory: what it calls, what it counts, that wrong bytes are seen."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import UnavailableError
from common.status import Status
from emulator.scale import agent
from emulator.scale.agent import LoadRunner, run_phase
from emulator.scale.settings import Load

LOAD = Load("small", 4096, 2, lookup_batch=3, working_batches=3, weights=(6, 2, 2))


class Memory:
    """As much of registered memory as an agent uses."""

    def __init__(self, length_bytes: int) -> None:
        self._array = np.zeros(length_bytes, np.uint8)
        self.view = self._array.data
        self.address = self._array.ctypes.data

    def array(self, scalar: Any) -> Any:
        return self._array.view(scalar)

    def blocks(self, numbers: Any, size: int) -> list[memoryview]:
        return [self.view[int(number) * size : (int(number) + 1) * size] for number in numbers]


class Answer(SimpleNamespace):
    @property
    def all_ok(self) -> bool:
        return bool((np.asarray(self.status) <= Status.EXISTS).all())

    def counts(self) -> Counter[Status]:
        return Counter(Status(int(status)) for status in self.status)


class FakePod:
    """A client whose blocks lie in a dictionary."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.busy = 0
        self.flip = False

    def namespace(self, record: Any, block_bytes: int) -> None: ...

    def allocate(self, length_bytes: int) -> Memory:
        return Memory(length_bytes)

    def store(self, _namespace: Any, keys: list[bytes], places: list[memoryview]) -> Answer:
        self.calls["store"] += 1
        if self.busy:
            self.busy -= 1
            return Answer(status=[Status.BUSY] * len(keys))
        for key, place in zip(keys, places):
            self.blocks[key] = bytes(place)
        return Answer(status=[Status.OK] * len(keys))

    def retrieve(self, _namespace: Any, keys: list[bytes], places: list[memoryview]) -> Answer:
        self.calls["retrieve"] += 1
        for key, place in zip(keys, places):
            if key in self.blocks:
                place[:] = self.blocks[key]
                if self.flip:
                    place[100] ^= 1
        return Answer(status=[Status.OK if key in self.blocks else Status.MISS for key in keys])

    def lookup(self, _namespace: Any, keys: list[bytes]) -> Answer:
        self.calls["lookup"] += 1
        return Answer(status=[Status.OK if key in self.blocks else Status.MISS for key in keys])


def _runner(pod: FakePod) -> LoadRunner:
    client: Any = pod
    runner = LoadRunner(client, LOAD, "t", seed=1)
    runner.prepare()
    pod.calls.clear()
    return runner


def test_calls_are_exactly_in_their_proportions_and_everything_is_found() -> None:
    pod = FakePod()
    runner = _runner(pod)
    done = [runner.call() for _ in range(50)]
    assert Counter(operation for operation, *_ in done) == {"retrieve": 30, "store": 10, "lookup": 10}
    assert all(blocks == (3 if operation == "lookup" else 2) for operation, _, _, blocks in done)
    assert runner.wrong == []
    assert runner.statuses == {}
    assert len(pod.blocks) == 2 * (3 + 10), "each STORE brought fresh blocks"


def test_a_wrong_byte_is_seen() -> None:
    pod = FakePod()
    runner = _runner(pod)
    pod.flip = True
    for _ in range(10):
        runner.call()
    assert len(runner.wrong) == 6 * 2
    assert "of 4096 bytes differs" in runner.wrong[0]


def test_a_destination_that_nobody_wrote_does_not_pass() -> None:
    """Every page is damaged before, so that the right bytes of an earlier call are not taken for an answer."""
    pod = FakePod()
    runner = _runner(pod)
    for _ in range(20):
        runner.call()
    retrieve = pod.retrieve

    def lie(namespace: Any, keys: list[bytes], places: list[memoryview]) -> Answer:
        retrieve(namespace, keys, [memoryview(bytearray(place)) for place in places])
        return Answer(status=[Status.OK] * len(keys))

    vars(pod)["retrieve"] = lie
    for _ in range(10):
        runner.call()
    assert len(runner.wrong) == 6 * 2


def test_a_refused_store_keeps_the_old_batch_and_is_counted() -> None:
    pod = FakePod()
    runner = _runner(pod)
    pod.busy = 1000
    for _ in range(20):
        runner.call()
    assert runner.statuses == {"store BUSY": 4 * 2}
    assert runner.wrong == []


def test_what_was_evicted_is_stored_again_before_a_phase() -> None:
    pod = FakePod()
    runner = _runner(pod)
    pod.blocks.clear()
    pod.busy = 2
    runner.warm()
    assert len(pod.blocks) == 2 * 3
    assert runner.statuses == {}


def test_a_pod_that_never_takes_the_working_set_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_PREPARE_TIMEOUT_S", 0.0)
    pod = FakePod()
    pod.busy = 1000
    with pytest.raises(UnavailableError, match="store BUSY"):
        _runner(pod)


def test_a_phase_counts_what_ended_in_time() -> None:
    pod = FakePod()
    runner = _runner(pod)
    start_ns = time.monotonic_ns()
    found = run_phase(runner, start_ns, start_ns + 50_000_000)
    calls = {operation: len(seconds) for operation, seconds in found["calls_s"].items()}
    assert sum(calls.values()) >= sum(pod.calls.values()) - 1
    assert found["blocks"] == {
        "retrieve": 2 * calls["retrieve"],
        "store": 2 * calls["store"],
        "lookup": 3 * calls["lookup"],
    }
    assert found["bytes"] == 4096 * 2 * (calls["retrieve"] + calls["store"])
    assert 0 <= found["cpu_s"] <= found["all_cpu_s"]
    assert found["wrong"] == []
    late = run_phase(runner, start_ns, start_ns)
    assert sum(map(len, late["calls_s"].values())) == 0
