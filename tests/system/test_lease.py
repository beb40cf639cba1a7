"""Leases on a real pod: batches of any size are read by the client itself, and given back."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.status import Status
from common.wire import StatId
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from host_agent.client import Client
from host_agent.config import NamespaceSettings

if TYPE_CHECKING:
    from tests.system.conftest import Place

BLOCK_BYTES = 16384
BLOCKS = 500


@pytest.mark.parametrize("pieces", [1, 40])
def test_a_large_batch_is_leased_read_and_released(place: Place, pieces: int) -> None:
    """More blocks for each region than its connection's send queue has places, and with scatter lists far more."""
    pod = Pod.up(
        PodSettings(
            slot_bytes=BLOCK_BYTES,
            capacity_bytes=64 << 20,
            window_bytes=8 << 20,
            run_dir=place.run_dir,
            flash_dir=place.flash_dir,
        )
    )
    with Client([dpu.control for dpu in pod.state.dpus], tenant="demo") as client:
        namespace = client.namespace(NamespaceSettings().record("demo"), block_bytes=BLOCK_BYTES)
        source, target = client.allocate(BLOCKS * BLOCK_BYTES), client.allocate(BLOCKS * BLOCK_BYTES)
        source.array()[:] = np.random.default_rng(5).integers(0, 256, BLOCKS * BLOCK_BYTES, np.uint8)
        keys = [np.random.default_rng(number).bytes(16) for number in range(BLOCKS)]
        assert client.store(namespace, keys, source.blocks(range(BLOCKS), BLOCK_BYTES), until_flash=True).all_ok
        piece = BLOCK_BYTES // pieces
        cuts = [*range(0, (pieces - 1) * piece + 1, piece), BLOCK_BYTES]
        places = [
            [target.view[n * BLOCK_BYTES + a : n * BLOCK_BYTES + b] for a, b in itertools.pairwise(cuts)]
            for n in range(BLOCKS)
        ]
        with client.lease(namespace, keys, duration_s=20) as lease:
            assert set(lease.status.tolist()) == {Status.OK}
            assert lease.read(places, verify=True).all_ok
        assert bytes(source.view) == bytes(target.view)
        assert all(values[StatId.LEASES] == 0 for values in client.stat().values())
    pod.down()
