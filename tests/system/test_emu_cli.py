"""`entresol-emu up|status|down` with real processes: private, on loopback only, and gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.errors import EntresolError
from emulator.pod import Pod
from emulator.processes import marked_processes, signal_marked, wait_for_end

if TYPE_CHECKING:
    from tests.system.conftest import Place

SMALL = ["--dpus", "2", "--regions", "2", "--capacity", "32MiB", "--window", "4MiB"]


def _listening(pid: int) -> list[str]:
    """Addresses (hexadecimal, as the kernel prints them) on which a process listens for TCP."""
    inodes: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        inodes.add(target.removeprefix("socket:[").rstrip("]"))
    found: list[str] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].rpartition(":")[0])
    return found


@pytest.mark.parametrize("fabric", ["emu-shm", "emu-tcp"])
def test_up_status_down(place: Place, fabric: str) -> None:
    up = place.emu("up", *SMALL, "--fabric", fabric, "--json", *place.options)
    assert up.returncode == 0, up.stderr
    report = json.loads(up.stdout)
    assert report["serving"]
    assert [len(dpu["regions"]) for dpu in report["dpus"]] == [2, 2]
    pod = Pod.find(place.run_dir)
    running = pod.running()
    assert len(running) == 6, "two DPUs with two workers each"
    listening = [address for process in running for address in _listening(process.pid)]
    assert set(listening) <= {"0100007F"}, "nothing listens beyond loopback"
    assert len(listening) == (4 if fabric == "emu-tcp" else 0)

    again = place.emu("up", *SMALL, *place.options)
    assert again.returncode == 2
    assert "entresol-emu down" in again.stderr
    assert pod.running() == running

    status = place.emu("status", "--run-dir", str(place.run_dir))
    assert status.returncode == 0
    assert "region1" in status.stdout

    down = place.emu("down", "--run-dir", str(place.run_dir))
    assert down.returncode == 0, down.stderr
    assert "killed" not in down.stderr
    assert marked_processes(pod.state.mark) == []
    assert place.left() == []
    assert place.emu("down", "--run-dir", str(place.run_dir)).returncode == 2


def test_everything_is_private_to_the_user(place: Place) -> None:
    assert place.emu("up", *SMALL, *place.options).returncode == 0
    for root in (place.run_dir, place.flash_dir):
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        for path in root.rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert not mode & 0o077, f"{path} has mode {mode:o}"


def test_a_dead_dpu_shows_and_the_rest_goes_down(place: Place) -> None:
    assert place.emu("up", *SMALL, *place.options).returncode == 0
    pod = Pod.find(place.run_dir)
    victim = pod.state.dpus[0]
    signal_marked(victim.pid, pod.state.mark, signal.SIGKILL)
    assert wait_for_end([victim.pid], 10.0)
    status = place.emu("status", "--json", "--run-dir", str(place.run_dir))
    assert status.returncode == 3
    report = json.loads(status.stdout)
    assert not report["serving"]
    assert [dpu["alive"] for dpu in report["dpus"]] == [False, True]
    pod.restart(victim.name)
    assert place.emu("status", "--run-dir", str(place.run_dir)).returncode == 0
    signal_marked(Pod.find(place.run_dir).state.dpus[0].pid, pod.state.mark, signal.SIGKILL)
    assert place.emu("down", "--run-dir", str(place.run_dir)).returncode == 0
    assert marked_processes(pod.state.mark) == []
    assert place.left() == []


def test_a_pod_that_cannot_serve_says_why_and_leaves_nothing(place: Place) -> None:
    up = place.emu("up", *SMALL, "--flash-driver", "random", *place.options)
    assert up.returncode == 3
    assert "random" in up.stderr
    assert "Traceback" not in up.stderr
    assert place.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_up_leaves_nothing(place: Place, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "emulator.cli", "up", *SMALL, *place.options]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # also where the tests run under nohup
    ) as process:
        mark = None
        while mark is None and process.poll() is None:
            try:
                mark = Pod.find(place.run_dir).state.mark
            except EntresolError:  # not written yet
                wait_for_end([process.pid], 0.02)
        process.send_signal(number)
        assert process.wait(timeout=60) != 0
    assert mark is not None
    assert marked_processes(mark) == []
    assert place.left() == []


def test_mistakes_are_told_with_file_line_and_key(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "emulator.yaml"
    file.write_text("dpus: 1\nregoins: 2\n")
    for command in (["up", "--config", str(file), *place.options], ["config-check", str(file)]):
        done = place.emu(*command)
        assert done.returncode == 2
        assert f"{file}:2: regoins" in done.stderr
    file.write_text("dpus: 1\nregions: 1\ncapacity: 16MiB\nwindow: 4MiB\n")
    assert place.emu("config-check", str(file)).returncode == 0
    assert place.emu("up", "--slot", "lots", *place.options).returncode == 2
    assert "--slot: 5120 bytes is not" in place.emu("up", "--slot", "5KiB", *place.options).stderr
    assert place.emu("--version").stdout == place.emu("version").stdout
    assert "none of s3fifo" in place.emu("up", "--eviction", "random", *place.options).stderr
    assert place.left() == []
