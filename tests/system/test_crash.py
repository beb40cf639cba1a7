"""SIGKILL of a DPU in the midst of storing, with real processes and real O_DIRECT flash.

What was acknowledged as on flash is there and right, what was only staged is right or a miss, nothing is wrong, and
no slot is lost or held twice.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.status import Status
from common.wire import StatId
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from host_agent.block_pattern import BlockPattern
from host_agent.client import Client
from host_agent.config import NamespaceSettings

if TYPE_CHECKING:
    from tests.system.conftest import Place

BLOCK_BYTES = 16384
BLOCKS = 10_000
BATCH = 50
KILL_AFTER = 4_000


def _wait_until_up(client: Client, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not all(region.link.up for region in client.regions):
        assert time.monotonic() < deadline_s, "the agent did not come back to the restarted DPU"
        client.stat(timeout_s=0.5)
        time.sleep(0.05)


def _keys(count: int) -> list[bytes]:
    return [np.random.default_rng(number).bytes(16) for number in range(count)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fabric", ["emu-shm", "emu-tcp"])
def test_kill_while_storing(place: Place, fabric: str) -> None:
    settings = PodSettings(
        fabric=fabric,
        slot_bytes=BLOCK_BYTES,
        capacity_bytes=64 << 20,
        window_bytes=8 << 20,
        run_dir=place.run_dir,
        flash_dir=place.flash_dir,
    )
    pod = Pod.up(settings)
    keys = _keys(BLOCKS)
    pattern = BlockPattern(BLOCK_BYTES)
    on_flash: set[int] = set()
    staged: set[int] = set()
    victim = pod.state.dpus[0]
    restarted = threading.Event()

    def kill_and_restart() -> None:
        workers = [process.pid for process in pod.running()]
        assert victim.pid in workers
        os.kill(victim.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 20
        while len(pod.running()) > 3:  # its workers die with it
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        pod.restart(victim.name)
        restarted.set()

    with Client([dpu.control for dpu in pod.state.dpus], tenant="demo") as client:
        namespace = client.namespace(NamespaceSettings().record("demo"), block_bytes=BLOCK_BYTES)
        pool = client.allocate(BATCH * BLOCK_BYTES)
        killer = threading.Thread(target=kill_and_restart)
        for start in range(0, BLOCKS, BATCH):
            if start == KILL_AFTER:
                killer.start()
            batch = range(start, start + BATCH)
            for place_in_pool, number in enumerate(batch):
                view = pool.view[place_in_pool * BLOCK_BYTES : (place_in_pool + 1) * BLOCK_BYTES]
                pattern.fill(keys[number], view)
            until_flash = start // BATCH % 2 == 0
            results = client.store(
                namespace,
                [keys[number] for number in batch],
                pool.blocks(range(BATCH), BLOCK_BYTES),
                until_flash=until_flash,
                timeout_s=5.0,
            )
            for number, result in zip(batch, results):
                if result.status in (Status.OK, Status.EXISTS):
                    (on_flash if until_flash else staged).add(number)
        killer.join(60)
        assert restarted.is_set()
        _wait_until_up(client)
        missing = 0
        for start in range(0, BLOCKS, BATCH):
            batch = range(start, start + BATCH)
            results = client.retrieve(
                namespace, [keys[number] for number in batch], pool.blocks(range(BATCH), BLOCK_BYTES), timeout_s=10.0
            )
            for place_in_pool, (number, result) in enumerate(zip(batch, results)):
                if number in on_flash:
                    assert result.status is Status.OK, f"block {number} was acknowledged on flash"
                if result.status is Status.OK:
                    view = pool.view[place_in_pool * BLOCK_BYTES : (place_in_pool + 1) * BLOCK_BYTES]
                    assert pattern.first_mismatch(keys[number], view) is None
                else:
                    assert result.status is Status.MISS
                    missing += number in staged
        assert len(on_flash) > BLOCKS // 4
        present = [block.key for block in client.list(namespace)]
        assert len(present) == len(set(present)), "no block is held twice"
        stats = client.stat()
        used = sum(values[StatId.SLOTS_USED] for values in stats.values())
        assert used == len(present)
        for values in stats.values():
            counted = values[StatId.SLOTS_USED] + values[StatId.SLOTS_FREE] + values[StatId.SLOTS_IN_TRANSIT]
            assert counted == values[StatId.SLOTS]
            assert values[StatId.LEASES] == values[StatId.FRAMES_BUSY] == 0
    pod.down()
    assert not place.left()
