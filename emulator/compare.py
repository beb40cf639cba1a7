"""`entresol-emu bench`: the agent's benchmark on a pod of each emulated fabric in turn, one report.

Sizes the pod so that what the benchmark calls staged fits the windows and what it calls cold does not. Measures
nothing itself: that is `host_agent.bench`, which any user runs against any pod.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from common.config import load_file
from dpu_app.config import FRAMES_MIN, RegionSettings
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from host_agent.bench.run import Bench, BenchSettings
from host_agent.client import Client
from host_agent.config import AgentSettings

_SPREAD: Final = 4
"""Hashing gives a region its share of a round's blocks give or take a square root of it; so many of those fit in what
its window takes before it refuses stores."""


def bench_pod(settings: PodSettings, bench: BenchSettings) -> PodSettings:
    """`settings` with slots, windows and flash of the size that `bench` needs."""
    slot_bytes = max(bench.block_bytes)
    regions = settings.dpus * settings.regions
    share = bench.blocks / regions
    frames = math.ceil((share + _SPREAD * math.sqrt(share)) / RegionSettings.dirty_fraction) + FRAMES_MIN
    slots = 3 * (regions * frames + 3 * bench.blocks) // regions
    return dataclasses.replace(
        settings, slot_bytes=slot_bytes, window_bytes=frames * slot_bytes, capacity_bytes=slots * slot_bytes
    )


def compare(
    settings: PodSettings, bench: BenchSettings, fabrics: Sequence[str], told: Callable[[str], None]
) -> dict[str, Any]:
    """The results of `Bench.run` by fabric. Each pod is down again before the next one comes up."""
    bench = dataclasses.replace(bench, flash_dir=settings.flash_dir)
    results: dict[str, Any] = {}
    for fabric in fabrics:

        def told_of(text: str, fabric: str = fabric) -> None:
            told(f"{fabric}: {text}")

        told_of("starting a pod")
        pod = Pod.up(bench_pod(dataclasses.replace(settings, fabric=fabric), bench), told)
        try:
            agent = load_file(pod.state.agent_config, AgentSettings)
            with Client(agent) as client:
                results[fabric] = Bench(client, bench, agent.tenant, told_of).run()
        finally:
            pod.down()
    return results
