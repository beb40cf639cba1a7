"""Entresol in the comparison: one DPU of two region workers on each fabric, slots of the size of the blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from common.units import format_size
from emulator.compare import bench_pod
from emulator.fabric_memory import HUGE_PAGE_BYTES, page_sizes_bytes
from emulator.peers.catalogue import (
    ENTRESOL_HUGE,
    ENTRESOL_SHM,
    ENTRESOL_TCP,
    LOOKUP,
    ON_FLASH,
    SAME_HOST,
    STAGED,
    TCP,
    Family,
    Peer,
    Sizes,
)
from emulator.peers.turns import PeerError, Turn
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from host_agent.bench.settings import BenchSettings

_ROOM: Final = 3
"""So many slots for each small block, for none to be evicted."""
FAMILY: Final = Family("entresol")


def _start(fabric: str, page_bytes: int) -> Callable[[Turn, Sizes], dict[str, Any]]:
    def start(turn: Turn, sizes: Sizes) -> dict[str, Any]:
        if page_bytes not in page_sizes_bytes():
            raise PeerError(f"no {format_size(page_bytes)} pages are set up: sysctl vm.nr_hugepages=1024, as root")
        settings = PodSettings(
            dpus=1,
            fabric=fabric,
            page_bytes=page_bytes,
            run_dir=turn.dir / "pod",
            flash_dir=turn.flash_dir,
            ready_timeout_s=max(1.0, min(30.0, turn.left_s())),
        )
        bench = BenchSettings(block_bytes=(sizes.block_bytes,), batches=(1,), blocks=sizes.blocks, rounds=1)
        sized = bench_pod(settings, bench)
        roomy_bytes = max(sized.capacity_bytes, _ROOM * sizes.small_blocks * sizes.block_bytes // settings.regions)
        pod = Pod.up(dataclasses.replace(sized, capacity_bytes=roomy_bytes))
        turn.stack.callback(pod.down)
        turn.server_pids += [process.pid for process in pod.running()]
        return {"agent": str(pod.state.agent_config), "verify": True, "block_bytes_max": sizes.block_bytes}

    return start


def _peer(name: str, fabric: str, reach: str, page_bytes: int, pages: str) -> Peer:
    return Peer(
        name=name,
        family=FAMILY,
        reach=reach,
        adapter="entresol_client",
        start=_start(fabric, page_bytes),
        settings=f"one DPU, two regions, slots of the block's size, {pages}, client checksums on, Client of one agent",
        operations=STAGED | ON_FLASH | {LOOKUP},
        turn_per_size=True,
    )


PEERS: Final = (
    _peer(ENTRESOL_SHM, "emu-shm", SAME_HOST, 4096, "4 KiB pages"),
    _peer(ENTRESOL_HUGE, "emu-shm", SAME_HOST, HUGE_PAGE_BYTES, "2 MiB huge pages (hugetlb)"),
    _peer(ENTRESOL_TCP, "emu-tcp", TCP, 4096, "4 KiB pages"),
)
