"""Threads of one client against a pod whose workers and DPUs are stopped, killed and restarted under them, by a seed.

What must hold: no wrong bytes, no byte after an answer, no call beyond its deadline, no exception, and at the end
every region is reached again.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from common.errors import EntresolError
from common.identity import block_key
from common.status import Status
from dpu_app.control_client import ControlClient
from emulator.pod import Pod
from host_agent.block_pattern import BlockPattern
from host_agent.client import Client
from host_agent.memory import RegisteredMemory
from host_agent.namespace import Namespace
from tests.system.test_agent_faults import BLOCK, FABRICS, connect, record, running, until

if TYPE_CHECKING:
    from tests.system.conftest import Place

CHAOS_S = 10.0
CALL_TIMEOUT_S = 1.0
LATE_S = 2.0
"""Beyond its deadline, on a machine that is busy with the restarts, before a call counts as hanging."""
KEYS = 300
BATCH = 24


class Worker(threading.Thread):
    """Stores, loads, checks. What went wrong is in `faults`."""

    def __init__(self, client: Client, namespace: Namespace, number: int, stop_s: float) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self._client, self._namespace, self._stop_s = client, namespace, stop_s
        self._rng = random.Random(number)
        self._pattern = BlockPattern(BLOCK)
        self._source = client.allocate(BATCH * BLOCK)
        self._target: RegisteredMemory = (
            client.register(bytearray(BATCH * BLOCK)) if number % 2 else client.allocate(BATCH * BLOCK)
        )

    def run(self) -> None:
        while time.monotonic() < self._stop_s:
            self._turn()  # an exception here fails the test: pytest reports those of threads

    def _turn(self) -> None:
        count = self._rng.randint(1, BATCH)
        numbers = self._rng.sample(range(KEYS), count)
        keys = [block_key(self._namespace.digest, None, [number]) for number in numbers]
        for place, key in enumerate(keys):
            self._pattern.fill(key, self._block(self._source, place))
        until_flash = self._rng.random() < 0.2
        places = np.arange(count)
        started_s = time.monotonic()
        stored = self._client.store(
            self._namespace, keys, self._source.blocks(places, BLOCK), until_flash=until_flash, timeout_s=CALL_TIMEOUT_S
        )
        loaded = self._client.retrieve(
            self._namespace, keys, self._target.blocks(places, BLOCK), timeout_s=CALL_TIMEOUT_S, verify=True
        )
        if time.monotonic() - started_s > 2 * CALL_TIMEOUT_S + LATE_S:
            self.faults.append(f"two calls took {time.monotonic() - started_s:.1f} s")
        self.counts.update(status.name for status in map(Status, [*stored.status.tolist(), *loaded.status.tolist()]))
        self._check(keys, loaded.status.tolist())
        if self._rng.random() < 0.1:
            self._client.prefetch(self._namespace, keys, timeout_s=0.5)
        if self._rng.random() < 0.1:
            self._client.delete(self._namespace, keys[:3], timeout_s=CALL_TIMEOUT_S)

    def _check(self, keys: list[bytes], statuses: list[int]) -> None:
        failed = [place for place, status in enumerate(statuses) if status != Status.OK]
        for place in failed:
            self._block(self._target, place)[:] = bytes(BLOCK)
        for place, key in enumerate(keys):
            if statuses[place] == Status.CORRUPT:
                self.faults.append(f"{key.hex()} arrived damaged")
            if statuses[place] != Status.OK:
                continue
            if self._pattern.first_mismatch(key, self._block(self._target, place)) is not None:
                self.faults.append(f"wrong bytes under {key.hex()}")
        if failed and self._rng.random() < 0.3:
            time.sleep(0.2)
            for place in failed:
                if any(self._block(self._target, place)):
                    self.faults.append(f"bytes landed after the answer {Status(statuses[place]).name}")

    @staticmethod
    def _block(memory: RegisteredMemory, place: int) -> memoryview:
        return memory.view[place * BLOCK : (place + 1) * BLOCK]


def _disturb(pod: Pod, rng: random.Random) -> None:
    """Stop or kill a worker, or a whole DPU; it comes back."""
    dpu = rng.choice(pod.state.dpus)
    kind = rng.random()
    if kind < 0.15:
        os.kill(dpu.pid, signal.SIGKILL)
        until(lambda: not pod.is_alive(dpu), "the DPU is dead")
        pod.restart(dpu.name)
        return
    with ControlClient(dpu.control, 5.0) as control:
        pids = [region.worker_pid for region in control.status().regions if region.worker_pid]
    if not pids:
        return
    pid = dpu.pid if kind < 0.3 else rng.choice(pids)
    if kind < 0.7:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.2, 2.0))
        os.kill(pid, signal.SIGCONT)
    else:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("seed", [11])
def test_nothing_wrong_under_chaos(place: Place, fabric: str, seed: int) -> None:
    rng = random.Random(seed)
    with running(place, fabric, dpus=2) as pod, connect(pod, timeout_s=CALL_TIMEOUT_S) as client:
        namespace = client.namespace(record("acme"))
        stop_s = time.monotonic() + CHAOS_S
        workers = [Worker(client, namespace, number, stop_s) for number in range(3)]
        for worker in workers:
            worker.start()
        while time.monotonic() < stop_s:
            time.sleep(rng.uniform(0.2, 0.8))
            try:
                _disturb(pod, rng)
            except (EntresolError, ProcessLookupError, grpc.RpcError):
                continue  # what was to be disturbed is down already
        for worker in workers:
            worker.join(30)
            assert not worker.is_alive(), "a call hangs"
            assert worker.faults == [], f"seed {seed}"
        total = sum((worker.counts for worker in workers), Counter[str]())
        assert total["OK"] > 100, total
        for dpu in pod.state.dpus:
            if not pod.is_alive(dpu):
                pod.restart(dpu.name)
        until(lambda: all(region.link.up for region in client.regions), "every region is reached again")
