"""`entresol-emu bench`: a pod of each emulated fabric, both up at once, measured in turn; one report, with goals.

Sizes the pods so that what the benchmark calls staged fits the windows and what it calls cold does not. Measures
nothing itself: that is `host_agent.bench`, which any user runs against any pod, and `dpu_app.regions.measure`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from common.config import load_file
from common.errors import LowerLayerError
from common.units import format_size
from dpu_app.config import FRAMES_MIN, RegionSettings
from emulator.goals import evaluate, load_goals
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from host_agent.bench.environment import Environment, file_system_text
from host_agent.bench.report import report
from host_agent.bench.run import Bench
from host_agent.bench.settings import BenchSettings
from host_agent.bench.target import Target
from host_agent.client import Client
from host_agent.config import AgentSettings

_SPREAD: Final = 4
"""Hashing gives a region its share of a round's blocks give or take a square root of it; so many of those fit in what
its window takes before it refuses stores."""
REGION_SLOTS: Final = 10_000_000
_REGION_TIMEOUT_S: Final = 300.0


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
    settings: PodSettings,
    bench: BenchSettings,
    fabrics: Sequence[str],
    environment: Environment,
    region_slots: int,
    told: Callable[[str], None],
) -> dict[str, Any]:
    """The whole report, for JSON: what `Bench.run` measured of a pod of each of `fabrics`, a region of `region_slots`
    slots (0: none), and how the goals stand. Pods are down again on return."""
    bench = dataclasses.replace(bench, flash_dir=settings.flash_dir, may_evict=True)
    with contextlib.ExitStack() as stack:
        targets: list[Target] = []
        flash: list[Path] = []
        for fabric in fabrics:
            told(f"starting a pod on {fabric}")
            run_dir = settings.run_dir.with_name(f"{settings.run_dir.name}-{fabric}")
            pod = Pod.up(bench_pod(dataclasses.replace(settings, fabric=fabric, run_dir=run_dir), bench), told)
            stack.callback(pod.down)
            flash += [path for dpu in pod.state.dpus for path in dpu.flash]
            client = stack.enter_context(Client(load_file(pod.state.agent_config, AgentSettings)))
            pids = [process.pid for process in pod.running()]
            targets.append(Target(fabric, client, max(bench.block_bytes), pids))
        result = Bench(targets, bench, told).run()
        cached_bytes = sum(map(page_cache_bytes, flash))
    document = report(environment, result)
    document["pod"] = {
        "dpus": settings.dpus,
        "regions_of_each": settings.regions,
        "pages": format_size(settings.page_bytes),
        "flash": file_system_text(settings.flash_dir),
    }
    document["page_cache"] = (
        f"regions and the disk's limit use O_DIRECT; of the {len(flash)} flash files {cached_bytes} bytes were in the "
        "page cache of this machine at the end (mincore). What a hypervisor or drive caches is in both alike"
    )
    if region_slots:
        told(f"opening a region of {region_slots} slots")
        document["region"] = measure_region(settings.flash_dir, region_slots)
    document["goals"] = evaluate(load_goals(), document)
    return document


def page_cache_bytes(path: Path) -> int:
    """How much of a file is in this machine's page cache. Raises LowerLayerError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = -(-len(memory) // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), resident):
            raise LowerLayerError("mincore", ctypes.get_errno(), str(path))
        return sum(page & 1 for page in bytes(resident)) * mmap.PAGESIZE


def measure_region(directory: Path, slots: int) -> dict[str, Any]:
    """Figures of `dpu_app.regions.measure` by name, in a process of its own, on a file in `directory` that is removed
    again. Raises LowerLayerError."""
    path = directory / f"bench-region-{os.getpid()}.img"
    command = [sys.executable, "-m", "dpu_app.regions.measure", "--json", "--slots", str(slots), "--path", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REGION_TIMEOUT_S, check=False)
        if done.returncode:
            raise LowerLayerError("measuring a region", 0, done.stderr.strip())
        values: dict[str, float] = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise LowerLayerError("measuring a region", 0, f"not done after {_REGION_TIMEOUT_S:g} s") from error
    finally:
        path.unlink(missing_ok=True)
    return {name: {"median": value, "min": value, "max": value, "rounds": [value]} for name, value in values.items()}
