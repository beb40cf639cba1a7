"""The demo itself, small: real processes, real bytes, both fabrics; every byte right, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.config import load_file
from common.errors import EntresolError
from emulator.demo import DemoSettings, run_demo
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from emulator.processes import marked_processes, wait_for_end
from emulator.trace import TraceRecord, write_trace
from host_agent.block_pattern import BlockPattern
from host_agent.client import Client
from host_agent.config import AgentSettings

if TYPE_CHECKING:
    from tests.system.conftest import Place

SMALL = ["--capacity", "64MiB", "--window", "4MiB", "--batch", "16"]


def _write_conversations(path: Path, conversations: int = 4, turns: int = 4) -> None:
    """Multi-turn requests under one system prompt of 512 tokens, turn by turn: later turns find the earlier ones, and
    16 frames a region hold far from all of it."""
    records: list[TraceRecord] = []
    for turn in range(turns):
        for conversation in range(conversations):
            tokens = 512 * (turn + 2)
            ids = [0, *(1000 * (conversation + 1) + number for number in range(turn + 1))]
            records.append(TraceRecord(1000 * len(records), tokens, 100, tuple(ids)))
    write_trace(path, records)


def _demo(place: Place, *arguments: str) -> dict[str, Any]:
    done = place.emu("demo", "--json", *SMALL, *place.options, *arguments)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("fabric", ["emu-shm", "emu-tcp"])
@pytest.mark.parametrize("layout", [[], ["--scatter"]], ids=["gathered", "scattered"])
def test_a_workload_comes_back_byte_for_byte(place: Place, tmp_path: Path, fabric: str, layout: list[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    _write_conversations(trace)
    report = _demo(place, "--fabric", fabric, "--trace", str(trace), *layout)
    assert report["pieces"] == (32 if layout else 1), "one a layer"
    assert report["requests"] == 16
    assert report["wrong_blocks"] == 0
    assert report["fabric"] == fabric
    assert report["block_bytes"] == 256 << 10
    assert report["blocks"] == 4 * 32 * (2 + 3 + 4 + 5)
    assert report["block_hit_rate"] > 0.3
    assert report["tokens_not_recomputed"] >= 16 * report["hit_blocks"] * 0.9
    for operation in ("store", "retrieve_staged", "retrieve_cold"):
        assert report["operations"][operation]["blocks"] > 0, operation
    counters = report["counters"]
    assert counters["RETRIEVE_COLD"] > 0, "the regions say so too"
    assert counters["FLASH_READ_BYTES"] > counters["RETRIEVE_COLD"] * (128 << 10), "one read may serve two nodes"
    assert counters["CHECKSUM_MISMATCHES"] == counters["FLASH_ERRORS"] == counters["TRANSFER_ERRORS"] == 0
    assert 1.0 <= report["flash"]["written_per_kv_byte"] < 1.1
    assert place.left() == []


def test_the_generated_workload_and_eviction(place: Place) -> None:
    """Flash for 500 blocks and a workload of more: eviction costs hits, never bytes."""
    report = _demo(place, "--requests", "12", "--seed", "3", "--capacity", "32MiB")
    assert report["requests"] == 12
    assert report["wrong_blocks"] == 0
    assert report["counters"]["EVICTIONS"] > 0
    assert place.left() == []


def test_keep_leaves_a_pod_that_the_command_line_works_with(place: Place, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    _write_conversations(trace, conversations=1, turns=2)
    roomy = ["--capacity", "64MiB", "--window", "32MiB"]  # so that no store is refused for want of frames
    done = place.emu("demo", "--keep", *roomy, *place.options, "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    assert "every byte" in done.stdout.lower()
    agent = str(place.run_dir / "agent.yaml")
    assert f"entresol-agent --config {agent} stat" in done.stderr
    assert f"down --run-dir {place.run_dir}" in done.stderr
    status = json.loads(place.emu("status", "--json", "--run-dir", str(place.run_dir)).stdout)
    assert status["serving"]
    used = sum(region["stats"]["SLOTS_USED"] for dpu in status["dpus"] for region in dpu["regions"])
    assert used == 96, "one conversation: three runs of 512 tokens"
    assert place.emu("down", "--run-dir", str(place.run_dir)).returncode == 0
    assert place.left() == []


def test_wrong_bytes_are_found(place: Place) -> None:
    """Somebody stores other bytes, whole and with a good checksum, under a key that the workload will ask for."""
    record = TraceRecord(0, 512, 1, (7,))
    small = {"dpus": 1, "regions": 1, "capacity_bytes": 32 << 20, "window_bytes": 16 << 20}
    pod_settings = PodSettings(run_dir=place.run_dir, flash_dir=place.flash_dir, **small)  # type: ignore[arg-type]
    settings = DemoSettings.of(pod_settings, agents=1)
    pod = Pod.up(settings.pod)
    try:
        shape = settings.shape()
        with Client(load_file(pod.state.agent_config, AgentSettings)) as client:
            namespace = client.namespace(shape.namespace("demo"), shape.block_bytes)
            key = shape.block_keys(namespace.digest, record)[0]
            with client.allocate(shape.block_bytes) as memory:
                BlockPattern(shape.block_bytes).fill(key, memory.view)
                memory.view[100_003] ^= 4
                assert client.store(namespace, [key], memory.blocks([0], shape.block_bytes)).all_ok
        report = run_demo(pod, settings, [record, record], lambda _outcome: None).as_dict()
    finally:
        pod.down()
    assert report["wrong_blocks"] == 2, "in both requests"
    assert report["wrong"][0] == f"block {key.hex()} differs at byte 100000 of 262144"
    assert report["hit_blocks"] == 31, "the second time the rest is there and right"
    assert report["tokens_not_recomputed"] == 0, "an engine cannot use what follows a hole"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_demo_leaves_nothing(place: Place, number: signal.Signals) -> None:
    """By itself where it can; where it could not, after `entresol-emu down`."""
    command = [sys.executable, "-m", "emulator.cli", "demo", *SMALL, *place.options, "--requests", "500"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        mark = ""
        while process.poll() is None:
            with contextlib.suppress(EntresolError):  # not written yet
                mark = Pod.find(place.run_dir).state.mark
            nodes = [found for found in marked_processes(mark) if "emulator.replay" in found.command] if mark else []
            if len(nodes) == 2:
                break
            wait_for_end([process.pid], 0.05)
        os.kill(process.pid, number)
        if number is signal.SIGKILL:
            process.wait(timeout=60)
            assert place.emu("down", "--run-dir", str(place.run_dir)).returncode == 0
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"Traceback" not in said, "nor does any node say how it was ended"
    assert marked_processes(mark) == []
    assert place.left() == []


def test_mistakes_are_told_before_anything_starts(place: Place, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}\n')
    done = place.emu("demo", *place.options, "--trace", str(bad))
    assert done.returncode == 2
    assert f"{bad}:1:" in done.stderr
    assert place.emu("demo", *place.options, "--block-tokens", "24").returncode == 2
    assert place.emu("demo", *place.options, "--tp", "3").returncode == 2
    done = place.emu("demo", *place.options, "--tp", "1", "--window", "4MiB")
    assert done.returncode == 2
    assert "4 frames" in done.stderr
    assert place.left() == []


def test_a_public_trace(place: Place) -> None:
    """Set ENTRESOL_TRACE to a file of the published traces to run this."""
    name = os.environ.get("ENTRESOL_TRACE")
    if not name:
        pytest.skip("ENTRESOL_TRACE does not name a trace file")
    report = _demo(place, "--trace", name, "--requests", "8", "--capacity", "256MiB")
    assert report["requests"] == 8
    assert report["wrong_blocks"] == 0
    assert report["hit_blocks"] > 0
